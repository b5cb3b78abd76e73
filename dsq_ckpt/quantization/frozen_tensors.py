"""Frozen tensors of a model: parameters without a gradient and buffers, beside trained parameters.

No optimizer step repairs an error in them, so they are stored exactly. Since they do not change, this costs few bytes
after a keyframe. Tensors that do change, such as the weights of a teacher that averages its student's, are found by
checksums: a tensor that has changed twice in a row is stored like trained weights, until it stops changing. Buffers
that lie near no trained parameter (covariances, codebooks, queues) are not averages, and are always exact. A parameter
that changes near no trained one may be trained at other times, as a discriminator is: optimizer state shows that.
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
from dsq_ckpt.quantization.restored_values import RestoreTracker
from dsq_ckpt.quantization.weight_averages import find_averages

_T = TypeVar("_T")
_CHANGES = 2
_MARKS = 64  # trained tensors whose checksums show whether training went on since the last save
_SEEN = 1 << 12  # elements of each in its checksum, about


@dataclass(frozen=True)
class FrozenTensors:
    """Record of one rank, or of all ranks, about the tensors of a model; plain data.

    Attributes:
        has_trained: whether any parameter is trained; otherwise nothing is frozen.
        unchanged: by name, whether a tensor needs no gradient and does not change; False for trained tensors.
        changing: tensors of this rank that need no gradient and were seen to change, and whether they lie near a
            trained tensor, as averages do.
    """

    has_trained: bool = False
    unchanged: dict[str, bool] = field(default_factory=dict)
    changing: dict[str, bool] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return self.has_trained and self.unchanged.get(name, False)

    @classmethod
    def merge(cls, parts: Iterable[FrozenTensors]) -> FrozenTensors:
        """Merge the records of all ranks: a tensor is unchanged if it, or each shard of it, is so on every rank that
        has it.
        """
        has_trained, unchanged = False, dict[str, bool]()
        for record in parts:
            has_trained |= record.has_trained
            for name, is_unchanged in record.unchanged.items():
                unchanged[name] = is_unchanged and unchanged.get(name, True)
        return cls(has_trained, unchanged)


class _ChangeRecord(NamedTuple):
    """Record of one tensor: its checksum, its changes in a row, and how many of the last ones were near a trained
    tensor.
    """

    checksum: Hashable
    changes: int = 0
    near_count: int = 0


class ChangeWatch:
    """Detects, from save to save, which tensors training does not change.

    An unchanged tensor proves nothing if training has not gone on since: a trainer may save twice at a step.

    Attributes:
        restores: tracker of weights and moments that lie where a restore has put them.
        exact_codes: codes of some elements of exact weights at the last save, to recognize a training without lossy
            weights.
        save_ids: ids of the saves that were examined.
    """

    def __init__(self) -> None:
        self.restores = RestoreTracker()
        self.exact_codes: Mapping[ChunkKey, Codes] = {}
        self.save_ids: set[str] = set()
        self._trained_checksum: Hashable = None
        self._records: dict[Hashable, _ChangeRecord] = {}

    def update(
        self, trained: Iterable[torch.Tensor], others: Iterable[tuple[Hashable, torch.Tensor]],
        find_near: Callable[[Mapping[Hashable, torch.Tensor]], Set[Hashable]],
    ) -> None:
        """Compare checksums of tensors with those of the last save.

        Args:
            trained: trained tensors, which show whether training went on; samples of them are read.
            others: other tensors, by name; all of them is read.
            find_near: function that returns which changed tensors are like averages of trained ones.
        """
        trained_checksum, changed = _checksum_of_trained(trained), dict[Hashable, torch.Tensor]()
        for name, tensor in others:
            digest = checksum(tensor)
            record = self._records.setdefault(name, _ChangeRecord(digest))
            if digest != record.checksum:
                self._records[name], changed[name] = record._replace(checksum=digest), tensor
            elif trained_checksum != self._trained_checksum:
                self._records[name] = _ChangeRecord(digest)
        averages = find_near(changed) if changed else frozenset[Hashable]()
        for name in changed:
            record = self._records[name]
            near_count = record.near_count + 1 if name in averages else 0
            self._records[name] = record._replace(
                changes=min(record.changes + 1, _CHANGES), near_count=min(near_count, _CHANGES)
            )
        self._trained_checksum = trained_checksum

    def is_unchanged(self, name: Hashable, changes: int = _CHANGES) -> bool:
        """Return whether a tensor has changed fewer than `changes` times in a row."""
        return name not in self._records or self._records[name].changes < changes

    def is_average(self, name: Hashable, changes: int = _CHANGES) -> bool:
        """Return whether a tensor has changed at least `changes` times in a row, near a trained one each time."""
        return name in self._records and self._records[name].near_count >= changes


_watches: weakref.WeakKeyDictionary[nn.Module, ChangeWatch] = weakref.WeakKeyDictionary()


def find_frozen(model: nn.Module) -> FrozenTensors:
    """Find the frozen tensors of a model, by comparing checksums with those of earlier calls.

    To be called at each save. Tensors on the meta device and uninitialized ones are skipped.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shapes = {parameter.shape for parameter in model.parameters() if _is_materialized(parameter)}
    watch = _watches.setdefault(model, ChangeWatch())
    watch.update(trained, (
        (name, tensor) for name, tensor in _quantizable_tensors(model)
        if not tensor.requires_grad and tensor.shape in shapes
    ), lambda changed: find_averages(changed, filter(_is_materialized, trained)))
    return frozen_from_history(model)


def frozen_from_history(model: nn.Module) -> FrozenTensors:
    """Return the result of earlier calls of `find_frozen`, without reading tensors; others count as unchanged.

    For callers that run while training may change the tensors.
    """
    watch = _watches.get(model, ChangeWatch())
    unchanged, changing = dict[str, bool](), dict[str, bool]()
    for name, tensor in _quantizable_tensors(model):
        is_average, unwrapped_name = watch.is_average(name), strip_wrappers(name)
        may_move = isinstance(tensor, nn.Parameter) or is_average
        unchanged[unwrapped_name] = not tensor.requires_grad and not (may_move and not watch.is_unchanged(name))
        if not (tensor.requires_grad or unchanged[unwrapped_name]):
            changing[unwrapped_name] = is_average
    return FrozenTensors(any(parameter.requires_grad for parameter in model.parameters()), unchanged, changing)


def _checksum_of_trained(trained: Iterable[torch.Tensor]) -> Hashable:
    """Return a checksum of the first elements of some trained tensors, or of this rank's shards of them."""
    return tuple(checksum(_leading_elements(tensor)) for tensor in take_evenly(list(filter(_is_materialized, trained))))


def take_evenly(items: list[_T]) -> list[_T]:
    """Return a few evenly spaced items of a list."""
    return items[:: -(-len(items) // _MARKS) or 1]


def _leading_elements(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # to slice a DTensor may be collective
    if hasattr(local, "__tensor_flatten__") or local.numel() <= _SEEN:
        return local
    return local[: max(1, len(local) * _SEEN // local.numel())]


def _quantizable_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model that may be quantized, by all their names."""
    pairs = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return ((name, tensor) for name, tensor in pairs if _is_materialized(tensor) and tensor.dtype in QUANTIZABLE)


def _is_materialized(tensor: torch.Tensor) -> bool:
    return not (nn.parameter.is_lazy(tensor) or tensor.is_meta)
