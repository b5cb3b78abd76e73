"""Quantization of gradients to a few k-means levels, with error feedback.

A bucket is averaged and quantized in two phases, like the two halves of an all-reduce. A reduce-scatter computes the
mean of one shard on each rank, and the rank quantizes it. An all-gather sends codes (one byte per element) and levels
to all ranks. All ranks decode the same bytes, so their models are bit-identical.

Only the owner of a shard knows the quantization error, so it keeps the residual of its elements. When DDP rebuilds its
buckets, elements get new owners. A rank then adds its residuals of foreign elements to the next average, times the
world size because the average divides by it. Every residual counts exactly once.

The reduce-scatter is synchronous. If callbacks started collectives, their order would differ between ranks.
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
from dsq_ckpt.codebooks.histogram import nearest_index
from dsq_ckpt.core.arrays import F32, U8
from dsq_ckpt.kernels.keys import FIRST_NORMAL, KEYS_PER_OCTAVE, SHIFT, KeyWindow
from dsq_ckpt.lowdiff.base_compressor import GradientInfo
from dsq_ckpt.lowdiff.buckets import (
    Bucket,
    BucketSlice,
    Group,
    completed_future,
    record_current_stream,
    start_all_gather,
)
from dsq_ckpt.lowdiff.feedback import FeedbackCompressor
from dsq_ckpt.lowdiff.probe import GradientProbe, ProbeIndices
from dsq_ckpt.quantization.sketch import Sketch

_OCTAVES = 12
"""Octaves below the largest magnitude that the codebook covers. Smaller magnitudes count as zero."""
_MAX_KNOWN_LEVELS = 256


class _OwnedRange(NamedTuple):
    """The range of a parameter's memory outside of which this rank's residual is zero."""

    first: int
    last: int
    strides: tuple[int, ...]


class KMeansCompressor(FeedbackCompressor):
    """A compressor that quantizes each rank's shard of a bucket to at most `levels` levels, one of which is zero."""

    name: ClassVar[str] = "kmeans"

    def __init__(self, levels: int = 16, feedback: bool = True) -> None:
        super().__init__(f"kmeans:{levels}{'' if feedback else ',feedback=off'}", feedback)
        self.levels = levels
        self._owned: dict[nn.Parameter, _OwnedRange] = {}
        self._probe_indices: dict[tuple[int, ...], ProbeIndices] = {}

    def _reset(self) -> None:
        super()._reset()
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
            return completed_future(self._record_infos(bucket, np.zeros((world, self.levels), np.float32), 1))
        shard = self._reduce_to_mean(bucket, group, rank, world, length)
        updated = self._add_residuals(bucket, shard, rank * length)
        levels, codes = quantize_shard(shard.cpu().numpy(), self.levels)
        if self.feedback and np.isfinite(levels).all():
            decoded = torch.from_numpy(dequantize_shard(codes, levels)).to(shard.device)
            self._store_residuals(updated, shard - decoded, rank * length)
        row = np.zeros(4 * self.levels + length, np.uint8)
        row[: 4 * self.levels] = np.pad(levels, (0, self.levels - len(levels)), mode="edge").view(np.uint8)
        row[4 * self.levels :][: len(codes)] = codes
        payload = torch.from_numpy(row).to(bucket.flat.device)
        if group is None:
            return completed_future(self._decode(bucket, payload[None], length))
        gathered = payload.new_empty((world, len(row)))

        def decode(future: Future[object]) -> Tensor:
            future.value()  # raises the collective's error
            return self._decode(bucket, gathered, length)

        return start_all_gather(gathered.view(-1), payload, group).get_future().then(decode)

    def _reduce_to_mean(self, bucket: Bucket, group: Group | None, rank: int, world: int, length: int) -> Tensor:
        """Return the mean over the ranks of this rank's shard, float32, including the residuals of former owners."""
        elements = bucket.flat.numel()
        padded = torch.zeros(world * length, dtype=torch.float32, device=bucket.flat.device)
        padded[:elements] = bucket.flat
        for slice_ in bucket.slices if self.feedback else ():
            sent = padded[slice_.start : slice_.stop]
            self._transfer_residuals(slice_, bucket.gradient(slice_), sent, rank * length, length, world)
        if group is None:
            return padded[:elements]
        shard = padded.new_empty(length)
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce(shard, padded, group=group)
        return shard.div_(world)[: max(0, min(length, elements - rank * length))]

    def _transfer_residuals(
        self, slice_: BucketSlice, gradient: Tensor, sent: Tensor, first: int, length: int, world: int
    ) -> None:
        """Add residuals of elements that this rank no longer owns to the gradient `sent` to their owners.

        Args:
            slice_: slice of the parameter.
            gradient: gradient of the parameter.
            sent: float32 copy of the gradient, updated in place.
            first: start of this rank's shard in the bucket.
            length: length of the shard.
            world: number of ranks.
        """
        own_range = _OwnedRange(
            min(max(first - slice_.start, 0), slice_.elements),
            min(max(first + length - slice_.start, 0), slice_.elements),
            slice_.strides,
        )
        if self._owned.get(slice_.parameter) == own_range:
            return
        if slice_.parameter in self._residuals:
            if self._is_dropped(gradient):
                self._owned.pop(slice_.parameter, None)
                return  # retry at the next step: DDP may drop the residual now
            residual = self._flat_residual(slice_)
            for foreign in (slice(0, own_range.first), slice(own_range.last, slice_.elements)):
                sent[foreign].add_(residual[foreign], alpha=world)
                residual[foreign] = 0.0
        self._owned[slice_.parameter] = own_range

    def _add_residuals(self, bucket: Bucket, shard: Tensor, first: int) -> list[BucketSlice]:
        """Add residuals in place to a shard that begins at `first`; return the slices that received one."""
        updated = []
        for slice_ in bucket.slices if self.feedback else ():
            in_shard, in_slice = _overlap(slice_, first, len(shard))
            if in_shard.stop > in_shard.start and not self._is_dropped(shard[in_shard]):
                shard[in_shard] += self._flat_residual(slice_)[in_slice]
                updated.append(slice_)
        return updated

    def _store_residuals(self, slices: list[BucketSlice], errors: Tensor, first: int) -> None:
        """Store the quantization errors of a shard that begins at `first` as residuals."""
        for slice_ in slices:
            in_shard, in_slice = _overlap(slice_, first, len(errors))
            self._flat_residual(slice_)[in_slice] = errors[in_shard]

    def _decode(self, bucket: Bucket, gathered: Tensor, length: int) -> Tensor:
        """Decode the levels and codes of all ranks, uint8[world, 4 * levels + length], into the bucket."""
        rows = gathered.cpu().numpy()
        levels = np.ascontiguousarray(rows[:, : 4 * self.levels]).view(np.float32)
        in_place = bucket.flat.device.type == "cpu" and bucket.flat.dtype == torch.float32
        decoded = bucket.flat if in_place else torch.empty(bucket.flat.shape)
        values = decoded.numpy()
        for rank, row in enumerate(rows):
            shard = values[rank * length : (rank + 1) * length]
            shard[:] = dequantize_shard(row[4 * self.levels :][: len(shard)], levels[rank])
        if decoded is not bucket.flat:
            bucket.flat.copy_(decoded)
        return self._record_infos(bucket, levels, length)

    def _record_infos(self, bucket: Bucket, levels: F32, length: int) -> Tensor:
        """Record the description of each gradient; return the bucket's tensor."""
        if (indices := self._probe_indices.get(bucket.key)) is None:
            indices = self._probe_indices[bucket.key] = ProbeIndices.from_bucket(bucket)
        rounded = torch.from_numpy(levels).to(bucket.flat.dtype).float()  # to the bucket's dtype
        for slice_, probe in zip(bucket.slices, indices.read_probes(bucket), strict=True):
            if self._is_dropped(bucket.gradient(slice_)):
                continue  # DDP may leave p.grad unchanged
            ranks = slice(slice_.start // length, -(-slice_.stop // length))
            self._info_factories[slice_.parameter] = partial(_gradient_info, rounded[ranks], probe)
        return bucket.flat


def _overlap(slice_: BucketSlice, first: int, length: int) -> tuple[slice, slice]:
    """Return the intersection of a slice and a shard, relative to the shard and to the slice; may be empty."""
    start = max(slice_.start, first)
    stop = max(min(slice_.stop, first + length), start)
    return slice(start - first, stop - first), slice(start - slice_.start, stop - slice_.start)


def _gradient_info(levels: Tensor, build_probe: Callable[[], GradientProbe | None]) -> GradientInfo:
    distinct = levels.unique()
    is_quantized = len(distinct) <= _MAX_KNOWN_LEVELS and not bool(distinct.isnan().any())
    probe = build_probe()
    recorded = probe and (record_current_stream(probe[0]), record_current_stream(probe[1]))
    return GradientInfo(None, None, distinct if is_quantized else None, recorded)


def quantize_shard(values: F32, max_levels: int) -> tuple[F32, U8]:
    """Quantize a shard by exact k-means on its sketch.

    The level nearest to zero becomes zero. A shard with infinities or NaN has NaN as its only level, so that these
    values do not vanish in a codebook.

    Args:
        values: float32[n].
        max_levels: largest number of levels, 2..256.

    Returns:
        Ascending levels float32[1..most], and codes uint8[n].
    """
    codes = np.zeros(len(values), np.uint8)
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest):
        return np.full(1, np.nan, np.float32), codes
    key = int(np.float32(largest).view(np.uint32)) >> SHIFT
    if key < FIRST_NORMAL:  # only zeros and subnormal numbers
        return np.zeros(1, np.float32), codes
    window = KeyWindow(max(FIRST_NORMAL, key + 1 - _OCTAVES * KEYS_PER_OCTAVE), key + 1)
    counts, representatives = Sketch.of(values, window).counts, window.values()
    buckets = np.flatnonzero(counts)
    points, inverse = np.unique(representatives[buckets] + 0.0, return_inverse=True)  # +0 and -0 are one point
    path = exact_kmeans(points, np.bincount(inverse, weights=counts[buckets]), max_levels)
    means = path.levels(path.k_max)
    means[np.abs(means).argmin()] = 0.0
    levels = np.unique(means.astype(np.float32) + np.float32(0.0))  # one zero, positive
    with np.errstate(invalid="ignore"):
        table = nearest_index(np.where(np.isfinite(representatives), representatives, 0.0), levels.astype(np.float64))
    kernels.quantize(values, None, 0, window.lo, window.hi, 1.0, table.astype(np.uint8)[None], codes)
    return levels, codes


def dequantize_shard(codes: U8, levels: F32) -> F32:
    """Return the level of each code, float32[n]."""
    values = np.empty(len(codes), np.float32)
    kernels.dequantize(np.ascontiguousarray(codes), levels, 1.0, -1, np.empty(0, np.float32), values)
    return values
