"""Tensors that are not memory of numbers: subclasses that consist of other tensors, and what cannot be stored at all.

The quantized weights of torchao and the states of its 8-bit optimizers report a dtype and a shape that no memory has.
A save names their inner tensors in their place, as `weight.<Int8Tensor>.qdata`, and these are stored exactly. A load
fills the inner tensors of the one that is in the state dict: of the class itself nothing is stored but its name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._utils import _element_size
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dsq_ckpt.core.interrupts import in_users_function
from dsq_ckpt.errors import ConfigError, LoadFailed, SaveFailed, described

_SETTINGS = "<settings>"
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_USUAL = (torch.Tensor, torch.nn.Parameter)
"""Classes of nearly all tensors, which are no subclasses."""
_KNOWN = (DTensor, ShardedTensor, AsyncCollectiveTensor)
"""Tensors that consist of others, which DCP knows."""


def by_parts(state: Any) -> Any:
    """Return nested dicts and lists with inner tensors in place of subclasses; the argument if there are none."""
    if not any(True for _ in _places(state)):
        return state
    if isinstance(state, Mapping):
        return {key: _parts(value) if _consists(value) else by_parts(value) for key, value in state.items()}
    return [_parts(value) if _consists(value) else by_parts(value) for value in state]


def is_part(key: Any) -> bool:
    """Return whether a key of a state dict is the class of a tensor whose inner tensors lie below it."""
    return isinstance(key, str) and key.startswith("<") and key.endswith(">")


def class_in(path: Sequence[Any], names: Container[str]) -> int | None:
    """Return where in a path the class of a tensor is, if it leads to one of its inner tensors, or to its settings.

    A key of the user may look like a class, as `<unk>` of a vocabulary does, but has no settings below it.

    Args:
        path: keys of dicts, and places in lists.
        names: flat names of all that was stored.
    """
    for deep, key in enumerate(path):
        if is_part(key) and ".".join(map(str, (*path[: deep + 1], _SETTINGS))) in names:
            return deep
    return None


def storable(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict to be stored, with inner tensors in place of subclasses.

    Raises:
        SaveFailed: a tensor cannot be stored; the message names it. torch's planning fails on some, without the name.
    """
    state = by_parts(state)
    for fqn, value in flatten_state_dict(state)[0].items():
        checked(fqn, value)
    return state


@contextmanager
def loading(state: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Yield a state dict to load into, with inner tensors in place of subclasses; then put the results into `state`.

    Raises:
        LoadFailed: what was stored has other settings than the tensor whose inner tensors it was loaded into.
    """
    inner = by_parts(state)
    yield inner
    if inner is not state:
        _put_back(state, inner, "")


def checked(fqn: str, value: Any) -> Any:
    """Return a value that is to be stored by this name; it must be a dense tensor of numbers, or no tensor.

    Raises:
        SaveFailed: it is not; the message says what to do.
    """
    usual = type(value) in _USUAL
    if not usual:
        if (reason := partial_sums(value)) is not None:
            raise SaveFailed(f"'{fqn}' {reason}")
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor | ShardedTensor):  # planned by their shards
            return value
        if hasattr(value, "__create_write_items__"):  # these tell their chunks too
            return value
        if isinstance(value, AsyncCollectiveTensor):
            return value.wait()
    if is_lazy(value):
        raise SaveFailed(
            f"'{fqn}' is not initialized, as its module has seen no batch yet: call the model with one before a save"
        )
    if value.layout is not torch.strided:
        raise SaveFailed(f"'{fqn}' has the layout {value.layout}: save its parts, or a dense copy (to_dense())")
    if value.is_nested and type(value) is torch.Tensor:  # one of the layout torch.jagged is of a class of its own
        raise SaveFailed(
            f"'{fqn}' is a nested tensor of the layout torch.strided: save a list of its parts (unbind()), or a nested "
            "tensor of the layout torch.jagged"
        )
    if value.is_quantized or value.dtype in _QUANTIZED:
        raise SaveFailed(
            f"'{fqn}' is of dtype {value.dtype}, which is not supported: save its parts (int_repr(), q_scale(), "
            "q_zero_point()), or a copy by dequantize()"
        )
    if not _is_copied(value.dtype):
        raise SaveFailed(
            f"'{fqn}' is of dtype {value.dtype}, which torch itself cannot copy: save a view of it as torch.uint8"
        )
    if value.is_meta:
        raise SaveFailed(f"'{fqn}' is on the meta device, so there are no values to save; materialize it first")
    if usual:
        return value
    if _consists(value):
        raise SaveFailed(
            f"'{fqn}' is of class {type(value).__name__}, or a part of a distributed tensor of that class, which "
            "consists of other tensors: whole ones, in a dict, are stored by dsq_ckpt.save, async_save and Compressor; "
            "else save these tensors, or a plain copy (dequantize(), where the class has it)"
        )
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and value.numel() and not value.data_ptr():
        raise SaveFailed(
            f"'{fqn}' is of class {type(value).__name__}, which has neither memory of its own nor __tensor_flatten__ "
            "to tell what it consists of: save a plain tensor in its place"
        )
    return value


def partial_sums(value: Any) -> str | None:
    """Return why a value is neither saved nor loaded into, if it is a DTensor that ranks have still to sum up."""
    if not isinstance(value, DTensor) or not any(placement.is_partial() for placement in value.placements):
        return None
    return (
        f"is a DTensor with the placements {list(value.placements)}, of which each rank has a part that is still to be "
        "reduced: redistribute it to Shard or Replicate first, by its redistribute(placements=...)"
    )


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Return whether DCP can plan with a dtype and torch can copy it; bits without a meaning are no such dtype."""
    try:
        _element_size(dtype)
        torch.empty(64, 64, dtype=dtype, device="cpu").t().contiguous()  # large enough for the path of large ones
    except (TypeError, RuntimeError):  # NotImplementedError is one
        return False
    return True


@contextmanager
def object_named(fqn: str) -> Iterator[None]:
    """Name the object that cannot be pickled, or copied, which most are in the same way.

    How that is done is up to it.

    Raises:
        SaveFailed: it cannot.
    """
    try:
        with in_users_function():
            yield
    except Exception as error:
        raise SaveFailed(
            f"'{fqn}' is no tensor, and cannot be stored as an object ({described(error)}): save plain data in its "
            "place, or leave it out"
        ) from error


def memory_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of the tensors that it consists of."""
    if not _consists(tensor):
        return tensor.nbytes
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return sum(memory_of(getattr(tensor, name)) for name in names)


def _consists(value: Any) -> bool:
    """Return whether a value is a tensor that consists of other tensors, unknown to DCP."""
    if type(value) in _USUAL or not isinstance(value, torch.Tensor):
        return False
    return not isinstance(value, _KNOWN) and is_traceable_wrapper_subclass(value)


def refuse_cycles(state: Any) -> None:
    """Refuse a state dict that contains itself.

    Raises:
        ConfigError: one of its dicts or lists does.
    """
    for _ in _places(state):
        pass


def _places(node: Any, way: tuple[tuple[Any, Any], ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the places of subclasses in nested dicts and lists: container and key; `way` are those around `node`."""
    if any(node is outer for outer, _ in way):
        raise ConfigError(
            f"the state dict contains itself: '{'.'.join(str(key) for _, key in way)}' is a dict or list that it lies "
            "in; leave it out"
        )
    entries = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        if isinstance(value, torch.Tensor):
            if _consists(value):
                yield node, key
        elif not isinstance(value, _PLAIN):
            yield from _places(value, (*way, (node, key)))


def _parts(tensor: torch.Tensor) -> Any:
    """Return inner tensors by name, below the name of the class; a single equivalent one has no name of its own."""
    names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name) for name in names}
    if len(names) == 1:
        only = inner[names[0]]
        if (only.shape, only.dtype) == (tensor.shape, tensor.dtype):
            return _parts(only) if _consists(only) else only
    parts = {name: _parts(value) if _consists(value) else value for name, value in inner.items()}
    return {f"<{type(tensor).__name__}>": {**parts, _SETTINGS: json.dumps(_plain(settings), sort_keys=True)}}


def _plain(settings: Any) -> dict[str, str]:
    """Return the attributes of a subclass beside its tensors, as far as they are plain data."""
    if isinstance(settings, list | tuple):
        settings = dict(enumerate(settings))
    found = {}
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        values = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(one, _PLAIN) for one in values):
            found[str(key)] = str(list(value) if isinstance(value, tuple) else value)
    return found


def _put_back(own: Any, loaded: Any, name: str) -> Any:
    """Return the loaded values, with subclasses in their places again; `own` keeps its dicts."""
    if _consists(own):
        _compare(name, own, loaded)
        return own
    if isinstance(own, MutableMapping) and isinstance(loaded, Mapping):
        for key in own:
            own[key] = _put_back(own[key], loaded[key], f"{name}.{key}")
        return own
    if isinstance(own, list) and isinstance(loaded, list):
        return [_put_back(*pair, f"{name}.{place}") for place, pair in enumerate(zip(own, loaded, strict=True))]
    return loaded


def _compare(name: str, tensor: torch.Tensor, loaded: Any) -> None:
    own = f"<{type(tensor).__name__}>"
    if not isinstance(loaded, dict) or own not in loaded:
        return
    try:
        stored = dict(json.loads(loaded[own][_SETTINGS]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise LoadFailed(
            f"'{name.lstrip('.')}': the stored settings of its class {own[1:-1]} do not parse: {error!r}"
        ) from error
    for key, value in _plain(tensor.__tensor_flatten__()[1]).items():  # type: ignore[attr-defined]
        if stored.get(key, value) != value:
            raise LoadFailed(
                f"'{name.lstrip('.')}', of class {own[1:-1]}, was saved with {key} {stored[key]}, and is loaded into "
                f"one with {value}, whose values are of no use now: make the model as it was made when it was saved"
            )
    for key, inner in loaded[own].items():
        if key != _SETTINGS and _consists(getattr(tensor, key)):
            _compare(f"{name}.{key}", getattr(tensor, key), inner)
