"""Stateful objects: modules, optimizers and other values of a state dict that have a state dict of their own."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parameter import is_lazy

from dsq_ckpt.api.joined_models import join_models
from dsq_ckpt.api.module_placeholders import allow_unexpected_keys
from dsq_ckpt.core.arguments import expect
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.quantization.groups import find_by_suffix, is_optimizer_key, layer_types

_LEAVES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.Tensor, type)

_UNINITIALIZED = "not initialized, as its module has seen no batch yet: call the model with one"


def as_state_dict(value: Any, call: str) -> dict[str, Any]:
    """Return a state dict as it is, or the state dict of a module.

    Args:
        value: argument of the user.
        call: the call as a user writes it, for the message.

    Raises:
        ConfigError: `value` is neither.
    """
    if isinstance(value, nn.Module):
        return get_state_dict(value)
    expect("state_dict", value, MutableMapping, f"a nested dict of tensors and plain data, or a module: {call}")
    state_dict: dict[str, Any] = value
    return state_dict


def get_state_dict(value: nn.Module | Stateful) -> dict[str, Any]:
    """Call `state_dict` of a module or of another object of the user."""
    with in_user_code():
        return value.state_dict()


def load_into(
    value: nn.Module | Stateful, state: dict[str, Any], directory: str | os.PathLike[str],
    offered: Collection[str] = (),
) -> set[str]:
    """Call `load_state_dict` of a module or of another object of the user.

    Returns:
        The keys among `offered` that the module did not expect.
    """
    is_module = isinstance(value, nn.Module)
    with allow_unexpected_keys(value, offered, directory) as unexpected, in_user_code(loads_module=is_module):
        value.load_state_dict(state)
    return unexpected


def expand_stateful(state: dict[Any, Any], loads: bool = False) -> dict[Any, Any]:
    """Replace modules, optimizers and other stateful objects at the top level by their state dicts, as DCP does.

    With `loads`, modules on the meta device are refused.
    """
    if not any(isinstance(value, Stateful) for value in state.values()):
        return state
    expanded = {key: get_state_dict(value) if isinstance(value, Stateful) else value for key, value in state.items()}
    for key, value in state.items() if loads else ():
        if isinstance(value, nn.Module):
            refuse_meta(expanded[key])
    return expanded


def find_saved_model(value: Any, state: Mapping[Any, Any]) -> nn.Module | None:
    """Return the module that is saved, several modules as one, or None if other entries may have the names of weights.

    Such entries are matrices in dicts or lists, other than an optimizer's. A single tensor has a name of its own. With
    several modules, the keys of the state dict count as parts of names.

    Args:
        value: argument of the user: a state dict or a module.
        state: its state dict.
    """
    if isinstance(value, nn.Module):
        return value
    modules = [(str(key), value) for key, value in state.items() if isinstance(value, nn.Module)]
    if not modules:
        return None
    other_names = [
        name for key, entry in state.items() if not is_optimizer_key(str(key))
        for name in _matrix_names(str(key), entry)
    ]
    if len(modules) == 1:
        names = {strip_wrappers(name) for name in get_state_dict(modules[0][1])}
        return None if other_names or not names.isdisjoint(map(str, state)) else modules[0][1]
    model = join_models(modules)
    types = layer_types(model) if other_names else {}
    return None if any(find_by_suffix(name, types) is not None for name in other_names) else model


def _matrix_names(name: str, value: Any) -> Iterator[str]:
    """Yield the names of float tensors of two or more dimensions in dicts or lists."""
    pending, visited = [(name, value)] if isinstance(value, Mapping | list | tuple) else [], set[int]()
    while pending:
        name, node = pending.pop()
        if id(node) in visited:  # a cycle, which `refuse_cycles` reports later
            continue
        visited.add(id(node))
        for key, entry in node.items() if isinstance(node, Mapping) else enumerate(node):
            if isinstance(entry, Mapping | list | tuple):
                pending.append((f"{name}.{key}", entry))
            elif isinstance(entry, torch.Tensor) and entry.ndim > 1 and entry.is_floating_point():
                yield f"{name}.{key}"


def warn_of_nested_stateful(state: dict[Any, Any], rank: int) -> None:
    """Warn of stateful objects below the top level: DCP pickles them, and a load would not change them.

    Args:
        state: state dict after `expand_stateful`, without cycles.
        rank: this process's rank; rank 0 warns.
    """
    for name, value in _nested_stateful(state):
        warn(
            f"'{name}' is a {type(value).__name__} below the top level of the state dict, where DCP takes it for an "
            "object: a save pickles it, and a load puts another one there, and leaves this one as it is. Put its "
            "state_dict() there, or it at the top level", rank=rank
        )


def _nested_stateful(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield names and values of stateful objects in nested dicts, lists and tuples."""
    entries = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in entries:
        if isinstance(value, _LEAVES):
            continue
        if isinstance(value, Mapping | list | tuple):
            yield from _nested_stateful(value, (*path, str(key)))
        elif isinstance(value, Stateful):
            yield ".".join((*path, str(key))), value


def refuse_meta(state: Mapping[str, Any]) -> None:
    """Raise an error if a tensor of a module's state dict has no memory to load into.

    Raises:
        LoadFailed: a tensor is on the meta device, or is an uninitialized (lazy) parameter or buffer.
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
    """Raise an error if a parameter or buffer of a module is uninitialized (lazy).

    Raises:
        ConfigError: one is.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(f"'{name}' of the model is {_UNINITIALIZED} before it is saved or loaded")
