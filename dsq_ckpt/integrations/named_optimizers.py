"""State dicts of optimizers with names of parameters as keys, as Trainer and Accelerate save them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsq_ckpt.api.checks import has_state, initialize_state, reset_on_failure
from dsq_ckpt.api.optimizer_state import extra_entries, join_state, split_state
from dsq_ckpt.api.parameter_groups import compare_options
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.nesting import Nesting, Path
from dsq_ckpt.errors import ConfigError, LoadFailed

_RATE_OPTIONS = ("lr", "initial_lr", "max_lr", "min_lr")
"""Options of parameter groups that schedulers keep too, in the order of the groups."""


class OwnEntries:
    """Entries of an optimizer's own state dict, which tell what only the optimizer can know of a checkpoint's entries.

    Args:
        key: key of the optimizer at the top level of the checkpoint.
        optimizer: the optimizer to load into.
        parameters: parameters of the models, by name.
        directory: checkpoint, for error messages.
    """

    def __init__(
        self, key: str, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], directory: object
    ) -> None:
        self._key, self._optimizer, self._parameters, self._directory = key, optimizer, parameters, directory

    @cached_property
    def state(self) -> dict[str, Any]:
        """State dict of the optimizer, which is initialized by a step that changes nothing if need be.

        Raises:
            LoadFailed: the step fails.
        """
        if not has_state(self._optimizer):
            with reset_on_failure(self._optimizer):
                initialize_state(self._optimizer)
        return get_named_state(self._optimizer, self._parameters)

    @cached_property
    def entries(self) -> dict[Path, Any]:
        """Values of `state` by their paths."""
        flat, paths = flatten_state_dict({self._key: self.state})
        return {paths[name]: value for name, value in flat.items()}

    def compare(self, nesting: Nesting) -> list[str]:
        """Return a warning if another class of optimizer was saved.

        Raises:
            LoadFailed: the options are those of another class, and the optimizer has state that was not saved.
        """
        options, kind = compare_options(self._key, self._optimizer, nesting), type(self._optimizer).__name__
        saved_keys: dict[str, set[str]] = {}
        for path in nesting.values():
            if path[:2] == (self._key, "state") and len(path) > 3:
                saved_keys.setdefault(str(path[2]), set()).add(str(path[3]))
        if any(options) and saved_keys:
            state: Mapping[str, Any] = {}
            with suppress(LoadFailed):  # without a step that initializes it, its load_state_dict decides
                state = self.state["state"]
            for name, keys in saved_keys.items():
                own = state.get(name)
                if isinstance(own, Mapping) and (unsaved := sorted(set(map(str, own)) - keys)):
                    raise mismatch_error(
                        self._directory,
                        f"'{self._directory}' has no {quote(unsaved)} in the state of '{name}' in its '{self._key}', "
                        f"which {kind} has: it is of another optimizer",
                    )
        lacking, foreign = options
        if not (lacking and foreign):
            return []
        return [
            f"'{self._key}' of '{self._directory}' has {quote(foreign)} and lacks {quote(lacking)} in its groups, so "
            f"it is of another optimizer than {kind}: learning rate and weight decay are those that were saved, and "
            f"moments may be missing. {_advise(self._directory)}"
        ]

    def create_placeholder(self, path: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor to load an entry of `state` into; None if the sharding of a frozen parameter's is unknown.

        The parameter tells the sharding of a tensor of its shape, and the optimizer's own tensor that of another one.

        Raises:
            LoadFailed: the sharding is unknown, or the optimizer cannot be initialized.
        """
        parameter = self._parameters.get(str(path[2]))
        if not isinstance(parameter, DTensor) or not shape or parameter.shape == shape:
            return create_placeholder(parameter, shape, dtype)
        own = self.entries.get(path)
        if isinstance(own, DTensor):
            return torch.empty_like(own.detach(), dtype=dtype)  # the load refuses another shape
        if isinstance(own, torch.Tensor):  # each rank has all of it
            return create_placeholder(own, shape, dtype)
        if not parameter.requires_grad:
            return None
        raise LoadFailed(
            f"'{self._directory}' has '{path[3]}' in the state of '{path[2]}' in its '{self._key}', which this "
            "optimizer does not have, so that nothing tells how it is sharded: load into one with the options that it "
            "had, or that has it"
        )


def create_placeholder(like: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor to load into, on the device and with the sharding of `like` if `like` has the same shape."""
    if like is not None and like.shape == shape:
        return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def get_parameter_names(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, by parameter group."""
    names_by_id: dict[int, str] = {}
    for name, parameter in parameters.items():
        names_by_id.setdefault(id(parameter), name)
    groups = [group["params"] for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        for parameter in group:
            if id(parameter) not in names_by_id:
                raise ConfigError(
                    f"parameter group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                    "is not the model's; make the optimizer from the parameters of the model that is trained"
                )
    return [[names_by_id[id(parameter)] for parameter in group] for group in groups]


def get_named_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return an optimizer's state dict with names of parameters in place of numbers.

    Raises:
        ConfigError: the optimizer has a parameter that is not the model's, or its `state_dict` fails as it has state of
            tensors that are none of its parameters.
    """
    names = get_parameter_names(optimizer, parameters)
    try:
        with in_user_code():
            torch_state, extra_state = split_state(optimizer.state_dict(), type(optimizer).__name__)
    except KeyError as error:  # of `Optimizer.state_dict`, which looks up the number of each tensor that has state
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        foreign = [key for key in optimizer.state if isinstance(key, torch.Tensor) and id(key) not in own]
        if not foreign:
            raise
        raise ConfigError(
            f"{type(optimizer).__name__} has state of {len(foreign)} tensor(s) that are none of its parameters, the "
            f"first of shape {tuple(foreign[0].shape)}: its parameters were replaced when it had state already, as by "
            "sharding with FSDP2. Clear `optimizer.state` right after that, or make the optimizer then"
        ) from error
    names_by_number = [name for group in names for name in group]
    groups = zip(torch_state["param_groups"], names, strict=True)
    return {
        **extra_state,
        "state": {names_by_number[number]: entry for number, entry in torch_state["state"].items()},
        "param_groups": [{**group, "params": list(group_names)} for group, group_names in groups],
    }


def get_numbered_state(
    stored_state: Mapping[str, Any], names: Sequence[Sequence[str]], own_groups: Sequence[Mapping[str, Any]],
    directory: object,
) -> dict[str, Any]:
    """Convert a stored state dict for an optimizer whose parameter groups may be in another order.

    Args:
        stored: state dict with names of parameters.
        names: names of the optimizer's parameters, by parameter group.
        own_groups: the optimizer's parameter groups, whose options are kept where none was saved.
        directory: checkpoint, for error messages.

    Raises:
        LoadFailed: parameter groups have other parameters; or groups with different rates are in another order.
    """
    saved_groups = stored_state["param_groups"]
    unused = list(range(len(saved_groups)))
    saved_numbers: list[int | None] = []
    for group_names in names:
        matches = (number for number in unused if set(saved_groups[number]["params"]) == set(group_names))
        saved_numbers.append(next(matches, None))
        unused = [number for number in unused if number != saved_numbers[-1]]
    unmatched = [number for number, saved_number in enumerate(saved_numbers) if saved_number is None]
    if mismatches := sorted({*unused, *unmatched}):
        number = mismatches[0]
        saved_names = set(saved_groups[number]["params"]) if number in unused else set()
        current_names = set(names[number]) if number < len(names) and saved_numbers[number] is None else set()
        name = min(saved_names ^ current_names, default="no parameter at all")
        raise mismatch_error(
            directory,
            f"'{directory}': '{name}' {'was' if name in saved_names else 'was not'} in parameter group {number} of the "
            f"optimizer when this was saved, and {'is' if name in current_names else 'is not'} now; make the optimizer "
            "with the groups that it had",
        )
    matched_groups = [saved_groups[number] for number in saved_numbers if number is not None]
    for option in _RATE_OPTIONS:
        if (rates := [group.get(option) for group in matched_groups]) != [group.get(option) for group in saved_groups]:
            raise LoadFailed(
                f"'{directory}': parameter groups were saved in another order, and have different values of "
                f"'{option}' ({rates}), which schedules keep by the order of groups; make the optimizer with the order "
                "that it had"
            )
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = [
        {**own_group, **group, "params": [numbers[name] for name in group_names]}
        for own_group, group, group_names in zip(own_groups, matched_groups, names, strict=True)
    ]
    state = {numbers[name]: entry for name, entry in stored_state["state"].items()}
    return join_state({"state": state, "param_groups": groups}, extra_entries(stored_state))


def mismatch_error(directory: object, text: str) -> LoadFailed:
    """Return the error about a changed model or optimizer, with advice on how to continue."""
    return LoadFailed(f"{text}{'' if text.endswith('?') else '.'} {_advise(directory)}")


def _advise(directory: object) -> str:
    return (
        "A changed model or optimizer goes on from the weights, with a fresh optimizer: export them (`dsq export "
        f"{directory} plain/model.safetensors --part model`), load them into the model (as by from_pretrained), and "
        "train it into another directory"
    )
