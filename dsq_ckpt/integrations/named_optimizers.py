"""State dicts of optimizers with names of parameters as keys, as Trainer and Accelerate save them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dsq_ckpt.api.optimizer_state import extra_entries, join_state, split_state
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.errors import ConfigError, LoadFailed

_RATE_OPTIONS = ("lr", "initial_lr", "max_lr", "min_lr")
"""Options of parameter groups that schedulers keep too, in the order of the groups."""


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
    """Return an optimizer's state dict with names of parameters in place of numbers."""
    names = get_parameter_names(optimizer, parameters)
    with in_user_code():
        torch_state, extra_state = split_state(optimizer.state_dict(), type(optimizer).__name__)
    names_by_number = [name for group in names for name in group]
    groups = zip(torch_state["param_groups"], names, strict=True)
    return {
        **extra_state,
        "state": {names_by_number[number]: entry for number, entry in torch_state["state"].items()},
        "param_groups": [{**group, "params": list(group_names)} for group, group_names in groups],
    }


def get_numbered_state(
    stored_state: Mapping[str, Any], names: Sequence[Sequence[str]], directory: object
) -> dict[str, Any]:
    """Convert a stored state dict for an optimizer whose parameter groups may be in another order.

    Args:
        stored: state dict with names of parameters.
        names: names of the optimizer's parameters, by parameter group.
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
        {**group, "params": [numbers[name] for name in group_names]}
        for group, group_names in zip(matched_groups, names, strict=True)
    ]
    state = {numbers[name]: entry for name, entry in stored_state["state"].items()}
    return join_state({"state": state, "param_groups": groups}, extra_entries(stored_state))


def mismatch_error(directory: object, text: str) -> LoadFailed:
    """Return the error about a changed model or optimizer, with advice on how to continue."""
    return LoadFailed(
        f"{text}{'' if text.endswith('?') else '.'} A changed model goes on from the weights, with a fresh optimizer: "
        f"export them (`dsq export {directory} plain/model.safetensors --part model`), load them into the model (as by "
        "from_pretrained), and train it into another directory"
    )
