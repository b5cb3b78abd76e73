"""Frozen tensors of a model: parameters without a gradient and buffers, beside parameters that are trained.

No step of the optimizer repairs what a restore would change in them, so they are stored exactly. As they stay as they
are, this costs few bytes after a keyframe. Those that do change, such as the weights of a teacher that averages its
student's, are told by their checksums: what has changed twice is stored like trained weights, until it rests again.
Buffers of no parameter's shape (covariances, codes, queues) are no such averages, and are exact whatever they do.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from dsq_ckpt.core.unchanged import checksum
from dsq_ckpt.quantization.groups import QUANTIZABLE, unwrapped

_CHANGES = 2
_SEEN = 1 << 20  # elements of trained parameters that tell whether training went on since the last look


@dataclass(frozen=True)
class Frozen:
    """Knowledge of one rank, or of all, about the tensors of a model; plain data.

    Attributes:
        trains: whether any parameter is trained; else nothing is frozen.
        rests: whether a tensor needs no gradient and stays as it is, by its name; of trained ones False.
    """

    trains: bool = False
    rests: dict[str, bool] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return self.trains and self.rests.get(name, False)

    @classmethod
    def agreed(cls, parts: Iterable[Frozen]) -> Frozen:
        """Return what all ranks know together: a tensor rests if it does wherever it, or a shard of it, lies."""
        trains, rests = False, dict[str, bool]()
        for part in parts:
            trains |= part.trains
            for name, one in part.rests.items():
                rests[name] = one and rests.get(name, True)
        return cls(trains, rests)


class _Looks(NamedTuple):
    """The last look at a model: a checksum of what is trained; checksums and changes of other tensors, by name."""

    trained: Hashable
    seen: dict[str, tuple[Hashable, int]]


_last: weakref.WeakKeyDictionary[nn.Module, _Looks] = weakref.WeakKeyDictionary()


def look(model: nn.Module) -> Frozen:
    """Look which tensors of a model are frozen, and whether they hold what they held at earlier looks.

    To be called at each save. A look at a state that training has not changed since the last one tells nothing new: a
    trainer may save twice at a step. What is on the meta device or not initialized is not looked at.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    mark, last = _mark(trained), _last.get(model, _Looks(None, {}))
    seen: dict[str, tuple[Hashable, int]] = {}
    rests: dict[str, bool] = {}
    shapes = {parameter.shape for parameter in model.parameters() if _is_there(parameter)}
    for name, tensor in _tensors(model):
        if tensor.requires_grad or tensor.shape not in shapes:
            rests[unwrapped(name)] = not tensor.requires_grad
            continue
        known = last.seen.get(name)
        if known is None:
            known = checksum(tensor), 0
        elif mark != last.trained:
            found = checksum(tensor)
            known = found, min(known[1] + 1, _CHANGES) if found != known[0] else 0
        seen[name] = known
        rests[unwrapped(name)] = known[1] < _CHANGES
    _last[model] = _Looks(mark, seen)
    return Frozen(bool(trained), rests)


def known(model: nn.Module) -> Frozen:
    """Return what earlier looks found, without a look at what tensors hold; those not seen to change are at rest.

    For where training may be changing the tensors.
    """
    seen = _last.get(model, _Looks(None, {})).seen
    rests = {
        unwrapped(name): not tensor.requires_grad and (name not in seen or seen[name][1] < _CHANGES)
        for name, tensor in _tensors(model)
    }
    return Frozen(any(parameter.requires_grad for parameter in model.parameters()), rests)


def _mark(trained: Iterable[nn.Parameter]) -> Hashable:
    """Return a checksum of the first of the trained parameters."""
    found, left = [], _SEEN
    for parameter in trained:
        if left > 0 and _is_there(parameter):
            found.append(checksum(parameter))
            left -= parameter.numel()
    return tuple(found)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model that may be quantized, by all their names."""
    named = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return ((name, tensor) for name, tensor in named if _is_there(tensor) and tensor.dtype in QUANTIZABLE)


def _is_there(tensor: torch.Tensor) -> bool:
    return not (nn.parameter.is_lazy(tensor) or tensor.is_meta)
