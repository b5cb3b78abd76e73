"""Tensor subclasses that consist of inner tensors, and checks for tensors that cannot be stored.

torchao's quantized weights and the states of its 8-bit optimizers report a dtype and a shape that their memory does not
have. A save stores their inner tensors exactly, under names such as `weight.<Int8Tensor>.qdata`. A load fills the inner
tensors of the subclass in the state dict. Only the name of the class is stored.
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
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dsq_ckpt.core.aliases import missing_memory_problem
from dsq_ckpt.core.flat_names import flatten
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.errors import ConfigError, LoadFailed, SaveFailed, described

_SETTINGS = "<settings>"
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_PLAIN_TYPES = (type(None), bool, int, float, str, torch.dtype)
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""Classes of nearly all tensors, which need no further checks."""
_DCP_CLASSES = (DTensor, ShardedTensor, AsyncCollectiveTensor)
"""Classes with inner tensors that DCP handles itself."""


def replace_subclasses(state: Any) -> Any:
    """Return nested dicts and lists with inner tensors in place of subclasses; the argument itself without any."""
    if not any(True for _ in _iter_subclasses(state)):
        return state

    def replace(value: Any) -> Any:
        return _to_inner_tensors(value) if _is_subclass(value) else replace_subclasses(value)

    if isinstance(state, Mapping):
        return {key: replace(value) for key, value in state.items()}
    return [replace(value) for value in state]


def is_class_key(key: Any) -> bool:
    """Return whether a key of a state dict has the form of a class name above inner tensors."""
    return isinstance(key, str) and key.startswith("<") and key.endswith(">")


def find_class_key(path: Sequence[Any], names: Container[str]) -> int | None:
    """Return the position of the class name in the path of an inner tensor or of settings; None for other paths.

    A user's key may have the form of a class name, such as `<unk>` in a vocabulary, but has no settings below it.

    Args:
        path: keys of dicts and indices of lists.
        names: flat names of all stored entries.
    """
    for depth, key in enumerate(path):
        if is_class_key(key) and ".".join(map(str, (*path[: depth + 1], _SETTINGS))) in names:
            return depth
    return None


def find_unpacked(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield name and class of each tensor of a subclass in nested dicts and lists that is a dict of inner tensors."""
    entries = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        if is_class_key(key) and isinstance(value, Mapping) and _SETTINGS in value:
            yield ".".join(map(str, path)), str(key)[1:-1]
        else:
            yield from find_unpacked(value, (*path, key))


def to_storable(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict to store, with inner tensors in place of subclasses.

    Raises:
        ConfigError: two entries have the same name.
        SaveFailed: a tensor cannot be stored; the message names it, as the errors of torch's planning do not.
    """
    state = replace_subclasses(state)
    for fqn, value in flatten(state)[0].items():
        check_storable(fqn, value)
    return state


@contextmanager
def load_subclasses(state: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Yield a state dict to load into, with inner tensors in place of subclasses; then put the results into `state`.

    Raises:
        LoadFailed: the settings of a stored subclass differ from those of the tensor that was loaded.
    """
    inner = replace_subclasses(state)
    yield inner
    if inner is not state:
        _restore_subclasses(state, inner, "")


def check_storable(fqn: str, value: Any) -> Any:
    """Return a value if it can be stored: a dense tensor of a supported dtype, or an object.

    Raises:
        SaveFailed: it cannot be stored; the message suggests a remedy.
    """
    is_plain = type(value) in _PLAIN_CLASSES
    if not is_plain:
        if (reason := partial_placement_problem(value)) is not None:
            raise SaveFailed(f"'{fqn}' {reason}")
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor | ShardedTensor):  # planned by their shards
            return value
        if hasattr(value, "__create_write_items__"):  # the class plans its own chunks
            return value
        if isinstance(value, AsyncCollectiveTensor):
            return value.wait()
    if is_lazy(value):
        raise SaveFailed(
            f"'{fqn}' is not initialized, as its module has seen no batch yet: call the model with one before a save"
        )
    if value.layout is not torch.strided and not _is_subclass(value):
        raise SaveFailed(f"'{fqn}' has the layout {value.layout}: save its parts, or a dense copy (to_dense())")
    if value.is_nested and type(value) is torch.Tensor:  # torch.jagged has a class of its own
        raise SaveFailed(
            f"'{fqn}' is a nested tensor of the layout torch.strided: save a list of its parts (unbind()), or a nested "
            "tensor of the layout torch.jagged"
        )
    if value.is_quantized or value.dtype in _QUANTIZED:
        raise SaveFailed(
            f"'{fqn}' is of dtype {value.dtype}, which is not supported: save its parts (int_repr(), q_scale(), "
            "q_zero_point()), or a copy by dequantize()"
        )
    if not _can_copy(value.dtype):
        raise SaveFailed(
            f"'{fqn}' is of dtype {value.dtype}, which torch itself cannot copy: save a view of it as torch.uint8"
        )
    if value.is_meta:
        raise SaveFailed(f"'{fqn}' is on the meta device, so there are no values to save; materialize it first")
    if is_plain:
        if (reason := missing_memory_problem(value)) is not None:
            raise SaveFailed(f"'{fqn}' {reason}")
        return value
    if _is_subclass(value):
        raise SaveFailed(
            f"'{fqn}' is of class {type(value).__name__}, or a part of a distributed tensor of that class, which "
            "consists of other tensors. In a dict, and not sharded, it is stored by dsq_ckpt.save, async_save and "
            "Compressor; else save the tensors that it consists of, or a plain copy (dequantize(), if it has it)"
        )
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and value.numel() and not value.data_ptr():
        raise SaveFailed(
            f"'{fqn}' is of class {type(value).__name__}, which has neither memory of its own nor __tensor_flatten__ "
            "to tell what it consists of: save a plain tensor in its place"
        )
    return value


def partial_placement_problem(value: Any) -> str | None:
    """Return why a DTensor with a partial placement can be neither saved nor loaded into; None for other values."""
    if not isinstance(value, DTensor) or not any(placement.is_partial() for placement in value.placements):
        return None
    return (
        f"is a DTensor with the placements {list(value.placements)}, of which each rank has a part that is still to be "
        "reduced: redistribute it to Shard or Replicate first, by its redistribute(placements=...)"
    )


@functools.cache
def _can_copy(dtype: torch.dtype) -> bool:
    """Return whether DCP can plan with a dtype and torch can copy it; it cannot for uninterpreted bits."""
    try:
        _element_size(dtype)
        torch.empty(64, 64, dtype=dtype, device="cpu").t().contiguous()  # large enough for the code path of large ones
    except (TypeError, RuntimeError):  # includes NotImplementedError
        return False
    return True


@contextmanager
def name_object_errors(fqn: str) -> Iterator[None]:
    """Raise an error with the name of an object that cannot be pickled or copied, since both run code of the object.

    Raises:
        SaveFailed: the block failed.
    """
    try:
        with in_user_code():
            yield
    except Exception as error:
        raise SaveFailed(
            f"'{fqn}' is no tensor, and cannot be stored as an object ({described(error)}): save plain data in its "
            "place, or leave it out"
        ) from error


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or the sum over its inner tensors."""
    return sum(inner_tensor.nbytes for inner_tensor in get_inner_tensors(tensor))


def get_inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the inner tensors of a tensor subclass, also nested ones; or the tensor itself."""
    if not _is_subclass(tensor):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [inner for name in names for inner in get_inner_tensors(getattr(tensor, name))]


def _is_subclass(value: Any) -> bool:
    """Return whether a value is a tensor subclass with inner tensors that DCP does not handle."""
    if type(value) in _PLAIN_CLASSES or not isinstance(value, torch.Tensor):
        return False
    return not isinstance(value, _DCP_CLASSES) and is_traceable_wrapper_subclass(value)


def refuse_cycles(state: Any) -> None:
    """Raise an error if a state dict contains itself.

    Raises:
        ConfigError: a dict or list in it does.
    """
    for _ in _iter_subclasses(state):
        pass


def _iter_subclasses(node: Any, parents: tuple[tuple[Any, Any], ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield container and key of subclasses in nested dicts and lists; `parents` are those of the nodes above."""
    if any(node is outer for outer, _ in parents):
        raise ConfigError(
            f"the state dict contains itself: '{'.'.join(str(key) for _, key in parents)}' is a dict or list that it "
            "lies in; leave it out"
        )
    entries = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        if isinstance(value, torch.Tensor):
            if _is_subclass(value):
                yield node, key
        elif not isinstance(value, _PLAIN_TYPES):
            yield from _iter_subclasses(value, (*parents, (node, key)))


def _to_inner_tensors(tensor: torch.Tensor) -> Any:
    """Return the inner tensors by name, below the name of the class; a single one of the same form replaces it."""
    names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name) for name in names}
    if len(names) == 1:
        only = inner[names[0]]
        if (only.shape, only.dtype) == (tensor.shape, tensor.dtype):
            return _to_inner_tensors(only) if _is_subclass(only) else only
    parts = {name: _to_inner_tensors(value) if _is_subclass(value) else value for name, value in inner.items()}
    return {f"<{type(tensor).__name__}>": {**parts, _SETTINGS: json.dumps(_plain_settings(settings), sort_keys=True)}}


def _plain_settings(settings: Any) -> dict[str, str]:
    """Return those attributes of a subclass other than its tensors that are plain data, as text."""
    if isinstance(settings, list | tuple):
        settings = dict(enumerate(settings))
    plain = {}
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        values = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(item, _PLAIN_TYPES) for item in values):
            plain[str(key)] = str(list(value) if isinstance(value, tuple) else value)
    return plain


def _restore_subclasses(target: Any, loaded: Any, name: str) -> Any:
    """Return the loaded values with the subclasses of `target` at their places; the dicts of `target` are kept."""
    if _is_subclass(target):
        _check_settings(name, target, loaded)
        return target
    if isinstance(target, MutableMapping) and isinstance(loaded, Mapping):
        for key in target:
            target[key] = _restore_subclasses(target[key], loaded[key], f"{name}.{key}")
        return target
    if isinstance(target, list) and isinstance(loaded, list):
        pairs = enumerate(zip(target, loaded, strict=True))
        return [_restore_subclasses(*pair, f"{name}.{index}") for index, pair in pairs]
    return loaded


def _check_settings(name: str, tensor: torch.Tensor, loaded: Any) -> None:
    """Raise `LoadFailed` if the stored settings of a subclass differ from those of `tensor`."""
    label = f"<{type(tensor).__name__}>"
    if not isinstance(loaded, dict) or label not in loaded:
        return
    try:
        stored = dict(json.loads(loaded[label][_SETTINGS]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise LoadFailed(
            f"'{name.lstrip('.')}': the stored settings of its class {label[1:-1]} do not parse: {error!r}"
        ) from error
    for key, value in _plain_settings(tensor.__tensor_flatten__()[1]).items():  # type: ignore[attr-defined]
        if stored.get(key, value) != value:
            raise LoadFailed(
                f"'{name.lstrip('.')}', of class {label[1:-1]}, was saved with {key} {stored[key]}, and is loaded into "
                f"one with {value}, whose values are of no use now: make the model as it was made when it was saved"
            )
    for key, inner in loaded[label].items():
        if key != _SETTINGS and _is_subclass(getattr(tensor, key)):
            _check_settings(f"{name}.{key}", getattr(tensor, key), inner)
