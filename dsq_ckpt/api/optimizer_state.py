"""The complete state dict of an optimizer, with names of parameters as keys.

torch's functions for it handle `state` and `param_groups` alone: they drop other keys of a state dict (a count of all
steps), and fail if `state` has entries that do not belong to a parameter (the `k` of MADGRAD). Here, such extra entries
bypass torch, and are loaded as in the optimizer's own state dict, with numbers of parameters in place of names.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _state_dict_fn,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FlatParameter
from torch.optim import Optimizer

from dsq_ckpt.core.checksums import quote
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.gradients.sensitivity import get_named_parameters

PARAMETERLESS_STATE = "state_of_no_parameter"
"""Key of the entries of `state` that belong to no parameter; among parameters, their names could be ambiguous."""
TORCH_KEYS = ("state", "param_groups")
"""Keys of an optimizer's state dict that torch's functions handle."""
Tree = dict[Any, Any]
_ADVICE = (
    "Save and load {'model': model, 'optimizer': optimizer} by dsq_ckpt.save and dsq_ckpt.load, which keep what has "
    "strings or numbers as keys"
)


def get_optimizer_state(
    model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the result of torch's `get_optimizer_state_dict`, with the optimizer's extra entries.

    Raises:
        ConfigError: the optimizer's state dict has another form than that of torch's optimizers.
    """
    proxy = OptimizerProxy(optimizer)
    return {**get_optimizer_state_dict(model, proxy.as_torch_argument(), options=options), **proxy.extra}


def set_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], options: StateDictOptions | None = None
) -> None:
    """Load the result of `get_optimizer_state` into an optimizer; extra entries that it does not have are kept.

    Raises:
        ConfigError: the optimizer's state dict has another form than that of torch's optimizers.
    """
    torch_state, parameter_states = {key: state[key] for key in TORCH_KEYS}, state["state"]
    with require_gradients(model, parameter_states):
        dropped = {
            name: parameter_states[name] for name, parameter in get_named_parameters(model).items()
            if name in parameter_states and not parameter.requires_grad
        }
        proxy = OptimizerProxy(optimizer, extra_entries(state), dropped)
        set_optimizer_state_dict(model, proxy.as_torch_argument(), torch_state, options=options)


@contextmanager
def require_gradients(model: nn.Module, names: Container[str]) -> Iterator[None]:
    """Set `requires_grad` of frozen parameters temporarily, since torch drops the state of parameters without it.

    Args:
        model: the module with the parameters.
        names: names of parameters that have state; FSDP1's flat parameters, which have other names, always count.
    """
    parameters = get_named_parameters(model)
    with_state = [
        parameter for name, parameter in parameters.items() if name in names or isinstance(parameter, FlatParameter)
    ]
    frozen = [parameter for parameter in with_state if not parameter.requires_grad and _can_require_grad(parameter)]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _can_require_grad(parameter: torch.Tensor) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def extra_entries(state: Mapping[Any, Any]) -> Tree:
    """Return the entries of an optimizer's state dict other than `state` and `param_groups`."""
    return {key: value for key, value in state.items() if key not in TORCH_KEYS}


def split_state(state: Mapping[Any, Any], kind: str) -> tuple[Tree, Tree]:
    """Split an optimizer's state dict into the part that torch's functions handle, in new dicts, and the extra entries.

    Args:
        state: the state dict.
        kind: name of the optimizer's class, for the message.

    Raises:
        ConfigError: the state dict has another form than that of torch's optimizers.
    """
    if not all(key in state for key in TORCH_KEYS):
        raise ConfigError(
            f"{kind}.state_dict() has {quote(sorted(map(str, state)))} in place of 'state' and 'param_groups', which "
            f"tell what belongs to which parameter. {_ADVICE}"
        )
    numbers = {number for group in state["param_groups"] for number in group["params"]}
    parameterless = {key: value for key, value in state["state"].items() if key not in numbers}
    torch_state = {
        "state": {key: value for key, value in state["state"].items() if key in numbers},
        "param_groups": state["param_groups"],
    }
    return torch_state, {**extra_entries(state), **({PARAMETERLESS_STATE: parameterless} if parameterless else {})}


def join_state(torch_state: Mapping[Any, Any], extra: Mapping[Any, Any]) -> Tree:
    """Invert `split_state`."""
    extra = dict(extra)
    return {**torch_state, "state": {**torch_state["state"], **extra.pop(PARAMETERLESS_STATE, {})}, **extra}


def get_parameter_states(optimizer: Optimizer) -> Tree:
    """Return the state of an optimizer's parameters, by parameter.

    An optimizer around others may have none of it in `state`, such as Lookahead of timm: theirs counts then. Its state
    dict does not, as creating that may wait for other ranks.
    """
    outer, *inner = (
        {key: value for key, value in nested_optimizer.state.items() if isinstance(key, torch.Tensor)}
        for nested_optimizer in list_nested_optimizers(optimizer)
    )
    return outer or {key: value for states in inner for key, value in states.items()}


def list_nested_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those that are attributes of it, or of one of these."""
    nested = [optimizer]
    for nested_optimizer in nested:
        attributes = (value for value in vars(nested_optimizer).values() if isinstance(value, Optimizer))
        nested.extend(value for value in attributes if not any(value is other for other in nested))
    return nested


class OptimizerProxy:
    """Proxy of an optimizer that shows torch's functions the part of its state dict that they handle.

    Args:
        optimizer: the optimizer; all attributes but `state`, `state_dict` and `load_state_dict` are its own.
        extra_to_load: extra entries that are loaded together with torch's part.
        dropped: states, by parameter name, that torch does not load since the parameters cannot require a gradient
            (such as those created in inference mode).

    Attributes:
        extra: extra entries of the last `state_dict`.
    """

    def __init__(
        self, optimizer: Optimizer, extra_to_load: Mapping[Any, Any] | None = None,
        dropped: Mapping[str, Any] | None = None,
    ) -> None:
        self._optimizer, self._extra_to_load, self._dropped = optimizer, dict(extra_to_load or {}), dict(dropped or {})
        self.extra = Tree()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @property
    def state(self) -> Tree:
        """State of parameters; torch initializes the optimizer before a load if it is empty."""
        return get_parameter_states(self._optimizer)

    def step(self, closure: None = None) -> None:
        """Take the step by which torch initializes the state; one around another keeps its counts and rates."""
        if len(list_nested_optimizers(self._optimizer)) == 1:
            self._optimizer.step(closure=closure)
            return
        attributes = vars(self._optimizer)
        settings = {key: value for key, value in attributes.items() if isinstance(value, int | float | str | None)}
        try:
            self._optimizer.step()  # some take no closure
        finally:
            attributes.update(settings)

    def as_torch_argument(self) -> tuple[Optimizer]:
        """Return a tuple of this proxy: torch checks the class of a single optimizer, but not of several."""
        return (cast(Optimizer, self),)

    def state_dict(self) -> Tree:
        """Return the part of the optimizer's state dict that torch's functions handle.

        Raises:
            ConfigError: the state dict has another form than that of torch's optimizers.
        """
        state = _state_dict_fn(self._optimizer, "state_dict")()
        kind = type(self._optimizer).__name__
        torch_state, self.extra = split_state(state, kind)
        for value in torch_state["state"].values():
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{kind}.state_dict() has {type(value).__name__} in place of a dict as the state of a parameter. "
                    f"{_ADVICE}"
                )
        return torch_state

    def load_state_dict(self, state_dict: Tree) -> None:
        """Load the state dict of torch's functions into the optimizer, together with the extra entries."""
        self.state_dict()
        current_extra = {key: value for key, value in self.extra.items() if key != PARAMETERLESS_STATE}
        numbers = {
            name: number for number, name in
            enumerate(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        }
        dropped = {name: state for name, state in self._dropped.items() if name in numbers}
        numbered = {
            "state": {numbers.get(key, key): value for key, value in {**dropped, **state_dict["state"]}.items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]}
                for group in state_dict["param_groups"]
            ],
        }
        complete = join_state(numbered, {**current_extra, **self._extra_to_load})
        load = _state_dict_fn(self._optimizer, "load_state_dict")
        if isinstance(load, functools.partial):  # the method of the class, where torch has replaced the instance's
            load(state_dict=complete)
        else:
            load(complete)
