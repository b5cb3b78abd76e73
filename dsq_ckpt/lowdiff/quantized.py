"""Quantization of gradients to a few k-means levels, with error feedback.

A bucket is averaged and quantized in two phases, as in an all-reduce made of its two halves: a reduce-scatter leaves
each rank with the mean of its shard, the rank quantizes it, and an all-gather takes codes (one byte per element) and
levels to all ranks. All ranks decode the same bytes, so their models are bit-identical.

Only the owner of a shard knows the quantization error, so it keeps the residual of its elements. When DDP rebuilds its
buckets, elements get new owners. A rank then adds its residuals of foreign elements to the next average, times the
world size because the average divides by it: every residual counts exactly once.

The reduce-scatter is synchronous: collectives that callbacks start would start in another order on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from dsq_ckpt import kernels
from dsq_ckpt.codebooks.algorithms.exact_kmeans import exact_kmeans
from dsq_ckpt.codebooks.histogram import nearest
from dsq_ckpt.core.arrays import F32, U8
from dsq_ckpt.kernels.keys import FIRST_NORMAL, KEYS_PER_OCTAVE, SHIFT, KeyWindow
from dsq_ckpt.lowdiff.buckets import Bucket, BucketSlice, Group, all_gather, on_this_stream, ready
from dsq_ckpt.lowdiff.contract import GradientInfo
from dsq_ckpt.lowdiff.feedback import FeedbackCompressor
from dsq_ckpt.lowdiff.probe import Probe, ProbeIndices
from dsq_ckpt.quantization.sketch import Sketch

_OCTAVES = 12
"""Octaves below the largest magnitude that the codebook covers; smaller magnitudes count as zero."""
_KNOWN_LEVELS = 256


class _Owned(NamedTuple):
    """The range of a parameter's memory outside of which this rank's residual is zero."""

    first: int
    last: int
    strides: tuple[int, ...]


class KMeans(FeedbackCompressor):
    """A compressor that quantizes each rank's shard of a bucket to at most `levels` levels, one of which is zero."""

    name: ClassVar[str] = "kmeans"

    def __init__(self, levels: int = 16, feedback: bool = True) -> None:
        super().__init__(f"kmeans:{levels}{'' if feedback else ',feedback=off'}", feedback)
        self.levels = levels
        self._owned: dict[nn.Parameter, _Owned] = {}
        self._probe_indices: dict[tuple[int, ...], ProbeIndices] = {}

    def _begin(self) -> None:
        super()._begin()
        self._owned.clear()
        self._probe_indices.clear()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `GradientCompressor.load_state`."""
        super().load_state(state)
        self._owned.clear()  # the saved run may have had other buckets

    def _synchronize(self, bucket: Bucket, group: Group | None) -> Future[Tensor]:
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        length = -(-bucket.flat.numel() // (4 * world)) * 4  # rows of the gathered bytes stay aligned
        if not length:
            return ready(self._look(bucket, np.zeros((world, self.levels), np.float32), 1))
        shard = self._averaged(bucket, group, rank, world, length)
        used = self._with_residuals(bucket, shard, rank * length)
        levels, codes = quantized(shard.cpu().numpy(), self.levels)
        if self.feedback and np.isfinite(levels).all():
            decoded = torch.from_numpy(dequantized(codes, levels)).to(shard.device)
            self._keep(used, shard - decoded, rank * length)
        row = np.zeros(4 * self.levels + length, np.uint8)
        row[: 4 * self.levels] = np.pad(levels, (0, self.levels - len(levels)), mode="edge").view(np.uint8)
        row[4 * self.levels :][: len(codes)] = codes
        mine = torch.from_numpy(row).to(bucket.flat.device)
        if group is None:
            return ready(self._decode(bucket, mine[None], length))
        gathered = mine.new_empty((world, len(row)))

        def decode(done: Future[object]) -> Tensor:
            done.value()  # raises what the collective raised
            return self._decode(bucket, gathered, length)

        return all_gather(gathered.view(-1), mine, group).get_future().then(decode)

    def _averaged(self, bucket: Bucket, group: Group | None, rank: int, world: int, length: int) -> Tensor:
        """Return the mean over the ranks of this rank's shard, float32, with the residuals of former owners."""
        elements = bucket.flat.numel()
        whole = torch.zeros(world * length, dtype=torch.float32, device=bucket.flat.device)
        whole[:elements] = bucket.flat
        for slice_ in bucket.slices if self.feedback else ():
            sent = whole[slice_.start : slice_.stop]
            self._transfer_residuals(slice_, bucket.of(slice_), sent, rank * length, length, world)
        if group is None:
            return whole[:elements]
        shard = whole.new_empty(length)
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce(shard, whole, group=group)
        return shard.div_(world)[: max(0, min(length, elements - rank * length))]

    def _transfer_residuals(
        self, slice_: BucketSlice, gradient: Tensor, sent: Tensor, first: int, length: int, world: int
    ) -> None:
        """Add residuals of elements that this rank no longer owns to the gradients it sends."""
        own = _Owned(
            min(max(first - slice_.start, 0), slice_.elements),
            min(max(first + length - slice_.start, 0), slice_.elements),
            slice_.strides,
        )
        if self._owned.get(slice_.parameter) == own:
            return
        if slice_.parameter in self._residuals:
            if self._dropped(gradient):
                self._owned.pop(slice_.parameter, None)
                return  # postponed: the residual would be lost now
            residual = self._flat_residual(slice_)
            for here in (slice(0, own.first), slice(own.last, slice_.elements)):
                sent[here].add_(residual[here], alpha=world)
                residual[here] = 0.0
        self._owned[slice_.parameter] = own

    def _with_residuals(self, bucket: Bucket, shard: Tensor, first: int) -> list[BucketSlice]:
        """Add residuals in place to a shard that begins at `first`; return the slices that received one."""
        used = []
        for slice_ in bucket.slices if self.feedback else ():
            mine, theirs = _overlap(slice_, first, len(shard))
            if mine.stop > mine.start and not self._dropped(shard[mine]):
                shard[mine] += self._flat_residual(slice_)[theirs]
                used.append(slice_)
        return used

    def _keep(self, used: list[BucketSlice], left: Tensor, first: int) -> None:
        """Store the quantization errors of a shard as residuals."""
        for slice_ in used:
            mine, theirs = _overlap(slice_, first, len(left))
            self._flat_residual(slice_)[theirs] = left[mine]

    def _decode(self, bucket: Bucket, gathered: Tensor, length: int) -> Tensor:
        """Decode the levels and codes of all ranks, uint8[world, 4 * levels + length], into the bucket."""
        rows = gathered.cpu().numpy()
        levels = np.ascontiguousarray(rows[:, : 4 * self.levels]).view(np.float32)
        direct = bucket.flat.device.type == "cpu" and bucket.flat.dtype == torch.float32
        whole = bucket.flat if direct else torch.empty(bucket.flat.shape)
        values = whole.numpy()
        for rank, row in enumerate(rows):
            mine = values[rank * length : (rank + 1) * length]
            mine[:] = dequantized(row[4 * self.levels :][: len(mine)], levels[rank])
        if whole is not bucket.flat:
            bucket.flat.copy_(whole)
        return self._look(bucket, levels, length)

    def _look(self, bucket: Bucket, levels: F32, length: int) -> Tensor:
        if (places := self._probe_indices.get(bucket.key)) is None:
            places = self._probe_indices[bucket.key] = ProbeIndices.of(bucket)
        held = torch.from_numpy(levels).to(bucket.flat.dtype).float()  # as the bucket rounds them
        for slice_, probe in zip(bucket.slices, places.probes(bucket), strict=True):
            if self._dropped(bucket.of(slice_)):
                continue  # DDP may leave in p.grad what was there
            ranks = slice(slice_.start // length, -(-slice_.stop // length))
            self._info_factories[slice_.parameter] = partial(_gradient_info, held[ranks], probe)
        return bucket.flat


def _overlap(slice_: BucketSlice, first: int, length: int) -> tuple[slice, slice]:
    """Return the intersection of a slice and a shard, relative to the shard and to the slice; may be empty."""
    start = max(slice_.start, first)
    stop = max(min(slice_.stop, first + length), start)
    return slice(start - first, stop - first), slice(start - slice_.start, stop - slice_.start)


def _gradient_info(levels: Tensor, probe: Callable[[], Probe | None]) -> GradientInfo:
    distinct = levels.unique()
    known = len(distinct) <= _KNOWN_LEVELS and not bool(distinct.isnan().any())
    seen = probe()
    there = seen and (on_this_stream(seen[0]), on_this_stream(seen[1]))
    return GradientInfo(None, None, distinct if known else None, there)


def quantized(values: F32, most: int) -> tuple[F32, U8]:
    """Quantize a shard by exact k-means on its sketch.

    The level nearest to zero becomes zero. Infinities and NaN must not vanish in a codebook: a shard with any of them
    has NaN as its only level.

    Args:
        values: float32[n].
        most: largest number of levels, 2..256.

    Returns:
        Ascending levels float32[1..most], and codes uint8[n].
    """
    codes = np.zeros(len(values), np.uint8)
    top = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(top):
        return np.full(1, np.nan, np.float32), codes
    key = int(np.float32(top).view(np.uint32)) >> SHIFT
    if key < FIRST_NORMAL:  # nothing but zeros and subnormal numbers
        return np.zeros(1, np.float32), codes
    window = KeyWindow(max(FIRST_NORMAL, key + 1 - _OCTAVES * KEYS_PER_OCTAVE), key + 1)
    counts, representatives = Sketch.of(values, window).counts, window.values()
    held = np.flatnonzero(counts)
    points, same = np.unique(representatives[held] + 0.0, return_inverse=True)  # zeros of both signs are one point
    path = exact_kmeans(points, np.bincount(same, weights=counts[held]), most)
    means = path.levels(path.k_max)
    means[np.abs(means).argmin()] = 0.0
    levels = np.unique(means.astype(np.float32) + np.float32(0.0))  # one zero, without a sign
    with np.errstate(invalid="ignore"):
        table = nearest(np.where(np.isfinite(representatives), representatives, 0.0), levels.astype(np.float64))
    kernels.quantize(values, None, 0, window.lo, window.hi, 1.0, table.astype(np.uint8)[None], codes)
    return levels, codes


def dequantized(codes: U8, levels: F32) -> F32:
    """Return the level of each code, float32[n]."""
    values = np.empty(len(codes), np.float32)
    kernels.dequantize(np.ascontiguousarray(codes), levels, 1.0, -1, np.empty(0, np.float32), values)
    return values
