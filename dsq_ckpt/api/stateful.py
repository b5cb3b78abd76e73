"""Modules, optimizers and other objects with a state dict of their own, as values of a state dict."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parameter import is_lazy

from dsq_ckpt.api.buffers import leaving
from dsq_ckpt.api.several import as_one
from dsq_ckpt.core.arguments import expect
from dsq_ckpt.core.interrupts import in_users_function
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.wrappers import unwrapped
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.quantization.groups import in_tree, is_of_optimizers, layer_types

_LEAVES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.Tensor, type)

_UNINITIALIZED = "not initialized, as its module has seen no batch yet: call the model with one"


def state_of(value: Any, call: str) -> dict[str, Any]:
    """Return the state dict that a user gave, or that of a module.

    Args:
        value: argument of the user.
        call: the call as a user writes it, for the message.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, nn.Module):
        return own_state(value)  # with the versions of its modules
    expect("state_dict", value, MutableMapping, f"a nested dict of tensors and plain data, or a module: {call}")
    found: dict[str, Any] = value
    return found


def own_state(value: nn.Module | Stateful) -> dict[str, Any]:
    """Return the state dict that a module, or another object of the user, tells."""
    with in_users_function():
        return value.state_dict()


def give_state(
    value: nn.Module | Stateful, state: dict[str, Any], directory: str | os.PathLike[str],
    offered: Collection[str] = (),
) -> set[str]:
    """Give a module, or another object of the user, what was loaded from a directory.

    Returns:
        What it did not take of that which it was offered.
    """
    with leaving(value, offered, directory) as left, in_users_function(loads_module=isinstance(value, nn.Module)):
        value.load_state_dict(state)
    return left


def told_state(state: dict[Any, Any], loads: bool = False) -> dict[Any, Any]:
    """Return a state dict with the own state dicts of modules, optimizers and the like at its top level, as in DCP."""
    if not any(isinstance(value, Stateful) for value in state.values()):
        return state
    told = {key: own_state(value) if isinstance(value, Stateful) else value for key, value in state.items()}
    for key, value in state.items() if loads else ():
        if isinstance(value, nn.Module):
            refuse_meta(told[key])
    return told


def saved_model(given: Any, state: Mapping[Any, Any]) -> nn.Module | None:
    """Return the module that is saved, or several as one, if nothing beside it may hold weights named like its own.

    These would be matrices in dicts or lists, other than an optimizer's. A tensor beside it has a name of its own. With
    several modules the keys count as parts of names.
    """
    if isinstance(given, nn.Module):
        return given
    modules = [(str(key), value) for key, value in state.items() if isinstance(value, nn.Module)]
    if not modules:
        return None
    beside = [
        name for key, value in state.items() if not is_of_optimizers(str(key)) for name in _matrices(str(key), value)
    ]
    if len(modules) == 1:
        names = {unwrapped(name) for name in own_state(modules[0][1])}
        return None if beside or not names.isdisjoint(map(str, state)) else modules[0][1]
    model = as_one(modules)
    types = layer_types(model) if beside else {}
    return None if any(in_tree(name, types) is not None for name in beside) else model


def _matrices(name: str, value: Any) -> Iterator[str]:
    """Yield the names of float tensors of two or more dimensions in dicts or lists."""
    left, seen = [(name, value)] if isinstance(value, Mapping | list | tuple) else [], set[int]()
    while left:
        name, node = left.pop()
        if id(node) in seen:  # it contains itself, which is refused later
            continue
        seen.add(id(node))
        for key, one in node.items() if isinstance(node, Mapping) else enumerate(node):
            if isinstance(one, Mapping | list | tuple):
                left.append((f"{name}.{key}", one))
            elif isinstance(one, torch.Tensor) and one.ndim > 1 and one.is_floating_point():
                yield f"{name}.{key}"


def warn_of_objects(state: dict[Any, Any], rank: int) -> None:
    """Warn of modules, optimizers and the like that are stored as objects, which a load would not change.

    Args:
        state: with their state dicts in place of those at the top level; it does not contain itself.
        rank: of this process, of which 0 warns.
    """
    for name, value in _stateful(state):
        warn(
            f"'{name}' is a {type(value).__name__} below the top level of the state dict, where DCP takes it for an "
            "object: a save pickles it, and a load puts another one there, and leaves this one as it is. Put its "
            "state_dict() there, or it at the top level", rank=rank
        )


def _stateful(node: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield names and values of what has a state dict of its own, in nested dicts, lists and tuples."""
    entries = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in entries:
        if isinstance(value, _LEAVES):
            continue
        if isinstance(value, Mapping | list | tuple):
            yield from _stateful(value, (*way, str(key)))
        elif isinstance(value, Stateful):
            yield ".".join((*way, str(key))), value


def refuse_meta(state: Mapping[str, Any]) -> None:
    """Refuse the state dict of a module whose tensors are on the meta device, or have no shapes yet, for a load.

    Raises:
        LoadFailed: one of them is, or has none.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and is_lazy(value):
            raise LoadFailed(f"'{name}' of the module is {_UNINITIALIZED} before a load")
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise LoadFailed(
                f"'{name}' of the module is on the meta device, so there is no memory to load it into: make it first, "
                "by module.to_empty(device=...)"
            )


def refuse_uninitialized(module: nn.Module) -> None:
    """Refuse a module some of whose parameters or buffers get their shapes from the first batch, which it has not seen.

    Raises:
        ConfigError: one of them does.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(f"'{name}' of the model is {_UNINITIALIZED} before it is saved or loaded")
