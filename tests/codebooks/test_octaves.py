"""Levels of second moments: the points of a logarithmic grid that are in use, moved to the means of their values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.octaves import Octaves
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.codebook import GroupSketch, fit_group
from dsq_ckpt.storage.manifest import Manifest


def counts_of(values):
    return np.bincount(FULL.bin_of(np.float32(values)), minlength=FULL.size).astype(np.int64)


@pytest.mark.parametrize(("per_octave", "levels"), [(1, [107, 134]), (2, [107, 107.5, 134])])
def test_levels_are_the_points_nearest_to_values_in_use(per_octave, levels) -> None:
    held = counts_of([0, 0, 1.125 * 2.0**-20, 1.375 * 2.0**-20, 1.125 * 2.0**7, -3.0])
    proposal = Octaves(per_octave=per_octave).propose(Histogram(held, FULL))
    assert proposal.levels.tolist() == levels and proposal.centred and proposal.step == 1 / per_octave
    assert proposal.pruned.nonzero()[0].tolist() == [0, FULL.n]
    assert proposal.forced.nonzero()[0].tolist() == list(range(FULL.n + 1, FULL.size))


def test_values_over_more_octaves_than_codes_get_a_coarser_grid() -> None:
    proposal = Octaves(per_octave=4).propose(Histogram(counts_of(2.0 ** np.arange(-120.0, 120, 0.25)), FULL))
    assert proposal.step == 1 and len(proposal.levels) == 241
    assert Octaves().propose(Histogram(counts_of([0.0]), FULL)).levels.tolist() == [127]


@given(
    st.lists(st.tuples(st.integers(0, FULL.n - 1), st.integers(1, 1 << 30)), min_size=1, max_size=40),
    st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 0.2, 2.0]),
)
def test_levels_ascend_and_keep_the_mean(counts, per_octave, price) -> None:
    """By nearest levels each is the mean of its values; it moves by half a step at most, also from the grid's ends."""
    joint = np.zeros((1, FULL.size), np.int64)
    for place, count in counts:
        joint[0, place] = count
    fitted = fit_group(GroupSketch(joint, FULL), Octaves(per_octave=per_octave, rate_distortion=price), None)
    levels = fitted.codebook.levels[1:]
    assert (np.diff(levels) >= 0).all()
    values = FULL.values()

    def level_for(mean: float) -> np.float32:  # on the axis of bits the grid has levels from 2 to 253
        on_axis = int(np.float32(mean).view(np.uint32)) / 2**23
        reached = np.clip(on_axis, 2 - 0.5 / per_octave, 253 + 0.5 / per_octave)
        return np.uint32(round(reached * 2**23)).view(np.float32)

    for code, level in enumerate(levels, 1):
        own = (fitted.table[0] == code) & (joint[0] > 0)
        if own.any() and price == 0:
            assert level == pytest.approx(level_for(np.average(values[own], weights=joint[0][own])), rel=1e-6)


def steps_of_a_chain(run, renewed: float, config=None) -> list[float]:
    """Save second moments of which a part is new each time; return the distances of levels, in octaves."""
    generator = torch.Generator().manual_seed(0)
    logs, steps = torch.randn(64, 2048, generator=generator), []
    for number in range(6):
        if number:
            logs = (1 - renewed) ** 0.5 * logs + renewed**0.5 * torch.randn(logs.shape, generator=generator)
        state = {"state": {"0.weight": {"exp_avg_sq": 2.0 ** (logs - 20)}}}
        dsq_ckpt.save(state, run / str(number), config=config)
        steps += [group.step for name, group in Manifest.read(run / str(number)).groups.items() if "exp_avg_sq" in name]
    return steps


@pytest.mark.parametrize(("renewed", "steps"), [
    (0.01, [0.5] * 6), (0.1, [0.5] * 3 + [1.0] * 3), (0.3, [0.5] * 2 + [1.0] * 4),
])
def test_one_level_per_octave_where_second_moments_are_renewed(tmp_path, renewed, steps) -> None:
    assert steps_of_a_chain(tmp_path, renewed) == steps


def test_a_keyframe_has_two_levels_again(tmp_path) -> None:
    assert steps_of_a_chain(tmp_path, 0.3, {"delta": {"max_chain": 4}}) == [0.5, 0.5, 1.0, 1.0, 1.0, 0.5]


def test_coarser_levels_are_octave_points() -> None:
    assert Octaves().coarser == Octaves(per_octave=1, rate_distortion=0.2)
    assert Octaves(per_octave=4, rate_distortion=1.0).coarser == Octaves(per_octave=1, rate_distortion=2.0)
    assert Octaves(per_octave=1).coarser is None
