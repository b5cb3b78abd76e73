"""Levels of a trellis decode to what was chosen, cost no more than a greedy choice, and gain what theory says."""

from __future__ import annotations

import math
from typing import Any

import measure_trellis
import numpy as np
import pytest
from evaluation.trellis import CONTEXTS, MACHINES, SIZES, Counts, Tensor, choose, code, encode, fix_units, reconstruct

from dsq_ckpt.core.arrays import F64

PRICE = 0.05


def random_rates(seed: int) -> tuple[F64, F64, F64]:
    generator = np.random.default_rng(seed)
    counts = Counts(*(generator.uniform(1, 50, part.shape) for part in Counts.zeros()))
    return counts.bits()


def cost_of(size: float, negative: int, level: int, row: int, q: int, rates: tuple[F64, F64, F64]) -> float:
    """Return the distortion and price of a magnitude, written from the description of the two quantizers."""
    same, change, sizes = rates
    value = 0.0 if level == 0 else (level if q == 0 else (2 * level - 1) / 2)
    bits = same[row, q] if level == 0 else change[row, q, negative] + sizes[q, min(level, SIZES)]
    if level >= SIZES:
        bits += 2 * int(math.log2(level - SIZES + 1)) + 1
    return float((size - value) ** 2 + PRICE * bits)


def walk(targets: F64, contexts: Any, levels: Any, states: int, rates: tuple[F64, F64, F64], greedy: bool) -> float:
    """Return the cost of levels along their states; if `greedy`, of the cheapest level of each weight instead."""
    machine, state, total = MACHINES[states], 0, 0.0
    for target, context, level in zip(targets, contexts, levels, strict=True):
        q, tried = int(machine.second[state]), [abs(int(level))]
        if greedy:
            tried = [0, *range(1, int(abs(target)) + 3)]
        costs = [cost_of(abs(target), int(target < 0), k, 3 * context, q, rates) for k in tried]
        best = int(np.argmin(costs))
        total += costs[best]
        state = int(machine.moves[state, tried[best] & 1])
    return total


@pytest.mark.parametrize("states", MACHINES)
def test_levels_decode_to_what_was_chosen_and_cost_no_more_than_a_greedy_choice(states: int) -> None:
    for seed in range(5):
        generator = np.random.default_rng(seed)
        targets = generator.laplace(size=400) * (1 + 8 * (seed == 4))
        contexts, levels, rates = generator.integers(0, CONTEXTS // 3, 400), np.empty(400, np.int64), random_rates(seed)
        least = choose(targets, contexts, False, *MACHINES[states], *rates, PRICE, levels)
        assert least == pytest.approx(walk(targets, contexts, levels, states, rates, greedy=False))
        greedy = walk(targets, contexts, levels, states, rates, greedy=True)
        assert least <= greedy + 1e-9
        assert states == 1 or least < 0.99 * greedy
        values = np.empty(400)
        distortion = choose(targets, contexts, False, *MACHINES[states], *rates, 0.0, levels)
        reconstruct(levels, *MACHINES[states], values)
        assert distortion == pytest.approx(np.square(targets - values).sum())


@pytest.mark.parametrize(("states", "decibels"), [(1, 0.0), (4, 0.99), (8, 1.09)])
def test_a_trellis_gains_as_published_where_values_are_spread_evenly(states: int, decibels: float) -> None:
    """Marcellin and Fischer, 1990: over a scalar quantizer of the same rate. Other tables of moves gain less."""
    targets = np.random.default_rng(0).uniform(-40, 40, 60_000)
    levels, values = np.empty(60_000, np.int64), np.empty(60_000)
    free = tuple(0 * part for part in Counts.guess().bits())
    choose(targets, np.zeros(60_000, np.int64), False, *MACHINES[states], *free, 0.0, levels)
    reconstruct(levels, *MACHINES[states], values)
    assert 10 * np.log10(1 / 12 / np.square(targets - values).mean()) == pytest.approx(decibels, abs=0.05)


def test_bits_are_those_of_the_counts_before() -> None:
    levels, counts = np.array([0, 1, -17, 0]), Counts.zeros()
    bits = code(levels, np.zeros(4, np.int64), False, *MACHINES[1], *counts)
    changed = [(0.4, 0.8), (0.4, 1.8), (1.4, 2.8), (1.4, 3.8)]  # of the outcome, of both
    more = [(0.4, 0.8), (0.4, 1.8), *[(0.4, 0.8)] * (SIZES - 2)]
    signs = [(0.4, 0.8), (0.4, 1.8)]
    assert bits == pytest.approx(sum(math.log2(both / one) for one, both in [*changed, *signs, *more]) + 3)
    assert counts.changed[0, 0].tolist() == [2, 2] and counts.negative[0].tolist() == [1, 1]


def test_differences_are_spared_what_a_change_of_units_costs_a_lattice() -> None:
    values = np.random.default_rng(0).standard_normal(5000)
    points = [[Tensor("a", "weights/linear", values, unit)] for unit in (0.3, 0.3, 0.3 * 2**0.75)]
    spent = {}
    for on_values in (True, False):
        made = list(encode(points, 1.0, 0.01, 1, on_values, False))
        spent[on_values] = [bits for bits, _ in made]
        assert np.abs(made[1][1]["a"] - values).max() < 0.3 * 1.5
    assert spent[True][:2] == spent[False][:2] and spent[True][1] < 0.02
    assert spent[True][2] > 0.3 and spent[False][2] < 0.02


def test_units_of_the_first_checkpoint_are_kept_with_half_their_differences() -> None:
    def point(*units: float) -> list[Tensor]:
        return [Tensor(str(number), "g", np.zeros(8), unit) for number, unit in enumerate(units)]

    fixed = fix_units([point(1, 16), point(3, 5)], 0.5)
    assert [[tensor.unit for tensor in tensors] for tensors in fixed] == [[2, 8]] * 2


def test_systems_are_compared_at_equal_distortion_and_degradation() -> None:
    def row(system: str, step: float, bits: float, level: float, price: float = 0.1) -> dict[str, Any]:
        return {"run": "r", "system": system, "units": "today", "states": 1, "neighbours": False, "step": step,
                "price": price, "bits": bits, "distortion": level, "degradation": level / 100}

    rows = [row("dsq", 2, 9, 3), row("values", 1, 4, 2), row("values", 2, 1, 4), row("values", 2, 1, 2.5, 0.2),
            row("differences", 1, 1, 2), row("differences", 2, 1, 4)]
    compared = {(each["at"], each["target"], each["system"]): each for each in measure_trellis.compare(rows)}
    assert compared["distortion", 3, "values"]["bits"] == pytest.approx(2)
    assert compared["distortion", 3, "values"]["saved"] == 0
    assert compared["distortion", 3, "differences"]["saved"] == pytest.approx(0.5)
    assert compared["distortion", 3, "values"]["saved_of_differences"] == pytest.approx(-1)
    assert compared["degradation", 0.03, "differences"]["saved"] == pytest.approx(0.5)
    assert compared["degradation", 0.006, "differences"]["saved"] is None
