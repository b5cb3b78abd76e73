"""Weights and first moments that still lie where a restore has put them.

A restore returns the middles of the parts into which the refinement layer divides cells. While training has moved
values by less than a part, parts of the same width round the movement back at the next restore, or move all values of a
part alike, so that errors of restores add up. Where values are spread over the parts, by training or because they were
not restored, as many are rounded up as down, and errors cancel. So groups with weights that are not spread get the
narrowest parts.

First moments and momentum have parts that are wide relative to their values, which are never spread evenly in them:
restores lengthen moments, and longer ones get wider parts. So moments get the narrowest parts after a load until
gradients have renewed them, which never happens in layers that are not trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt import native
from dsq_ckpt.coding.codes import quantize
from dsq_ckpt.core.arrays import F32, F64, Array, Codes
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.kernels.checks import check_array
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import moments as compiled
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey, settle_streams
from dsq_ckpt.quantization.codebook.base import MAX_REFINEMENT_BITS
from dsq_ckpt.quantization.codebook.fit import GroupFit
from dsq_ckpt.quantization.dequantizer import scale_of

_RUNS, _MOST, _FEWEST = 8, 1 << 16, 1 << 12
"""Runs of adjacent elements in the sample of a chunk, and elements in them, at most and if there are many chunks."""
_TOGETHER = 1 << 22
"""Elements in the sample of a group, about."""
_LEFT = 0.5
"""Share of moments left since the first save after a load, from which they are not renewed.

Errors of successive restores then sum up to at most twice the error of one.
"""
_RESTING = 0.05
"""Share of nonzero elements that are unchanged, from which moments are not renewed either."""
_UNEVEN = 6e-4
"""Squared share of values at one place of each part from which values are not spread, if it is significant."""
_UNEVEN_SPREAD = 5e-2
"""The same for weights that were found spread since the last load, in case of a load that was not recorded.

A density that bends within parts, as at the first, coarse steps of a run, reaches a few hundredths in a small chunk.
"""
_UNEVEN_HALVES = 1e-2
"""The same for cells of two parts: values are so narrow relative to these that spread ones reach half of it."""
_SURE = 6
"""Standard deviations of that square in evenly spread values, from which it is significant."""
_MIN_SAMPLE = 500
"""Elements that a significant result needs, at least."""
_UNKNOWN = np.empty(0, np.float32)
_AROUND_ZERO = 2
"""Parts on each side of the part around zero that are ignored."""
_STEPS = 1024
_PLACES = (np.arange(_STEPS) + 0.5) / _STEPS - 0.5
_WAVES = np.stack([np.cos(2 * np.pi * _PLACES), np.sin(2 * np.pi * _PLACES) - 6 / np.pi * _PLACES])
"""By place in a part, two waves of its length; the second without slope, so that neither responds to a linear density.
"""
_WAVES /= np.sqrt(np.square(_WAVES).mean(1, keepdims=True))


class LoadCounts(NamedTuple):
    """Numbers of loads of checkpoints, whose values may still lie where they were put.

    Attributes:
        total: number of loads.
        with_moments: number of loads of lossy first moments or momentum, possibly among other tensors.
    """

    total: int = 0
    with_moments: int = 0


MOMENTS = ("exp_avg", "momentum")
"""Kinds of first moments."""
_loads = LoadCounts()


def record_load(kinds: Container[str]) -> None:
    """Record that this process loads a checkpoint with lossy tensors of these kinds."""
    global _loads
    _loads = LoadCounts(_loads.total + 1, _loads.with_moments + any(kind in kinds for kind in MOMENTS))


def load_counts() -> LoadCounts:
    """Return the numbers of loads of this process."""
    return _loads


def record_load_counts(loads: Sequence[int]) -> None:
    """Record the loads of the process that trained a state which this process saves."""
    global _loads
    _loads = LoadCounts(*map(max, _loads, loads))


class RestoreTracker:
    """State from save to save of one training: which weights are spread, and which moments are renewed.

    Attributes:
        chunks: keys of chunks of weights that were found spread since a load or keyframe.
        samples: samples of moments at the first save after a load, by chunk, None for renewed ones; None: no moments
            were loaded.
    """

    def __init__(self) -> None:
        self.chunks: set[ChunkKey] = set()
        self.samples: dict[ChunkKey, F32 | None] | None = None
        self._loads = self._pending = LoadCounts()

    def count_new_loads(self, loaded: bool) -> LoadCounts:
        """Return this rank's loads since the last save that began; each count is at most 1.

        Args:
            loaded: whether the parent checkpoint of the save was loaded.
        """
        self._pending = _loads
        return LoadCounts(int(loaded or self._loads != _loads), int(self._loads.with_moments != _loads.with_moments))

    def begin_save(self, loads: LoadCounts, keyframe: bool) -> None:
        """Begin a save, after `count_new_loads`.

        Args:
            loads: sums over all ranks, since one rank may load for all and send them what it has read.
            keyframe: whether the save is a keyframe; its weights may have another origin.
        """
        self._loads = self._pending
        if loads.with_moments:
            self.samples = {}
        if loads.total or keyframe:
            self.chunks.clear()


def refine_restored_groups(
    chunks: Sequence[Chunk], fitted: Mapping[str, GroupFit], spread: RestoreTracker, comm: Communicator,
    workers: Workers,
) -> dict[str, GroupFit]:
    """Return the fitted codebooks, with the narrowest parts for `find_restored_groups`; collective."""
    groups = find_restored_groups(chunks, fitted, spread, comm, workers)
    return {group: fit.refined(MAX_REFINEMENT_BITS) if group in groups else fit for group, fit in fitted.items()}


def find_restored_groups(
    chunks: Sequence[Chunk], fitted: Mapping[str, GroupFit], spread: RestoreTracker, comm: Communicator,
    workers: Workers, all_chunks: bool = False,
) -> set[str]:
    """Return the groups with values, on any rank, that still lie where a restore has put them; collective.

    These are groups with weights close together within the parts of their cells, and those with first moments or
    momentum that were not renewed since a rank has loaded a checkpoint.

    Args:
        chunks: chunks of this rank, scaled.
        fitted: codebooks by group.
        spread: tracker of this rank; its chunks are skipped, and newly found spread chunks are added.
        comm: communicator of the ranks that save.
        workers: threads.
        all_chunks: test the tracker's chunks too, with a higher limit, and add none. Those of groups that are found
            are removed from it: their weights were loaded.
    """
    candidates = {group for group, fit in fitted.items() if _can_be_refined(fit)}
    weights = {group for group in candidates if group.startswith("weights/")}
    moments = {group for group in candidates if group.partition("/")[0] in MOMENTS}
    if not weights | moments:
        return set()
    own_chunks = [
        chunk for chunk in chunks
        if chunk.group in weights and chunk.base_values is None and (all_chunks or chunk.key not in spread.chunks)
    ]
    old = [chunk for chunk in chunks if chunk.group in moments and chunk.base_values is None]
    groups = set[str]().union(*gather_from_all_ranks(
        comm, lambda: _find_uneven_groups(own_chunks, fitted, spread, workers) | _find_unrenewed(old, spread)
    ))
    if not all_chunks:
        spread.chunks.update(chunk.key for chunk in own_chunks if chunk.group not in groups)
    spread.chunks.difference_update(chunk.key for chunk in own_chunks if chunk.group in groups)
    return groups


def _find_unrenewed(chunks: Sequence[Chunk], spread: RestoreTracker) -> set[str]:
    """Return the groups with moments that partly remain from the first save after a load; all groups at that save."""
    samples, groups = spread.samples, set[str]()
    if samples is None:
        return groups
    settle_streams([chunk.tensor for chunk in chunks])
    count = Counter(chunk.group for chunk in chunks)
    for chunk in chunks:
        first = samples.get(chunk.key, _UNKNOWN)
        if first is None:
            continue
        try:
            values = _sample(chunk.tensor, _sample_size(count[chunk.group])).to("cpu", torch.float32, copy=True).numpy()
        except torch.OutOfMemoryError:  # as for weights
            groups.add(chunk.group)
            continue
        first = first if len(first) == len(values) else values
        samples[chunk.key] = None if _is_renewed(values, first) else first
        if samples[chunk.key] is not None:
            groups.add(chunk.group)
    return groups


def _is_renewed(values: F32, first: F32) -> bool:
    """Return whether little is left of a first sample of moments; of zeros, nothing is."""
    squares = np.vdot(first, first)
    product, resting = np.vdot(values, first), np.count_nonzero((values == first) & (first != 0))
    return bool(not squares or (product < _LEFT * squares and resting < _RESTING * np.count_nonzero(first)))


def _sample_size(chunks: int) -> int:
    """Return the sample size of each chunk in a group of this many."""
    return max(_FEWEST, min(_MOST, _TOGETHER // chunks))


def _can_be_refined(fitted: GroupFit) -> bool:
    return fitted.codebook.domain == "linear" and 0 < fitted.refinement_bits < MAX_REFINEMENT_BITS


def _find_uneven_groups(
    chunks: Sequence[Chunk], fitted: Mapping[str, GroupFit], spread: RestoreTracker, workers: Workers
) -> set[str]:
    """Return the groups with values that lie close together within parts, in a chunk or as a whole."""
    settle_streams([chunk.tensor for chunk in chunks])
    count = Counter(chunk.group for chunk in chunks)

    def work(chunk: Chunk) -> Array | None:
        try:
            return _measure_chunk(chunk, fitted[chunk.group], _sample_size(count[chunk.group]))
        except torch.OutOfMemoryError:  # of a device: a save does not fail for lack of a sample
            return None

    groups, sums = set[str](), dict[tuple[str, float], Array]()
    looks = workers.map_batches(work, chunks, lambda chunk: min(chunk.key.elements, _MOST))
    for chunk, look in zip(chunks, looks, strict=True):
        min_unevenness = _UNEVEN if fitted[chunk.group].refinement_bits > 1 else _UNEVEN_HALVES
        if chunk.key in spread.chunks:
            min_unevenness = _UNEVEN_SPREAD
        total = chunk.group, min_unevenness
        if look is not None:
            sums[total] = sums.get(total, np.zeros(3)) + look
        if look is None or _is_uneven(look, min_unevenness) or _is_uneven(sums[total], min_unevenness):
            groups.add(chunk.group)
    return groups


def _is_uneven(sums: Array, min_unevenness: float) -> bool:
    """Return whether sums of `measure_part_waves` are significantly larger than those of evenly spread values."""
    waves, pairs, elements = sums
    return elements >= _MIN_SAMPLE and waves > max(min_unevenness * pairs, _SURE * pairs**0.5)


def _measure_chunk(chunk: Chunk, fitted: GroupFit, elements: int) -> Array:
    """Return the sums of `measure_part_waves` for a sample of a chunk, float64[3]."""
    values = _dither(_sample(chunk.tensor, elements).cpu())
    before = None if chunk.parent is None or not fitted.uses_parent else _sample_codes(chunk.parent, elements)
    codes = np.empty(values.size, np.uint8)
    inverse, parts = 1.0 / scale_of(chunk.exponent), 1 << fitted.refinement_bits
    quantize(values, before, fitted.table.shape[0] - 1, fitted.window, inverse, fitted.table, codes)
    low, narrow = fitted.cells
    return measure_part_waves(values, codes, inverse, low, narrow * parts, parts, _WAVES)


def _dither(sample: torch.Tensor) -> F32:
    """Return values as float32, those of 16 bits at random places up to halfway to the next number.

    Distances between 16-bit numbers are no movement that a restore could round back. The same holds for float32 values
    that are all in bf16, as in a model that was loaded so.
    """
    values: F32 = sample.float().numpy()
    dropped = {torch.bfloat16: 16, torch.float16: 13}.get(sample.dtype)
    if dropped is None and not (values.view(np.uint32) & 0xFFFF).any():
        dropped = 16
    if dropped is None:
        return values
    moves = np.random.default_rng(0).integers(-(1 << dropped - 1), 1 << dropped - 1, values.size)
    moved: F32 = np.where(values == 0, 0, values.view(np.int32) + moves).astype(np.int32).view(np.float32)
    return moved


def _sample(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a few runs of a tensor's elements, in row-major order, flat; all elements of a small tensor."""
    tensor, count, long = tensor.detach(), tensor.numel(), elements // _RUNS
    if count <= elements:
        return tensor.contiguous().view(-1)  # kernels take no strides, which `reshape` leaves to a flat view
    if tensor.is_contiguous():
        return tensor.view(-1)[: count // _RUNS * _RUNS].view(_RUNS, -1)[:, :long].reshape(-1)
    starts = torch.arange(_RUNS, device=tensor.device)[:, None] * (count // _RUNS)
    places = (starts + torch.arange(long, device=tensor.device)).view(-1)
    return tensor[torch.unravel_index(places, tensor.shape)]  # a copy of these alone


def _sample_codes(codes: Codes, elements: int) -> Codes:
    """Return the codes of the elements of `_sample`."""
    if len(codes) <= elements:
        return codes
    return codes[: len(codes) // _RUNS * _RUNS].reshape(_RUNS, -1)[:, : elements // _RUNS].reshape(-1)


def measure_part_waves(values: F32, codes: Codes, inverse: float, low: F64, steps: F64, parts: int, waves: F64) -> F64:
    """Return squared sums of waves with the length of a part, summed over parts, and numbers of pairs and elements.

    The squared sums equal the number of pairs for values at the same place of each part, and are about 0 for evenly
    spread values. Elements are ignored if their code has no cell, if they lie in the first or last part of a cell with
    more than two, which values may fill partly, or next to zero, where small rows and columns gather, or if they are
    zero.

    Args:
        values: float32[n].
        codes: uint8[n].
        inverse: factor that multiplies values before anything else.
        low, steps: lower edge and parts per unit of the cell of each code, float64[256]; 0 parts for no cell.
        parts: parts of a cell, at most 256.
        waves: float64[2, places], by place in a part.

    Raises:
        ValueError: an array has another dtype, layout or shape.
    """
    check_array("values", values, np.float32, (len(values),))
    check_array("codes", codes, np.uint8, (len(values),))
    for name, array, shape in (("low", low, (256,)), ("steps", steps, (256,)), ("waves", waves, (2, waves.shape[-1]))):
        check_array(name, array, np.float64, shape)
    if native.path_index() < 0:
        return np.array(_sum_part_waves(values, codes, inverse, low, steps, parts, waves))
    return compiled.sum_part_waves(values, codes, inverse, low, steps, parts, waves)


@jit(error_model="numpy")
def _sum_part_waves(values: Any, codes: Any, inverse: Any, low: Any, steps: Any, parts: int, waves: Any) -> Any:
    edge = 1 if parts > 2 else 0
    counts, first, second = np.zeros(256 * parts), np.zeros(256 * parts), np.zeros(256 * parts)
    for i in range(len(values)):
        step = steps[codes[i]]
        position = (np.float64(values[i] * inverse) - low[codes[i]]) * step
        if step > 0 and edge <= position < parts - edge:
            part = int(np.floor(position))
            if abs(part - np.floor(-low[codes[i]] * step)) <= _AROUND_ZERO:
                continue
            offset = int((position - part) * waves.shape[1])
            index = int(codes[i]) * parts + part
            first[index] += waves[0, offset]
            second[index] += waves[1, offset]
            counts[index] += 1
    total, pairs, elements = 0.0, 0.0, 0.0
    for index in range(len(counts)):
        total += (first[index] * first[index] + second[index] * second[index]) / 2 - counts[index]
        pairs += counts[index] * counts[index]
        elements += counts[index]
    return total, pairs, elements
