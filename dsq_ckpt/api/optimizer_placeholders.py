"""Placeholders for saved entries of an optimizer's state dict, derived from the entries that the optimizer has.

The optimizer may have fewer entries, as in a dict or list that grows with the steps, or more, when a run is set back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from dsq_ckpt.api.object_placeholders import refuse_subclass_part
from dsq_ckpt.core.nesting import Nesting, Path, empty_dicts, set_entry
from dsq_ckpt.core.tensor_subclasses import find_class_key
from dsq_ckpt.dcp.nested_planners import make_placeholder

_DISTRIBUTED = (DTensor, ShardedTensor)


class OptimizerPlaceholders(NamedTuple):
    """A nested state dict with a placeholder for each saved entry.

    Attributes:
        state: the state dict; it has the optimizer's own tensors and objects where they match the saved ones.
        new_paths: paths of saved objects that the optimizer does not have.
        unshardable_keys: keys of saved tensors that the optimizer does not have and whose sharding is unknown.
    """

    state: dict[Any, Any]
    new_paths: list[Path]
    unshardable_keys: list[str]


def fit_placeholders(
    state: dict[Any, Any], saved: Mapping[str, Path], empty: Collection[Path] | None, nesting: Nesting,
    tensors: Mapping[str, Any], parameter: torch.Tensor | None = None,
) -> OptimizerPlaceholders:
    """Return placeholders for saved entries.

    Args:
        state: the current entries, from the top level on; returned itself if its keys are the saved keys.
        saved: paths of the saved entries, by flat name.
        empty: paths of dicts that were saved without entries; None: not known.
        nesting: nesting of the checkpoint.
        tensors: the checkpoint's index of tensors.
        parameter: the parameter whose state this is; placeholders of its shape have its device and sharding.

    Raises:
        LoadFailed: a saved tensor is of a subclass that only the optimizer can create.
    """
    flat, paths = flatten_state_dict(state)
    current = {paths[name]: value for name, value in flat.items()}
    placeholders = OptimizerPlaceholders({}, [], [])
    unmatched = set(current)
    has_same_dicts = empty is None or {path for path, _ in empty_dicts(state)} == set(empty)
    for name, path in saved.items():
        depth = find_class_key(path, nesting)
        tensor_path = path[:depth]
        value = current.get(tensor_path)
        unmatched.discard(tensor_path)
        if depth is not None:
            if not isinstance(value, torch.Tensor):
                refuse_subclass_part(name, path, nesting)
        elif name in tensors:
            if not _accepts_load(value, tensors[name], parameter):
                has_same_dicts = False
                value = _make_placeholder(tensors[name], path, parameter, isinstance(value, torch.Tensor))
                if value is None:
                    placeholders.unshardable_keys.append(str(path[3]))
        elif tensor_path not in current:
            has_same_dicts = False
            placeholders.new_paths.append(path)
        set_entry(placeholders.state, nesting.steps(tensor_path), value)
    for path in empty or ():
        set_entry(placeholders.state, nesting.steps(path), {}, keep=True)
    return OptimizerPlaceholders(state, [], []) if has_same_dicts and not unmatched else placeholders


def _accepts_load(value: Any, tensor: Mapping[str, Any], parameter: torch.Tensor | None) -> bool:
    """Return whether to load into a tensor as it is; the load itself refuses a mismatch of its shape.

    That holds for distributed tensors, and for those of the saved shape or of the parameter's.
    """
    if not isinstance(value, torch.Tensor | ShardedTensor):
        return False
    shape = torch.Size(tensor["shape"])
    return isinstance(value, _DISTRIBUTED) or value.shape in (shape, None if parameter is None else parameter.shape)


def _make_placeholder(
    tensor: Mapping[str, Any], path: Path, parameter: torch.Tensor | None, full: bool
) -> torch.Tensor | None:
    """Return a new tensor to load into, or None if its sharding is unknown; with `full`, it is not sharded."""
    shape = torch.Size(tensor["shape"])
    if parameter is None or parameter.shape != shape:
        return None if isinstance(parameter, DTensor) and shape and not full else make_placeholder(tensor, path, {})
    return make_placeholder(tensor, ("", "state", "0", ""), {"": [parameter]})
