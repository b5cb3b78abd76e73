"""Frozen tensors of a model: parameters without a gradient and buffers, beside parameters that are trained.

No step of the optimizer repairs what a restore would change in them, so they are stored exactly. As they stay as they
are, this costs few bytes after a keyframe. Those that do change, such as the weights of a teacher that averages its
student's, are told by their checksums: what has changed twice is stored like trained weights, until it rests again.
Buffers that lie near no trained parameter (covariances, codebooks, queues) are no such averages, and are exact whatever
they do. A parameter that changes near none may be trained at other times, as a discriminator is: the state of an
optimizer tells.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from dsq_ckpt.core.arrays import Codes
from dsq_ckpt.core.checksums import checksum
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import QUANTIZABLE
from dsq_ckpt.quantization.restored_values import Spread
from dsq_ckpt.quantization.weight_averages import averages

_T = TypeVar("_T")
_CHANGES = 2
_MARKS = 64  # trained tensors that tell whether training went on since the last look
_SEEN = 1 << 12  # about how many elements of each


@dataclass(frozen=True)
class Frozen:
    """Knowledge of one rank, or of all, about the tensors of a model; plain data.

    Attributes:
        trains: whether any parameter is trained; else nothing is frozen.
        rests: whether a tensor needs no gradient and stays as it is, by its name; of trained ones False.
        moves: tensors that need no gradient and were seen to change, of this rank alone, and whether they lie near a
            trained one, as averages do.
    """

    trains: bool = False
    rests: dict[str, bool] = field(default_factory=dict)
    moves: dict[str, bool] = field(default_factory=dict)

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


class _Seen(NamedTuple):
    """Findings about one tensor: its checksum, changes in a row, and how many of these, to the last, were alike."""

    checksum: Hashable
    changes: int = 0
    alike: int = 0


class Watch:
    """Looks at tensors, one at each save, which tell whether training leaves them as they are.

    That a tensor is as it was tells nothing where training has not gone on since: a trainer may save twice at a step.

    Attributes:
        spread: weights and moments that no longer lie where a restore has put them.
        exact: codes of some elements of exact weights at the last save, where no lossy ones tell trainings apart.
        saves: ids of the saves that were looked at.
    """

    def __init__(self) -> None:
        self.spread = Spread()
        self.exact: Mapping[ChunkKey, Codes] = {}
        self.saves: set[str] = set()
        self._trained: Hashable = None
        self._seen: dict[Hashable, _Seen] = {}

    def look(
        self, trained: Iterable[torch.Tensor], others: Iterable[tuple[Hashable, torch.Tensor]],
        near: Callable[[Mapping[Hashable, torch.Tensor]], Set[Hashable]],
    ) -> None:
        """Look at the beginnings of what is trained, and at all of other tensors, by name.

        Args:
            trained: tensors that tell whether training went on.
            others: tensors that are looked at.
            near: tells which of those that have changed are like averages of trained ones.
        """
        mark, changed = _mark(trained), dict[Hashable, torch.Tensor]()
        for name, tensor in others:
            found = checksum(tensor)
            known = self._seen.setdefault(name, _Seen(found))
            if found != known.checksum:
                self._seen[name], changed[name] = known._replace(checksum=found), tensor
            elif mark != self._trained:
                self._seen[name] = _Seen(found)
        averaging = near(changed) if changed else frozenset[Hashable]()
        for name in changed:
            known = self._seen[name]
            alike = known.alike + 1 if name in averaging else 0
            self._seen[name] = known._replace(changes=min(known.changes + 1, _CHANGES), alike=min(alike, _CHANGES))
        self._trained = mark

    def rests(self, name: Hashable, changes: int = _CHANGES) -> bool:
        """Return whether a tensor was not seen to change so often in a row."""
        return name not in self._seen or self._seen[name].changes < changes

    def averages(self, name: Hashable, changes: int = _CHANGES) -> bool:
        """Return whether a tensor was seen to change so often in a row, near a trained one each time."""
        return name in self._seen and self._seen[name].alike >= changes


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
    ), lambda changed: averages(changed, filter(_is_there, trained)))
    return known(model)


def known(model: nn.Module) -> Frozen:
    """Return what earlier looks found, without a look at what tensors hold; those not seen to change are at rest.

    For where training may be changing the tensors.
    """
    watch = _watches.get(model, Watch())
    rests, moves = dict[str, bool](), dict[str, bool]()
    for name, tensor in _tensors(model):
        alike, own = watch.averages(name), strip_wrappers(name)
        may_move = isinstance(tensor, nn.Parameter) or alike
        rests[own] = not tensor.requires_grad and not (may_move and not watch.rests(name))
        if not (tensor.requires_grad or rests[own]):
            moves[own] = alike
    return Frozen(any(parameter.requires_grad for parameter in model.parameters()), rests, moves)


def _mark(trained: Iterable[torch.Tensor]) -> Hashable:
    """Return a checksum of the beginnings of some trained tensors, of this rank's parts of them."""
    return tuple(checksum(_beginning(tensor)) for tensor in some_of(list(filter(_is_there, trained))))


def some_of(found: list[_T]) -> list[_T]:
    """Return a few of many, evenly spread."""
    return found[:: -(-len(found) // _MARKS) or 1]


def _beginning(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # to slice a DTensor may be collective
    if hasattr(local, "__tensor_flatten__") or local.numel() <= _SEEN:
        return local
    return local[: max(1, len(local) * _SEEN // local.numel())]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model that may be quantized, by all their names."""
    named = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return ((name, tensor) for name, tensor in named if _is_there(tensor) and tensor.dtype in QUANTIZABLE)


def _is_there(tensor: torch.Tensor) -> bool:
    return not (nn.parameter.is_lazy(tensor) or tensor.is_meta)
