"""The state dict of an optimizer by names of parameters, with all that the optimizer tells.

torch's functions for it take `state` and `param_groups`: what some optimizers tell beside these (a count of all steps)
they drop, and they fail at entries of `state` that are of no parameter (the `k` of MADGRAD). Such entries go around
torch here, and an optimizer is given what it told, with numbers in place of names, as in its own state dict.
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

from dsq_ckpt.core.unchanged import named
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.gradients.sensitivity import names_of

OF_NO_PARAMETER = "state_of_no_parameter"
"""Key of the entries of an optimizer's `state` that are of no parameter, whose names could be those of parameters."""
OF_TORCH = ("state", "param_groups")
"""Keys of an optimizer's state dict that torch takes."""
Tree = dict[Any, Any]


def get_optimizer_state(
    model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return what `get_optimizer_state_dict` of torch returns, and what the optimizer tells beside that.

    Raises:
        ConfigError: its state dict is of another form than that of torch's optimizers.
    """
    told = _Told(optimizer)
    return {**get_optimizer_state_dict(model, told.for_torch(), options=options), **told.beside}


def set_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], options: StateDictOptions | None = None
) -> None:
    """Give an optimizer what `get_optimizer_state` returned; what it tells and is not there stays as it is.

    Raises:
        ConfigError: its state dict is of another form than that of torch's optimizers.
    """
    of_torch, of_parameters = {key: state[key] for key in OF_TORCH}, state["state"]
    with needing_gradients(model, of_parameters):
        dropped = {
            name: of_parameters[name] for name, one in names_of(model).items()
            if name in of_parameters and not one.requires_grad
        }
        told = _Told(optimizer, beside(state), dropped)
        set_optimizer_state_dict(model, told.for_torch(), of_torch, options=options)


@contextmanager
def needing_gradients(model: nn.Module, names: Container[str]) -> Iterator[None]:
    """Let frozen parameters need a gradient for a while: torch drops the state of those that need none.

    Args:
        model: has the parameters.
        names: of parameters that have state; FSDP1's flat parameters, whose names are others, always count as these.
    """
    with_state = [one for name, one in names_of(model).items() if name in names or isinstance(one, FlatParameter)]
    frozen = [one for one in with_state if not one.requires_grad and _may_need_gradients(one)]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _may_need_gradients(parameter: torch.Tensor) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def beside(state: Mapping[Any, Any]) -> Tree:
    """Return what is beside state and groups in the state dict of an optimizer."""
    return {key: value for key, value in state.items() if key not in OF_TORCH}


def split_state(state: Mapping[Any, Any], kind: str) -> tuple[Tree, Tree]:
    """Return what torch knows of an optimizer's own state dict, in dicts of their own, and what is beside that.

    Args:
        state: the state dict.
        kind: class of the optimizer.

    Raises:
        ConfigError: it is of another form than that of torch's optimizers.
    """
    if not all(key in state for key in OF_TORCH):
        raise ConfigError(
            f"{kind}.state_dict() has {named(sorted(map(str, state)))} in place of 'state' and 'param_groups', which "
            "tell what belongs to which parameter. Save and load {'model': model, 'optimizer': optimizer} by "
            "dsq_ckpt.save and dsq_ckpt.load, which keep what has strings or numbers as keys"
        )
    known = {number for group in state["param_groups"] for number in group["params"]}
    of_none = {key: value for key, value in state["state"].items() if key not in known}
    found = {
        "state": {key: value for key, value in state["state"].items() if key in known},
        "param_groups": state["param_groups"],
    }
    return found, {**beside(state), **({OF_NO_PARAMETER: of_none} if of_none else {})}


def joined_state(of_torch: Mapping[Any, Any], more: Mapping[Any, Any]) -> Tree:
    """Invert `split_state`."""
    more = dict(more)
    return {**of_torch, "state": {**of_torch["state"], **more.pop(OF_NO_PARAMETER, {})}, **more}


class _Told:
    """An optimizer as torch's functions know one.

    Args:
        optimizer: has all attributes but two methods.
        given: to be loaded beside what torch loads.
        dropped: state by names of parameters that torch does not load, since they cannot need a gradient (as those made
            in inference mode).

    Attributes:
        beside: what the optimizer told beside what torch takes.
    """

    def __init__(
        self, optimizer: Optimizer, given: Mapping[Any, Any] | None = None, dropped: Mapping[str, Any] | None = None
    ) -> None:
        self._optimizer, self._given, self._dropped = optimizer, dict(given or {}), dict(dropped or {})
        self.beside = Tree()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @property
    def state(self) -> Tree:
        """State of parameters; torch makes it before a load if there is nothing."""
        return {key: value for key, value in self._optimizer.state.items() if isinstance(key, torch.Tensor)}

    def for_torch(self) -> tuple[Optimizer]:
        """Return it as one of several optimizers, of which torch does not ask that their class is torch's."""
        return (cast(Optimizer, self),)

    def state_dict(self) -> Tree:
        """Return what torch takes of the optimizer's state dict."""
        state = _state_dict_fn(self._optimizer, "state_dict")()
        of_torch, self.beside = split_state(state, type(self._optimizer).__name__)
        return of_torch

    def load_state_dict(self, state_dict: Tree) -> None:
        """Give the optimizer what torch made for it, with the rest."""
        self.state_dict()
        own = {key: value for key, value in self.beside.items() if key != OF_NO_PARAMETER}
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
        everything = joined_state(numbered, {**own, **self._given})
        load = _state_dict_fn(self._optimizer, "load_state_dict")
        if isinstance(load, functools.partial):  # the method of the class, where torch has put another in its place
            load(state_dict=everything)
        else:
            load(everything)
