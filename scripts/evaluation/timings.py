"""How long thresholds and clustering take on a sketch, and on the values themselves (Inshrinkerator, Table 8)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dsq_ckpt.codebooks.algorithms.exact_kmeans import exact_kmeans
from dsq_ckpt.codebooks.algorithms.lloyd import lloyd_kmeans, seed_levels
from dsq_ckpt.quantization.sketch import Sketch
from evaluation.report import Row

ELEMENTS = 1 << 24
LEVELS = 32
QUANTILES = (0.2, 0.995)
"""Of magnitudes: where pruning ends and protection begins in Inshrinkerator's default configuration."""
Report = Callable[[str], None]
F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]


class Way(NamedTuple):
    """One way to get thresholds, or levels, from values."""

    name: str
    run: Callable[[F32], F64]
    naive: bool = False


def sketched_quantiles(x: F32) -> F64:
    """Return thresholds from a sketch, including the time to build it."""
    sketch = Sketch.of(x)
    return np.array([sketch.magnitude_quantile(q) for q in QUANTILES])


def numpy_quantiles(x: F32) -> F64:
    """Return thresholds by selection, in NumPy."""
    return np.asarray(np.quantile(np.abs(x), QUANTILES, method="lower"), np.float64)


def torch_quantiles(x: F32) -> F64:
    """Return thresholds by sorting, in torch: its `quantile` refuses so many elements."""
    ordered = torch.from_numpy(x).abs().sort().values
    return np.array([float(ordered[int(q * (len(x) - 1))]) for q in QUANTILES])


def sketched_exact(x: F32) -> F64:
    """Return the optimal levels of a sketch, including the time to build it."""
    points, counts = _occupied(Sketch.of(x))
    return exact_kmeans(points, counts, LEVELS).levels(LEVELS)


def sketched_lloyd(x: F32) -> F64:
    """Return levels by k-means++ and Lloyd's iterations on a sketch, including the time to build it."""
    points, counts = _occupied(Sketch.of(x))
    return lloyd_kmeans(points, counts, LEVELS)


def naive_lloyd(x: F32, seed: int = 0, max_iterations: int = 100, tolerance: float = 1e-6) -> F64:
    """Return levels by k-means on every value; seeding, iterations and stopping rule are those of `lloyd_kmeans`."""
    values = x.astype(np.float64)
    levels = seed_levels(values, np.ones_like(values), LEVELS, np.random.default_rng(seed))
    enough = tolerance * float(values.max() - values.min())
    for _ in range(max_iterations):
        nearest = np.searchsorted(0.5 * (levels[:-1] + levels[1:]), values)
        mass = np.bincount(nearest, minlength=LEVELS)
        sums = np.bincount(nearest, values, minlength=LEVELS)
        moved = np.where(mass > 0, sums / np.maximum(mass, 1), levels)
        shift = float(np.abs(moved - levels).max())
        levels = np.sort(moved)
        if shift <= enough:
            break
    return levels


THRESHOLDS = (
    Way("thresholds: sketch", sketched_quantiles),
    Way("thresholds: numpy.quantile", numpy_quantiles, naive=True),
    Way("thresholds: torch.sort", torch_quantiles, naive=True),
)
CLUSTERING = (
    Way(f"k-means, {LEVELS} levels: sketch, exact", sketched_exact),
    Way(f"k-means, {LEVELS} levels: sketch, Lloyd", sketched_lloyd),
    Way(f"k-means, {LEVELS} levels: Lloyd on the values", naive_lloyd, naive=True),
)


def timings(report: Report, elements: int = ELEMENTS, repeats: int = 3) -> list[Row]:
    """Measure the median seconds of each method on normal values, and the quality of its result."""
    x = np.random.default_rng(0).standard_normal(elements, np.float32)
    exact = numpy_quantiles(x)
    thresholds = _timed(THRESHOLDS, x, repeats, report)
    for row, (_, result) in thresholds:
        row["off_by"] = float(np.abs(result / exact - 1).max())
    levels = _timed(CLUSTERING, x, repeats, report)
    for row, (_, result) in levels:
        row["error"] = _squared_error(x, result)
    return [row for row, _ in (*thresholds, *levels)]


def _timed(ways: Sequence[Way], x: F32, repeats: int, report: Report) -> list[tuple[Row, tuple[Way, F64]]]:
    """Return rows with times, and the result of each method; methods alternate, so that a slow moment affects all."""
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    results: dict[str, F64] = {}
    for way in ways:
        if not way.naive:
            way.run(x[:4096])  # compiles kernels
    for number in range(repeats):
        for way in ways:
            started = time.perf_counter()
            results[way.name] = way.run(x)
            seconds[way.name].append(time.perf_counter() - started)
            report(f"timings: {way.name}, {number + 1} of {repeats}: {seconds[way.name][-1]:.3f} s")
    medians = {way.name: statistics.median(seconds[way.name]) for way in ways}
    slowest = min(medians[way.name] for way in ways if way.naive)
    return [({
        "part": "timings", "name": way.name, "seconds": medians[way.name], "fastest": min(seconds[way.name]),
        "slowest": max(seconds[way.name]), "repeats": repeats, "elements": len(x),
        "speedup": None if way.naive else slowest / medians[way.name],
    }, (way, results[way.name])) for way in ways]


def _occupied(sketch: Sketch) -> tuple[F64, F64]:
    """Return the values of nonempty finite bins, ascending, and their counts; zeros of both signs are one."""
    values = sketch.window.values()
    used = np.isfinite(values) & (sketch.counts > 0)
    points, place = np.unique(values[used] + 0.0, return_inverse=True)
    return points, np.bincount(place, sketch.counts[used]).astype(np.float64)


def _squared_error(x: F32, levels: F64) -> float:
    nearest = np.searchsorted(0.5 * (levels[:-1] + levels[1:]), x)
    return float(np.mean(np.square(x - levels[nearest])))
