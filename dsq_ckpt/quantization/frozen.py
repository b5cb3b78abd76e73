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


class Watch:
    """Looks at tensors, one at each save, which tell whether training leaves them as they are.

    A look at a state that training has not changed since the last one tells nothing new: a trainer may save twice at a
    step.
    """

    def __init__(self) -> None:
        self._trained: Hashable = None
        self._seen: dict[Hashable, tuple[Hashable, int]] = {}  # checksum, and changes in a row

    def look(
        self, trained: Iterable[torch.Tensor], others: Iterable[tuple[Hashable, torch.Tensor]]
    ) -> None:
        """Look at the beginning of what is trained, and at all of other tensors, by name."""
        mark = _mark(trained)
        for name, tensor in others:
            known = self._seen.get(name)
            if known is None:
                self._seen[name] = checksum(tensor), 0
            elif not mark or mark != self._trained:
                found = checksum(tensor)
                self._seen[name] = found, min(known[1] + 1, _CHANGES) if found != known[0] else 0
        self._trained = mark

    def rests(self, name: Hashable) -> bool:
        """Return whether a tensor was not seen to change twice in a row."""
        return self._seen.get(name, (None, 0))[1] < _CHANGES


_watches: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()


def look(model: nn.Module) -> Frozen:
    """Look which tensors of a model are frozen, and whether they hold what they held at earlier looks.

    To be called at each save. What is on the meta device or not initialized is not looked at.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shapes = {parameter.shape for parameter in model.parameters() if _is_there(parameter)}
    watch = _watches.setdefault(model, Watch())
    watch.look(trained, (
        (name, tensor) for name, tensor in _tensors(model) if not tensor.requires_grad and tensor.shape in shapes
    ))
    return known(model)


def known(model: nn.Module) -> Frozen:
    """Return what earlier looks found, without a look at what tensors hold; those not seen to change are at rest.

    For where training may be changing the tensors.
    """
    watch = _watches.get(model, Watch())
    rests = {
        unwrapped(name): not tensor.requires_grad and watch.rests(name) for name, tensor in _tensors(model)
    }
    return Frozen(any(parameter.requires_grad for parameter in model.parameters()), rests)


def _mark(trained: Iterable[torch.Tensor]) -> Hashable:
    """Return a checksum of the first of the trained tensors."""
    found, left = [], _SEEN
    for tensor in filter(_is_there, trained):
        found.append(checksum(tensor))
        left -= tensor.numel()
        if left <= 0:
            break
    return tuple(found)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model that may be quantized, by all their names."""
    named = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return ((name, tensor) for name, tensor in named if _is_there(tensor) and tensor.dtype in QUANTIZABLE)


def _is_there(tensor: torch.Tensor) -> bool:
    return not (nn.parameter.is_lazy(tensor) or tensor.is_meta)
