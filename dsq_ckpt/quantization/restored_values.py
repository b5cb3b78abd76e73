"""Weights and first moments that still lie where a restore has put them.

A restore leaves values in the middles of the parts that the refinement layer divides cells into. While training has
moved them by less than a part, parts as wide take that movement back at the next restore, or move all values of a part
alike, so that each restore adds to what those before it have changed. Where values are spread over the parts, by
training or because none was restored, as many are rounded up as down, which adds up to nothing. So groups with weights
that are not spread have the narrowest parts. Parts of first moments and momentum are wide beside their values, whose
places in them are never even: restores lengthen them, and the longer ones have wider parts. So they have the narrowest
parts from a load on until gradients have renewed them, which those of layers that rest never do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import F32, Array, Codes
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey, scale_of, settle_streams
from dsq_ckpt.quantization.codebook.base import MOST_BITS
from dsq_ckpt.quantization.codebook.fit import Fitted

_RUNS, _MOST, _FEWEST = 8, 1 << 16, 1 << 12
"""Runs of neighbours in each chunk that is looked at, and elements in them, at most and where chunks are many."""
_TOGETHER = 1 << 22
"""Elements that are looked at in a group, about."""
_LEFT = 0.5
"""Share of moments that is left since the first save after a load, from which on they are not renewed.

Errors of restores one after the other then are together no more than twice one of them.
"""
_RESTING = 0.05
"""Share of elements other than zero that have not changed at all, from which on they are not renewed either."""
_UNEVEN = 6e-4
"""Square of the share of values in one place of each part from which on values are not spread, if that is sure."""
_UNEVEN_HALVES = 1e-2
"""The same of cells in two parts: beside these, values are so narrow that spread ones have up to half of it."""
_SURE = 6
"""Standard deviations of that square, in evenly spread values, that make it sure."""
_TELL = 500
"""Elements that tell, at least."""
_UNKNOWN = np.empty(0, np.float32)
_AROUND_ZERO = 2
"""Parts beside the one with zero in its middle that are left out."""
_STEPS = 1024
_PLACES = (np.arange(_STEPS) + 0.5) / _STEPS - 0.5
_WAVES = np.stack([np.cos(2 * np.pi * _PLACES), np.sin(2 * np.pi * _PLACES) - 6 / np.pi * _PLACES])
"""By place in a part, a wave and another without its slope, so that neither is felt where density has one."""
_WAVES /= np.sqrt(np.square(_WAVES).mean(1, keepdims=True))


class Loads(NamedTuple):
    """Loads of checkpoints, whichever: values may lie where they put them.

    Attributes:
        all: how many.
        of_moments: how many of lossy first moments or momentum among others.
    """

    all: int = 0
    of_moments: int = 0


MOMENTS = ("exp_avg", "momentum")
"""Kinds of first moments."""
_loads = Loads()


def note_load(kinds: Container[str]) -> None:
    """Note that this process loads a checkpoint, and lossy tensors of these kinds."""
    global _loads
    _loads = Loads(_loads.all + 1, _loads.of_moments + any(kind in kinds for kind in MOMENTS))


def loads() -> Loads:
    """Return what this process has loaded."""
    return _loads


def note_loads_elsewhere(loads: Sequence[int]) -> None:
    """Note what the process has loaded in which a state was trained that is saved here."""
    global _loads
    _loads = Loads(*map(max, _loads, loads))


class Spread:
    """Knowledge from save to save of one state: weights that are spread, and moments that are renewed.

    Attributes:
        chunks: keys of chunks of weights that were found to be spread since a load or keyframe.
        samples: moments at the first save after a load, by chunk, None for those that were renewed; None: none were
            loaded.
    """

    def __init__(self) -> None:
        self.chunks: set[ChunkKey] = set()
        self.samples: dict[ChunkKey, F32 | None] | None = None
        self._loads = self._asked = Loads()

    def loads_since(self, loaded: bool) -> Loads:
        """Return this rank's loads since the last save that began; each counts once, however many there were.

        Args:
            loaded: whether the checkpoint that the save comes after was loaded.
        """
        self._asked = _loads
        return Loads(int(loaded or self._loads != _loads), int(self._loads.of_moments != _loads.of_moments))

    def begin(self, loads: Loads, keyframe: bool) -> None:
        """Begin a save, after `loads_since`.

        Args:
            loads: sums over all ranks, as one may load for all, and give them what it has read.
            keyframe: whether it is one; then weights may have come from elsewhere.
        """
        self._loads = self._asked
        if loads.of_moments:
            self.samples = {}
        if loads.all or keyframe:
            self.chunks.clear()


def with_parts_for(
    chunks: Sequence[Chunk], fitted: Mapping[str, Fitted], spread: Spread, comm: Communicator, workers: Workers
) -> dict[str, Fitted]:
    """Return what is fitted, with the narrowest parts for weights that are `not_spread`; collective.

    So have first moments and momentum that were not renewed since a rank has loaded a checkpoint.
    """
    found = not_spread(chunks, fitted, spread, comm, workers)
    return {group: one.refined(MOST_BITS) if group in found else one for group, one in fitted.items()}


def not_spread(
    chunks: Sequence[Chunk], fitted: Mapping[str, Fitted], spread: Spread, comm: Communicator, workers: Workers
) -> set[str]:
    """Return the groups with weights, on any rank, that lie close together within the parts of their cells; collective.

    With those of first moments and momentum that were not renewed since a rank has loaded a checkpoint.

    Args:
        chunks: chunks of this rank, scaled.
        fitted: codebooks by group.
        spread: knowledge of this rank; chunks that it has are not looked at, and those that are found are added.
        comm: of the ranks that save.
        workers: threads.
    """
    asked = {group for group, one in fitted.items() if _may_be_narrower(one)}
    weights = {group for group in asked if group.startswith("weights/")}
    moments = {group for group in asked if group.partition("/")[0] in MOMENTS}
    if not weights | moments:
        return set()
    mine = [
        chunk for chunk in chunks
        if chunk.group in weights and chunk.base_values is None and chunk.key not in spread.chunks
    ]
    old = [chunk for chunk in chunks if chunk.group in moments and chunk.base_values is None]
    found = set[str]().union(*gather_from_all_ranks(
        comm, lambda: _uneven(mine, fitted, workers) | _not_renewed(old, spread)
    ))
    spread.chunks.update(chunk.key for chunk in mine if chunk.group not in found)
    return found


def _not_renewed(chunks: Sequence[Chunk], spread: Spread) -> set[str]:
    """Return the groups with moments that are, in part, those of the first save after a load; of all at that save."""
    known, found = spread.samples, set[str]()
    if known is None:
        return found
    settle_streams([chunk.tensor for chunk in chunks])
    count = Counter(chunk.group for chunk in chunks)
    for chunk in chunks:
        first = known.get(chunk.key, _UNKNOWN)
        if first is None:
            continue
        try:
            now = _some(chunk.tensor, _elements(count[chunk.group])).to("cpu", torch.float32, copy=True).numpy()
        except torch.OutOfMemoryError:  # as for weights
            found.add(chunk.group)
            continue
        first = first if len(first) == len(now) else now
        known[chunk.key] = None if _is_renewed(now, first) else first
        if known[chunk.key] is not None:
            found.add(chunk.group)
    return found


def _is_renewed(now: F32, first: F32) -> bool:
    """Return whether little is left of what moments were; nothing is of zeros."""
    squares = np.vdot(first, first)
    left, resting = np.vdot(now, first), np.count_nonzero((now == first) & (first != 0))
    return bool(not squares or (left < _LEFT * squares and resting < _RESTING * np.count_nonzero(first)))


def _elements(chunks: int) -> int:
    """Return how many elements of a chunk are looked at, in a group of so many."""
    return max(_FEWEST, min(_MOST, _TOGETHER // chunks))


def _may_be_narrower(fitted: Fitted) -> bool:
    return fitted.codebook.domain == "linear" and 0 < fitted.refinement_bits < MOST_BITS


def _uneven(chunks: Sequence[Chunk], fitted: Mapping[str, Fitted], workers: Workers) -> set[str]:
    """Return the groups with chunks whose values lie close together within parts, or which do so as a whole."""
    settle_streams([chunk.tensor for chunk in chunks])
    count = Counter(chunk.group for chunk in chunks)

    def work(chunk: Chunk) -> Array | None:
        try:
            return _look(chunk, fitted[chunk.group], _elements(count[chunk.group]))
        except torch.OutOfMemoryError:  # of a device: no save fails for want of a look
            return None

    found, sums = set[str](), dict[str, Array]()
    for chunk, look in zip(chunks, workers.map(work, chunks), strict=True):
        if look is not None:
            sums[chunk.group] = sums.get(chunk.group, np.zeros(3)) + look
        least = _UNEVEN if fitted[chunk.group].refinement_bits > 1 else _UNEVEN_HALVES
        if look is None or _is_close(look, least) or _is_close(sums[chunk.group], least):
            found.add(chunk.group)
    return found


def _is_close(sums: Array, least: float) -> bool:
    """Return whether sums by `waves_in_parts` are larger than those of evenly spread values, and surely so."""
    waves, pairs, elements = sums
    return elements >= _TELL and waves > max(least * pairs, _SURE * pairs**0.5)


def _look(chunk: Chunk, fitted: Fitted, elements: int) -> Array:
    """Return what `waves_in_parts` has for a sample of a chunk, float64[3]."""
    values = _between(_some(chunk.tensor, elements).cpu())
    before = None if chunk.parent is None or not fitted.uses_parent else _some_codes(chunk.parent, elements)
    codes = np.empty(values.size, np.uint8)
    window, inverse, parts = fitted.window, 1.0 / scale_of(chunk.exponent), 1 << fitted.refinement_bits
    kernels.quantize(values, before, fitted.table.shape[0] - 1, window.lo, window.hi, inverse, fitted.table, codes)
    low, narrow = fitted.cells
    return np.array(waves_in_parts(values, codes, inverse, low, narrow * parts, parts, _WAVES))


def _between(sample: torch.Tensor) -> F32:
    """Return values as float32, those of 16 bits at random places up to half way to the next number.

    Their distances are no movement that a restore could take back, nor are those of float32 numbers that are all in
    bf16, as a model is that was loaded so.
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


def _some(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a few runs of a tensor's elements, in the order of rows, flat; all of a small one."""
    tensor, count, long = tensor.detach(), tensor.numel(), elements // _RUNS
    if count <= elements:
        return tensor.contiguous().view(-1)  # kernels take no strides, which `reshape` leaves to a flat view
    if tensor.is_contiguous():
        return tensor.view(-1)[: count // _RUNS * _RUNS].view(_RUNS, -1)[:, :long].reshape(-1)
    starts = torch.arange(_RUNS, device=tensor.device)[:, None] * (count // _RUNS)
    places = (starts + torch.arange(long, device=tensor.device)).view(-1)
    return tensor[torch.unravel_index(places, tensor.shape)]  # a copy of these alone


def _some_codes(codes: Codes, elements: int) -> Codes:
    """Return the codes of the same elements."""
    if len(codes) <= elements:
        return codes
    return codes[: len(codes) // _RUNS * _RUNS].reshape(_RUNS, -1)[:, : elements // _RUNS].reshape(-1)


@jit(error_model="numpy")
def waves_in_parts(values: Any, codes: Any, inverse: Any, low: Any, steps: Any, parts: int, waves: Any) -> Any:
    """Return what waves with the length of a part have, squared and in sum over parts, and over pairs of elements.

    The first is, of values at the same place of each part, as large as the second, and of evenly spread ones about 0.
    The third is how many elements count: none of codes without a cell, of the first and last part of a cell that has
    more, of which values may fill a piece, and of those next to zero, where small rows and columns gather, and zeros.
    """
    edge = 1 if parts > 2 else 0
    counts, first, second = np.zeros(256 * parts), np.zeros(256 * parts), np.zeros(256 * parts)
    for i in range(len(values)):
        step = steps[codes[i]]
        place = (np.float64(values[i] * inverse) - low[codes[i]]) * step
        if step > 0 and edge <= place < parts - edge:
            part = int(np.floor(place))
            if abs(part - np.floor(-low[codes[i]] * step)) <= _AROUND_ZERO:
                continue
            within = int((place - part) * waves.shape[1])
            at = codes[i] * parts + part
            first[at] += waves[0, within]
            second[at] += waves[1, within]
            counts[at] += 1
    total, pairs, elements = 0.0, 0.0, 0.0
    for at in range(len(counts)):
        total += (first[at] * first[at] + second[at] * second[at]) / 2 - counts[at]
        pairs += counts[at] * counts[at]
        elements += counts[at]
    return total, pairs, elements
