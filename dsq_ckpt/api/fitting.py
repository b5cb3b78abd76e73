"""Placeholders for all that was saved below some places of an optimizer's state, by those that it has itself.

What it has may be less, as in a dict or a list that grows with the steps, or more, as when a run goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from dsq_ckpt.api.whole import refuse_parts
from dsq_ckpt.core.nesting import Nesting, Path, empty_dicts, put
from dsq_ckpt.core.subclasses import class_in
from dsq_ckpt.dcp.nested import placeholder

_DISTRIBUTED = (DTensor, ShardedTensor)


class Fitted(NamedTuple):
    """A nested state dict with a placeholder for each entry that was saved.

    Attributes:
        state: the state dict; tensors and objects that fit are those that are there.
        new: paths of objects that were not there.
        unshared: keys of tensors that were not there, and that nothing tells how to shard.
    """

    state: dict[Any, Any]
    new: list[Path]
    unshared: list[str]


def fitted(
    own: dict[Any, Any], saved: Mapping[str, Path], empty: Collection[Path] | None, nesting: Nesting,
    tensors: Mapping[str, Any], parameter: torch.Tensor | None = None,
) -> Fitted:
    """Return what a load asks for.

    Args:
        own: what there is, from the top level on; it is returned itself if it has all that was saved and nothing else.
        saved: what was saved: flat names and paths.
        empty: paths of dicts that were saved without entries; None: not known.
        nesting: of the checkpoint.
        tensors: its index of tensors.
        parameter: whose state it is; tensors of its shape are made like it.

    Raises:
        LoadFailed: a part of a tensor was saved whose class only the optimizer can make.
    """
    flat, places = flatten_state_dict(own)
    there = {places[name]: value for name, value in flat.items()}
    found = Fitted({}, [], [])
    left = set(there)
    same = empty is None or {path for path, _ in empty_dicts(own)} == set(empty)
    for name, path in saved.items():
        deep = class_in(path, nesting)
        place = path[:deep]
        value = there.get(place)
        left.discard(place)
        if deep is not None:
            if not isinstance(value, torch.Tensor):
                refuse_parts(name, path, nesting)
        elif name in tensors:
            if not _fits(value, tensors[name], parameter):
                same = False
                value = _made(tensors[name], path, parameter, isinstance(value, torch.Tensor))
                if value is None:
                    found.unshared.append(str(path[3]))
        elif place not in there:
            same = False
            found.new.append(path)
        put(found.state, nesting.steps(place), value)
    for path in empty or ():
        put(found.state, nesting.steps(path), {}, keep=True)
    return Fitted(own, [], []) if same and not left else found


def _fits(value: Any, tensor: Mapping[str, Any], parameter: torch.Tensor | None) -> bool:
    """Return whether a load goes into a tensor, or is to refuse it: that of another parameter, or a distributed one."""
    if not isinstance(value, torch.Tensor | ShardedTensor):
        return False
    shape = torch.Size(tensor["shape"])
    return isinstance(value, _DISTRIBUTED) or value.shape in (shape, None if parameter is None else parameter.shape)


def _made(
    tensor: Mapping[str, Any], path: Path, parameter: torch.Tensor | None, whole: bool
) -> torch.Tensor | None:
    """Return a new tensor to load into, or None where it may be sharded in an unknown way: `whole` says it is not."""
    shape = torch.Size(tensor["shape"])
    if parameter is None or parameter.shape != shape:
        return None if isinstance(parameter, DTensor) and shape and not whole else placeholder(tensor, path, {})
    return placeholder(tensor, ("", "state", "0", ""), {"": [parameter]})
