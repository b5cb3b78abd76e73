"""ExCP (Li et al., "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking", arXiv 2406.11257).

Its four steps, under the paper's names: residual checkpoint, weight-momentum joint pruning, non-uniform quantization,
and a general archiver (the paper: 7-zip; here LZMA of Python's library, which is 7-zip's coder, at its strongest).
"""

from __future__ import annotations

import lzma
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evaluation.peers.states import MOMENTS, State

CAP = 2.5
"""Where the authors' code stops raising the threshold of a tensor's weights, in medians of the residual."""
SAMPLE, ROUNDS = 1 << 16, 25
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


class Knob(NamedTuple):
    """Settings of ExCP.

    Attributes:
        alpha: Of the threshold of weights.
        bits: Of an index: 1, 2, 4 or 8.
        beta: Of the threshold of moments.
        each: The threshold of a weight follows its own second moment, else the mean of its tensor's.
    """

    alpha: float
    bits: int
    beta: float = 2.0
    each: bool = True


PUBLISHED = Knob(5e-5, 4, 2.0, each=False)
"""What the authors' code does by default."""
KNOBS = tuple(Knob(alpha, bits) for bits, alpha in (
    *((2, 4e-3 * 2 ** (-step / 2)) for step in range(13)), (4, 1e-4), (4, 5e-5), (4, 2e-5), (4, 0.0), (8, 0.0),
))
"""From the smallest files to the least degradation."""
MEAN_KNOBS = tuple(Knob(alpha, bits, each=False) for bits, alpha in (
    (2, 1.0), *((2, 2e-3 * 2 ** (-step / 2)) for step in range(9)), (4, 2e-4), (4, 1e-4), (4, 5e-5), (4, 0.0), (8, 0.0),
))
"""The same with thresholds of tensors."""
FIXED = (*(Knob(alpha, 2) for alpha in (1e-3, 5e-4, 2.5e-4, 1.2e-4, 6e-5)), Knob(6e-5, 4), Knob(1e-5, 4))
"""For a whole run: what a checkpoint drops is in the next difference, so that a bound on each alone is not the best."""


@dataclass(frozen=True)
class ExCP:
    """The peer. Moments decide what is pruned, whether they are compressed themselves or not."""

    name: str = "excp"
    knobs: tuple[Knob, ...] = KNOBS

    def encode(self, state: State, before: State, knob: Knob) -> bytes:
        """Return the compressed difference of a state from what the last one came back as."""
        streams: list[bytes] = []
        for name, value in state.weights.items():
            adam = state.rest["optimizer"]["state"][name]
            residual = value - before.weights[name]  # residual checkpoint: of weights alone, moments as they are
            kept, kept_moments = prune(residual, adam["exp_avg"], adam["exp_avg_sq"], knob)
            streams.append(quantize(torch.where(kept, residual, 0), knob.bits))
            for kind in state.moments:
                streams.append(quantize(torch.where(kept_moments, adam[kind], 0), knob.bits))
        lengths = struct.pack(f"<{len(streams)}I", *map(len, streams))
        packed = lzma.compress(lengths + b"".join(streams), format=lzma.FORMAT_RAW, filters=FILTERS)
        return struct.pack("<B", knob.bits) + packed

    def decode(self, data: bytes, before: State) -> State:
        """Return the state that `encode` was given, as far as it is kept."""
        bits, packed = data[0], lzma.decompress(data[1:], format=lzma.FORMAT_RAW, filters=FILTERS)
        kinds = [kind for kind in MOMENTS if kind in before.moments]
        count = len(before.weights) * (1 + len(kinds))
        lengths = struct.unpack_from(f"<{count}I", packed)
        ends = np.cumsum((4 * count, *lengths))
        streams = iter([packed[start:end] for start, end in pairwise(ends)])
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        for name, value in before.weights.items():
            weights[name] = value + dequantize(next(streams), bits, value)
            for kind in kinds:
                moments[kind][name] = dequantize(next(streams), bits, value)
        return replace(before, weights=weights, moments=moments)


def prune(residual: Tensor, first: Tensor, second: Tensor, knob: Knob) -> tuple[Tensor, Tensor]:
    """Return which weights and which moments are kept (weight-momentum joint pruning).

    r_w = alpha / sqrt(m) * median|dW| and r_o = beta * mean|v|, with v and m Adam's first and second moments; moments
    are also dropped where their weight is. The paper's formula has m of each element; the authors' code has its mean
    over the tensor, and at most `CAP` medians.
    """
    if knob.each:
        factor = knob.alpha / second.sqrt().clamp_min(1e-30)
    else:
        factor = (knob.alpha / second.mean().sqrt().clamp_min(1e-30)).clamp_max(CAP)
    kept = residual.abs() > factor * residual.abs().median()
    return kept, kept & (first.abs() > knob.beta * first.abs().mean())


def quantize(values: Tensor, bits: int) -> bytes:
    """Return centers and packed indexes: 0 for zeros, else 1 + the nearest of 2^bits - 1 centers of k-means."""
    flat = values.flatten().numpy()
    places = np.flatnonzero(flat)
    centers = kmeans(flat[places], 2**bits - 1)
    index = np.zeros(-(-flat.size * bits // 8) * 8 // bits, np.uint8)
    index[places] = 1 + np.searchsorted(_middles(centers), flat[places])
    packed = np.zeros(index.size * bits // 8, np.uint8)
    for place in range(8 // bits):
        packed |= index[place :: 8 // bits] << (bits * place)
    return struct.pack("<B", centers.size) + centers.tobytes() + packed.tobytes()


def dequantize(stream: bytes, bits: int, like: Tensor) -> Tensor:
    """Return the values of `quantize`, in the shape of a tensor."""
    count = stream[0]
    table = np.concatenate([np.zeros(1, np.float32), np.frombuffer(stream, np.float32, count, 1)])
    packed = np.frombuffer(stream, np.uint8, offset=1 + 4 * count)
    index = np.stack([packed >> (bits * place) & (2**bits - 1) for place in range(8 // bits)], axis=1)
    return torch.from_numpy(table[index.ravel()[: like.numel()]]).view(like.shape)


def kmeans(values: np.ndarray, count: int) -> np.ndarray:
    """Return at most so many centers, ascending float32: Lloyd's rounds on a sample, from its quantiles."""
    distinct = np.unique(values[:: 1 + values.size // SAMPLE])
    if distinct.size <= count:
        return distinct
    points = np.sort(values[:: 1 + values.size // SAMPLE]).astype(np.float64)
    centers = np.unique(np.quantile(points, (np.arange(count) + 0.5) / count))
    sums = np.concatenate([[0.0], np.cumsum(points)])
    for _ in range(ROUNDS):
        ends = np.concatenate([[0], np.searchsorted(points, _middles(centers)), [points.size]])
        sizes = np.diff(ends)
        centers = np.where(sizes > 0, np.diff(sums[ends]) / np.maximum(sizes, 1), centers)
    return centers.astype(np.float32)


def _middles(centers: np.ndarray) -> np.ndarray:
    return (centers[1:] + centers[:-1]) / 2
