"""K-means and tables of codes in C: each path gives what Numba's kernels give, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from dsq_ckpt import native
from dsq_ckpt.codebooks.algorithms.exact_kmeans import exact_kmeans
from dsq_ckpt.native import codebooks
from dsq_ckpt.quantization.codebook.table import OccupiedBins, rate_distortion_table
from tests.helpers.coder_paths import by_numba_and
from tests.helpers.coder_paths import compiled_path as compiled_path


@pytest.mark.parametrize("n", [1, 2, 3, 8, 33, 511, 512, 513, 1600])
@pytest.mark.parametrize("kind", ["normal", "clumps", "far", "lost"])
def test_clusters(compiled_path, n, kind):
    """Ties between splits go to the first one; weights of the kind "lost" are below the last digit of the sum."""
    rng = np.random.default_rng(n)
    points = np.sort(rng.standard_normal(n))
    points = {"clumps": np.arange(n) // 7 * 100.0 + np.arange(n), "far": points + 1e9}.get(kind, points)
    points = np.unique(points)
    weights = rng.integers(1, 1000, points.size).astype(float)
    lost = np.where(np.arange(points.size) % 3, 1e-30, 1e9)
    weights = {"clumps": np.ones(points.size), "lost": lost}.get(kind, weights)
    for k in (1, 2, 5, 64):
        expected, found = by_numba_and(compiled_path, lambda k=k, w=weights: exact_kmeans(points, w, k))
        assert found._starts.dtype == np.int32 and np.array_equal(found._starts, expected._starts)


def test_more_clusters_than_points_are_refused(compiled_path):
    with pytest.raises(ValueError, match="3 clusters of 2 points"):
        codebooks.solve_kmeans(native.path_index(), np.arange(2.0), np.ones(2), 3)


def problem(seed, rows, columns, levels):
    """Arguments of `rate_distortion_table`, some columns of which stay as they are."""
    rng = np.random.default_rng(seed)
    joint = np.where(rng.random((rows, columns)) < 0.4, rng.integers(0, 1000, (rows, columns)), 0)
    points, positions = rng.standard_normal(columns), np.sort(rng.standard_normal(levels))
    points[:: 9] = positions[0]
    codes = rng.permutation(255)[:levels].astype(np.uint8)
    base = codes[np.abs(points[:, None] - positions).argmin(1)]
    movable = rng.random(columns) < 0.9
    base[~movable] = 255
    return OccupiedBins.from_joint(joint), rows, points, base, movable, positions, codes


@pytest.mark.parametrize(
    ("rows", "columns", "levels"), [(1, 1, 2), (1, 300, 2), (5, 1000, 17), (65, 333, 64), (2, 50, 255)]
)
@pytest.mark.parametrize("price", [0.0, 1e-9, 0.01, 3.0, np.inf])
def test_tables(compiled_path, rows, columns, levels, price):
    arguments = problem(levels, rows, columns, levels)
    expected, found = by_numba_and(compiled_path, lambda: rate_distortion_table(*arguments, price))
    assert np.array_equal(found, expected)
    assert price != 3 or columns < 99 or (found != arguments[3]).any(), "some codes move"


def test_arrays_of_other_layouts(compiled_path):
    """Levels in reverse and entries with gaps are what callers have, too."""
    occupied, rows, points, base, movable, positions, codes = problem(3, 4, 100, 9)
    spread = OccupiedBins(*(np.repeat(array, 2)[::2] for array in occupied))
    reverse = -points[::-1], base[::-1], movable[::-1], -positions[::-1], codes[::-1]
    expected, found = by_numba_and(compiled_path, lambda: rate_distortion_table(spread, rows, *reverse, 0.05))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("broken", ["row", "column", "code", "rank"])
def test_entries_outside_are_refused(compiled_path, broken):
    rows, columns, codes = np.array([0, 1]), np.array([0, 2]), np.arange(3, dtype=np.uint8)
    rank_of, bits, table = np.zeros(256, np.int64), np.ones((2, 4)), np.zeros((2, 3), np.uint8)
    arguments = [np.zeros(3), codes, np.ones(3, np.bool_), np.arange(3.0), codes, rank_of, bits, 0.1]
    codebooks.choose(rows, columns, *arguments, table)
    if broken == "row":
        rows[1] = 2
    elif broken == "column":
        columns[0] = -1
    elif broken == "code":
        arguments[4] = np.array([0, 1, 4], np.uint8)
    else:
        rank_of[7] = 3
    with pytest.raises(ValueError, match="outside the table"):
        codebooks.choose(rows, columns, *arguments, table)
