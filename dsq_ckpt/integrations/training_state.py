"""Models and optimizers as one nested state dict, by fully qualified names, and back.

Optimizers are taken as they are, without a step that would initialize what they do not have: parameters that are frozen
or were never used have no state, and get none in a restart. FSDP2's sharded tensors stay sharded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dsq_ckpt.api.checks import initialize_state, reset_on_failure
from dsq_ckpt.api.joined_models import join_models
from dsq_ckpt.api.loading import load
from dsq_ckpt.api.module_placeholders import ModulePlaceholders, allow_unexpected_keys, unexpected_keys_error
from dsq_ckpt.api.object_placeholders import refuse_subclass_part
from dsq_ckpt.api.optimizer_state import TORCH_KEYS, extra_entries, join_state, split_state
from dsq_ckpt.convert.export import OpenedCheckpoint
from dsq_ckpt.core.hints import name_hint
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.nesting import Nesting, Path, Step, set_entry
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.tensor_subclasses import find_class_key
from dsq_ckpt.distributed.comm import communicator, run_on_all_ranks
from dsq_ckpt.engine.chain import describe_base_loss
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.gradients.sensitivity import get_named_parameters
from dsq_ckpt.storage.refinement import RefinementOption

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Options of parameter groups that schedules keep too, in the order of the groups."""


class _Placeholders(NamedTuple):
    """Places for what was saved.

    Attributes:
        tensors: the state dict to be filled.
        state: one with the same tensors and all other values.
        offered: names that models need not take, by their keys.
        warnings: what differs from what was saved.
        refinement: how to load.
    """

    tensors: dict[str, Any]
    state: dict[str, Any]
    offered: Mapping[tuple[Any, ...], Collection[str]]
    warnings: list[str]
    refinement: RefinementOption


class TrainingState:
    """Models and optimizers under the keys `model`, `model_1`, ..., `optimizer`, `optimizer_1`, ... of a state dict.

    Args:
        models: modules, wrapped and sharded as they are trained.
        optimizers: optimizers of their parameters.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()) -> None:
        self._models = {_key("model", number): model for number, model in enumerate(models)}
        self._optimizers = {_key("optimizer", number): one for number, one in enumerate(optimizers)}

    @property
    def model(self) -> nn.Module | None:
        """The models as one, by the names that their tensors have in the state of optimizers too."""
        models = [(_prefix(key), model) for key, model in self._models.items()]
        return join_models(models) if models else None

    def collect(self) -> dict[str, Any]:
        """Return the state dict, whose tensors are those of models and optimizers.

        Raises:
            ConfigError: an optimizer has a parameter that is not a model's.
        """
        self._reshard()
        parameters = self._parameters()
        with in_user_code():  # hooks of modules
            state: dict[str, Any] = {key: get_model_state_dict(model) for key, model in self._models.items()}
        return state | {key: _by_name(one, _names(one, parameters)) for key, one in self._optimizers.items()}

    def restore(self, directory: str | os.PathLike[str], *, told: bool = False) -> None:
        """Load the models and optimizers from a checkpoint, in place; collective.

        Tensors of models take the dtypes that the models have now, with a warning, as when a plain state is loaded.

        Args:
            directory: the checkpoint.
            told: its models were restored before, with all warnings.

        Raises:
            LoadFailed: the checkpoint has other tensors or parameters, or no optimizer.
            ConfigError: an optimizer has a parameter that is not a model's.
            DSQError: the checkpoint cannot be read.
        """
        self._reshard()
        comm = communicator(None)
        with ExitStack() as stack:
            for optimizer in self._optimizers.values():
                if not optimizer.state:
                    stack.enter_context(reset_on_failure(optimizer))
            found = run_on_all_ranks(comm, lambda: self._placeholders(directory), LoadFailed)
            for text in () if told else found.warnings:
                warn(text, rank=comm.rank)
            load(found.tensors, directory, refinement=found.refinement, allow_cast=True)
            run_on_all_ranks(comm, lambda: self._fill(directory, found), LoadFailed)

    def _placeholders(self, directory: str | os.PathLike[str]) -> _Placeholders:
        parameters = self._parameters()
        told: dict[str, Any] = {}
        for key, model in self._models.items():
            with in_user_code():
                told[key] = get_model_state_dict(model)
        with OpenedCheckpoint(directory, False, None) as opened:
            nesting = opened.paths
            if nesting is None or not all(key in {path[0] for path in nesting.values()} for key in self._models):
                raise LoadFailed(f"'{directory}' is no checkpoint of a model that this integration saved")
            modules: dict[tuple[Any, ...], nn.Module] = {(key,): model for key, model in self._models.items()}
            placeholders = ModulePlaceholders(modules, told, nesting, opened.tensors)
            placeholders.add_placeholders([placeholders.unexpected_keys])
            flat: dict[str, Any] = flatten_state_dict(told)[0]
            stored = {name: path for name, path in nesting.items() if path[0] in self._models}
            warnings = _same_tensors(directory, flat, stored, opened)
            manifest = opened.checkpoint.manifest
            if dropped := manifest.refinement == "dropped":
                warnings.append(describe_base_loss(opened.checkpoint.directory, manifest))
            for key in self._optimizers:
                if nesting.below((key,)) is None:
                    raise LoadFailed(
                        f"'{directory}' has no '{key}', so training cannot go on from it: was it saved with "
                        "save_only_model? Load its model alone, from an export of it (`dsq export --part model`)"
                    )
                stored |= {name: path for name, path in nesting.items() if path[0] == key}
            whole = self._of_classes(stored, nesting, parameters)
            stored = {name: path for name, path in stored.items() if find_class_key(path, nesting) is None}
            asks = any(path[0] in self._optimizers and path[1] not in TORCH_KEYS for path in stored.values())
            more = self._told_beside(parameters) if asks else {}
            for name, path in stored.items():
                if name not in opened.tensors:
                    flat[name] = opened.object(name, allow_pickle=False)
                elif path[0] in self._optimizers:
                    shape = torch.Size(opened.tensors[name]["shape"])
                    like = parameters.get(str(path[2])) if path[1] == "state" else more.get(name)
                    flat[name] = _empty(like, shape, opened.dtype(name))
            tensors = {name: flat[name] for name in stored if name in opened.tensors}
            empty, nesting.empty = nesting.empty, None
            filled = nesting.unflatten(tensors)
            nesting.empty = [path for path in empty or () if path[0] in (*self._models, *self._optimizers)]
            everything = nesting.unflatten({name: flat[name] for name in stored})
            for steps, tensor in whole:
                set_entry(filled, steps, tensor)
                set_entry(everything, steps, tensor)
            return _Placeholders(filled, everything, placeholders.offered_keys, warnings, False if dropped else "auto")

    def _told_beside(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Return the tensors that optimizers tell beside the state of parameters, by flat names."""
        own = {key: extra_entries(_by_name(one, _names(one, parameters))) for key, one in self._optimizers.items()}
        return {name: value for name, value in flatten_state_dict(own)[0].items() if isinstance(value, torch.Tensor)}

    def _of_classes(
        self, stored: Mapping[str, Path], nesting: Nesting, parameters: Mapping[str, nn.Parameter]
    ) -> list[tuple[list[Step], torch.Tensor]]:
        """Return the tensors of an optimizer's state whose class is not torch's own, with their places.

        Only the optimizer can make them. One that has no state yet makes it by a step that changes nothing.
        """
        found = dict[Path, tuple[list[Step], torch.Tensor]]()
        for name, path in stored.items():
            if (deep := find_class_key(path, nesting)) is not None:
                optimizer = self._optimizers.get(str(path[0]))
                if optimizer is not None and not optimizer.state:
                    initialize_state(optimizer)
                own = {} if optimizer is None else _by_name(optimizer, _names(optimizer, parameters))["state"]
                tensor = own.get(path[2], {}).get(path[3]) if deep == 4 else None
                if tensor is None:
                    refuse_subclass_part(name, path, nesting)
                else:
                    found[path[:deep]] = nesting.steps(path[:deep]), tensor
        return list(found.values())

    def _fill(self, directory: str | os.PathLike[str], found: _Placeholders) -> None:
        parameters, state = self._parameters(), found.state
        for key, model in self._models.items():
            unexpected = allow_unexpected_keys(model, found.offered.get((key,), ()), directory)
            with unexpected as names, in_user_code(loads_module=True):
                set_model_state_dict(model, state[key])
            if names:
                raise unexpected_keys_error(sorted(names), directory)
        for key, optimizer in self._optimizers.items():
            by_number = _by_number(state[key], optimizer, _names(optimizer, parameters), directory)
            with in_user_code():
                optimizer.load_state_dict(by_number)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all models by names that no two of them share; a tied one has several."""
        found: dict[str, nn.Parameter] = {}
        for key, model in self._models.items():
            prefix = _prefix(key)
            found |= {f"{prefix}.{name}" if prefix else name: own for name, own in get_named_parameters(model).items()}
        return found

    def _reshard(self) -> None:
        """Bring back sharded parameters: after an evaluation under `no_grad` FSDP2 keeps the root gathered."""
        for model in self._models.values():
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _key(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"


def _prefix(key: str) -> str:
    """Return the name before those of a model's parameters."""
    return "" if key == "model" else key


def _names(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, by parameter group."""
    known: dict[int, str] = {}
    for name, parameter in parameters.items():
        known.setdefault(id(parameter), name)
    groups = [group["params"] for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        for parameter in group:
            if id(parameter) not in known:
                raise ConfigError(
                    f"parameter group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                    "is not the model's; make the optimizer from the parameters of the model that is trained"
                )
    return [[known[id(parameter)] for parameter in group] for group in groups]


def _by_name(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state dict with names in place of the numbers of parameters."""
    with in_user_code():
        plain, more = split_state(optimizer.state_dict(), type(optimizer).__name__)
    order = [name for group in names for name in group]
    groups = zip(plain["param_groups"], names, strict=True)
    return {
        **more,
        "state": {order[number]: entry for number, entry in plain["state"].items()},
        "param_groups": [{**group, "params": list(own)} for group, own in groups],
    }


def _by_number(
    stored: Mapping[str, Any], optimizer: Optimizer, names: Sequence[Sequence[str]], directory: object
) -> dict[str, Any]:
    """Return a stored state dict for `optimizer`, whose groups must have the same parameters, in any order.

    Raises:
        LoadFailed: they do not.
    """
    saved = stored["param_groups"]
    unused = list(range(len(saved)))
    order: list[int | None] = []
    for own in names:
        order.append(next((number for number in unused if set(saved[number]["params"]) == set(own)), None))
        unused = [number for number in unused if number != order[-1]]
    if lacking := sorted({*unused, *(number for number, found in enumerate(order) if found is None)}):
        number = lacking[0]
        before = set(saved[number]["params"]) if number in unused else set()
        now = set(names[number]) if number < len(names) and order[number] is None else set()
        name = min(before ^ now, default="no parameter at all")
        raise _changed(
            directory, f"'{directory}': '{name}' {'was' if name in before else 'was not'} in parameter group {number} "
            f"of the optimizer when this was saved, and {'is' if name in now else 'is not'} now; make the optimizer "
            "with the groups that it had"
        )
    found = [saved[number] for number in order if number is not None]
    for option in _RATES:
        if (rates := [group.get(option) for group in found]) != [group.get(option) for group in saved]:
            raise LoadFailed(
                f"'{directory}': parameter groups were saved in another order, and have different values of "
                f"'{option}' ({rates}), which schedules keep by the order of groups; make the optimizer with the order "
                "that it had"
            )
    place = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = [{**group, "params": [place[name] for name in own]} for group, own in zip(found, names, strict=True)]
    state = {place[name]: entry for name, entry in stored["state"].items()}
    return join_state({"state": state, "param_groups": groups}, extra_entries(stored))


def _empty(like: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor to load into, placed and sharded as its parameter, or the one before, if it has that shape."""
    if like is not None and like.shape == shape:
        return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def _same_tensors(
    directory: object, own: Mapping[str, Any], stored: Mapping[str, Any], opened: OpenedCheckpoint
) -> list[str]:
    """Compare names, shapes and dtypes of the models' tensors with those that are stored; return what to warn of.

    Raises:
        LoadFailed: names or shapes differ.
    """
    if missing := sorted(own.keys() - stored.keys()):
        hint = name_hint(missing[0], stored)
        raise _changed(directory, f"'{directory}' has no '{missing[0]}', which the model has{hint}")
    if unknown := sorted(stored.keys() - own.keys()):
        raise _changed(directory, f"'{directory}' has '{unknown[0]}', which the model does not have")
    cast = []
    for name, value in own.items():
        if name in opened.tensors and isinstance(value, torch.Tensor):
            shape, dtype = tuple(opened.tensors[name]["shape"]), opened.dtype(name)
            if shape != tuple(value.shape):
                text = f"'{directory}': '{name}' is of shape {shape}, the model's of {tuple(value.shape)}"
                raise _changed(directory, text)
            if dtype != value.dtype:
                cast.append(f"'{name}' as {dtype}, which is {value.dtype} now")
    if not cast:
        return []
    return [f"'{directory}' has {len(cast)} tensor(s) of another dtype than the model, which are cast: {cast[0]}"]


def _changed(directory: object, text: str) -> LoadFailed:
    """Return the error about a model or an optimizer that is not the one that was saved, with the way to go on."""
    return LoadFailed(
        f"{text}{'' if text.endswith('?') else '.'} A changed model goes on from the weights, with a fresh optimizer: "
        f"export them (`dsq export {directory} plain/model.safetensors --part model`), load them into the model (as by "
        "from_pretrained), and train it into another directory"
    )
