"""Levels chosen by a trellis of states, as in ISO/IEC 15938-17, and the bits of an adaptive coder for them.

Of two quantizers, the first has all multiples of a step, the second has zero and the odd multiples of half a step. The
parities of the levels so far tell the state, and the state tells the quantizer. With one state this is the choice of
each level by itself, by distortion and rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from dsq_ckpt.core.arrays import F64, I64

REACH = 12  # codes farther from zero share a context
CONTEXTS = (2 * REACH + 1) * 2 * 3
SIZES = 15  # magnitudes from here on have an escape


class Machine(NamedTuple):
    """The states of a trellis: the next state by parity of the level, and the quantizer, 0 or 1."""

    moves: Any
    second: Any


MACHINES = {
    1: Machine(np.array([[0, 0]]), np.array([0])),
    4: Machine(np.array([[0, 2], [2, 0], [1, 3], [3, 1]]), np.array([0, 0, 1, 1])),
    8: Machine(np.array([[0, 2], [5, 7], [1, 3], [6, 4], [2, 0], [4, 6], [3, 1], [7, 5]]), np.array([0, 1] * 4)),
}


class Tensor(NamedTuple):
    """A quantized weight of one checkpoint; its step is `unit` times the configured one."""

    name: str
    group: str
    values: F64
    unit: float


class Job(NamedTuple):
    """A tensor to choose levels for: what they start from, the step, contexts, and the levels, which are set."""

    tensor: Tensor
    base: F64
    step: float
    context: I64
    levels: I64


class Counts(NamedTuple):
    """Counts of binary decisions of a coder.

    Attributes:
        changed: by context and quantizer, whether the level is not zero.
        negative: by context.
        more: by quantizer and magnitude, whether the level is larger.
    """

    changed: F64
    negative: F64
    more: F64

    @classmethod
    def guess(cls) -> Counts:
        """Return what is taken for the first choice of levels."""
        changed = np.tile([9.0, 1.0], (CONTEXTS, 2, 1))
        return cls(changed, np.ones((CONTEXTS, 2)), np.tile([3.0, 1.0], (2, SIZES, 1)))

    @classmethod
    def zeros(cls) -> Counts:
        """Return counts of nothing."""
        return cls(np.zeros((CONTEXTS, 2, 2)), np.zeros((CONTEXTS, 2)), np.zeros((2, SIZES, 2)))

    def bits(self) -> tuple[F64, F64, F64]:
        """Return bits of no change, of a change with its sign, and of magnitudes by quantizer."""
        unchanged, signs, more = (
            -np.log2((part + 0.4) / (part.sum(-1, keepdims=True) + 0.8)) for part in self
        )
        sizes = np.zeros((2, SIZES + 1))
        sizes[:, 1:] = np.cumsum(np.pad(more[:, 1:, 1], ((0, 0), (1, 0))), 1)
        sizes[:, 1:SIZES] += more[:, 1:, 0]
        return unchanged[..., 0].copy(), unchanged[..., 1, None] + signs[:, None], sizes


@njit(cache=True)
def choose(
    target: Any, context: Any, near: bool, moves: Any, second: Any, same: Any, change: Any, sizes: Any, price: float,
    levels: Any,
) -> Any:
    """Set the levels of least distortion + price * bits, in steps of a quantizer (Viterbi); return that sum."""
    states = len(moves)
    total, fresh = np.full(states, np.inf), np.empty(states)
    past, fresh_past = np.zeros(states, np.int64), np.zeros(states, np.int64)
    back, chosen = np.empty((len(target), states), np.int8), np.empty((len(target), states), np.int32)
    total[0] = 0.0
    for i in range(len(target)):
        size, negative = abs(target[i]), 1 if target[i] < 0 else 0
        fresh[:] = np.inf
        for s in range(states):
            if total[s] == np.inf:
                continue
            q, row = second[s], 3 * context[i] + (past[s] if near else 0)
            low = int(size + 0.5 * q)
            for k in (0, low - 1, low, low + 1):
                if k > 0:
                    gap, bits = size - (k - 0.5 * q), change[row, q, negative] + sizes[q, min(k, SIZES)]
                    if k >= SIZES:
                        bits += 2 * math.floor(math.log2(k - SIZES + 1.0)) + 1
                else:
                    gap, bits = size, same[row, q]
                cost, to = total[s] + gap * gap + price * bits, moves[s, k & 1] if k > 0 else moves[s, 0]
                if cost < fresh[to]:
                    fresh[to], back[i, to], chosen[i, to] = cost, s, 0 if k < 0 else -k if negative else k
                    fresh_past[to] = (2 if past[s] else 1) if k > 0 else past[s] >> 1
        total[:], past[:] = fresh, fresh_past
    s = int(np.argmin(total))
    least = total[s]
    for i in range(len(target) - 1, -1, -1):
        levels[i], s = chosen[i, s], back[i, s]
    return least


@njit(cache=True)
def reconstruct(levels: Any, moves: Any, second: Any, out: Any) -> None:
    """Set what levels stand for, in steps: multiples of one, half a step nearer zero for the second quantizer."""
    s = 0
    for i in range(len(levels)):
        k = levels[i]
        out[i] = k - 0.5 * second[s] * np.sign(k)
        s = moves[s, k & 1]


@njit(cache=True)
def code(
    levels: Any, context: Any, near: bool, moves: Any, second: Any, changed: Any, negative: Any, more: Any
) -> Any:
    """Return the bits of levels by the counts before each, which are updated."""
    s, past, bits = 0, 0, 0.0
    for i in range(len(levels)):
        k, q, row = abs(levels[i]), second[s], 3 * context[i] + (past if near else 0)
        hit = 1 if k else 0
        bits -= math.log2((changed[row, q, hit] + 0.4) / (changed[row, q].sum() + 0.8))
        changed[row, q, hit] += 1
        if k:
            sign = 1 if levels[i] < 0 else 0
            bits -= math.log2((negative[row, sign] + 0.4) / (negative[row].sum() + 0.8))
            negative[row, sign] += 1
            for size in range(1, min(k + 1, SIZES)):
                larger = 1 if k > size else 0
                bits -= math.log2((more[q, size, larger] + 0.4) / (more[q, size].sum() + 0.8))
                more[q, size, larger] += 1
            if k >= SIZES:
                bits += 2 * math.floor(math.log2(k - SIZES + 1.0)) + 1
        past = (2 if past else 1) if k else past >> 1
        s = moves[s, k & 1]
    return bits


def fix_units(points: Sequence[list[Tensor]], power: float) -> list[list[Tensor]]:
    """Return the tensors with the units of the first checkpoint; below a power of 1 these differ less."""
    sizes = [tensor.values.size for tensor in points[0]]
    middle = float(np.average([np.log2(tensor.unit) for tensor in points[0]], weights=sizes))
    units = {tensor.name: 2 ** (middle + power * (np.log2(tensor.unit) - middle)) for tensor in points[0]}
    return [[tensor._replace(unit=units[tensor.name]) for tensor in tensors] for tensors in points]


def encode(
    points: Sequence[list[Tensor]], step: float, price: float, states: int, on_values: bool, near: bool
) -> Iterator[tuple[float, dict[str, F64]]]:
    """Yield for each checkpoint its bits per weight and its reconstruction, to which the next one is a difference."""
    machine = MACHINES[states]
    last: dict[str, F64] = {}
    changed: dict[str, I64] = {}
    models: dict[str, Counts] = {}
    for tensors in points:
        groups: dict[str, list[Job]] = {}
        for tensor in tensors:
            width, old = step * tensor.unit, last.get(tensor.name, np.zeros(tensor.values.size))
            nearest = np.rint(old / width)
            context = 2 * (np.clip(nearest, -REACH, REACH).astype(np.int64) + REACH)
            if near and tensor.name in changed:
                context += changed[tensor.name]
            levels = np.empty(old.size, np.int64)
            base = nearest * width if on_values else old
            groups.setdefault(tensor.group, []).append(Job(tensor, base, width, context, levels))
        bits = 0.0
        for group, jobs in groups.items():
            for _ in range(1 if group in models else 4):  # the prices of levels follow from the last choice
                rates, counts, spent = models.get(group, Counts.guess()).bits(), Counts.zeros(), 0.0
                for job in jobs:
                    target = (job.tensor.values - job.base) / job.step
                    choose(target, job.context, near, *machine, *rates, price, job.levels)
                    spent += code(job.levels, job.context, near, *machine, *counts)
                models[group] = counts
            bits += spent
        for job in (job for jobs in groups.values() for job in jobs):
            out = np.empty(job.base.size)
            reconstruct(job.levels, *machine, out)
            last[job.tensor.name] = job.base + job.step * out
            changed[job.tensor.name] = (job.levels != 0).astype(np.int64)
        yield bits / sum(tensor.values.size for tensor in tensors), dict(last)
