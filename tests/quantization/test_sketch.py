"""The sketch keeps its promise: quantiles within alpha, for any data, however it was merged."""

import numpy as np
import pytest
from ddsketch import DDSketch

from dsq_ckpt.kernels.keys import ALPHA, FULL, KeyWindow
from dsq_ckpt.quantization.sketch import BLOCK_ELEMENTS, Sketch
from tests.helpers.windows import tight_window

DATASETS = {
    "normal": lambda rng, n: rng.normal(37.4, 1.0, n),
    "weights": lambda rng, n: 0.02 * rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(11278.0, 100.0, n),
    "lognormal": lambda rng, n: rng.lognormal(0.0, 2.0, n) / 100.0,
    "exponential": lambda rng, n: rng.exponential(0.01, n),
    "squared gradients": lambda rng, n: (1e-5 * rng.standard_normal(n)) ** 2,
    "student-t, heavy tails": lambda rng, n: rng.standard_t(1.5, n),
    "bimodal, mixed signs": lambda rng, n: np.where(
        rng.random(n) < 0.3, rng.normal(-17.3, 2, n), rng.normal(4, 1, n)
    ),
    "uniform, ascending": lambda rng, n: np.linspace(-1.0, 1.0, n),
    "integers": lambda rng, n: rng.integers(-5, 20, n),
    "half zeros": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.5),
    "constant": lambda rng, n: np.full(n, 42.0),
    "negative": lambda rng, n: -rng.lognormal(0.0, 1.0, n),
}
SIZES = [1, 2, 3, 5, 17, 1000, 20_001]
QUANTILES = [0.0, 0.005, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0]
TINY = np.finfo(np.float32).tiny


def dataset(name: str, n: int, seed: int = 5) -> np.ndarray:
    x = DATASETS[name](np.random.default_rng(seed), n).astype(np.float32)
    x[np.abs(x) < TINY] = 0.0
    return x


def assert_within_alpha(estimate: float, exact: float) -> None:
    assert abs(estimate - exact) <= ALPHA * abs(exact) * (1 + 1e-12), (estimate, exact)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", DATASETS)
def test_quantiles_are_within_alpha_of_the_exact_ones(name, n):
    x = dataset(name, n)
    sketch = Sketch.of(x)
    for q in QUANTILES:
        assert_within_alpha(sketch.quantile(q), np.quantile(x.astype(np.float64), q, method="lower"))
        assert_within_alpha(
            sketch.magnitude_quantile(q), np.quantile(np.abs(x).astype(np.float64), q, method="lower")
        )


@pytest.mark.parametrize("n", [1, 17, 3000])
@pytest.mark.parametrize("name", DATASETS)
def test_agrees_with_the_authors_sketch(name, n):
    """Both estimate the same element, each within alpha of it."""
    x = dataset(name, n)
    sketch, oracle = Sketch.of(x), DDSketch(relative_accuracy=ALPHA)
    for value in x.tolist():
        oracle.add(value)
    assert sketch.count == oracle.count
    for q in QUANTILES:
        exact = np.quantile(x.astype(np.float64), q, method="lower")
        reference = oracle.get_quantile_value(q)
        assert_within_alpha(reference, exact)
        assert abs(sketch.quantile(q) - reference) <= 2 * ALPHA * abs(exact) * (1 + 1e-12)


@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("name", DATASETS)
def test_merged_parts_equal_the_whole(name, parts):
    x = dataset(name, 5000)
    merged = Sketch()
    for part in np.array_split(x, parts):
        merged.merge(Sketch.of(part))
    np.testing.assert_array_equal(merged.counts, Sketch.of(x).counts)


def test_merge_leaves_its_argument_unchanged():
    left, right = Sketch.of(dataset("normal", 100)), Sketch.of(dataset("negative", 50))
    before = left.counts.copy(), right.counts.copy()
    both = left + right
    np.testing.assert_array_equal(left.counts, before[0])
    left.merge(right)
    left.add(np.ones(9, np.float32))
    both.add(np.ones(9, np.float32))
    np.testing.assert_array_equal(right.counts, before[1])
    np.testing.assert_array_equal(both.counts, left.counts)


def test_sketches_of_different_windows_do_not_merge():
    with pytest.raises(ValueError, match="windows"):
        Sketch().merge(Sketch(KeyWindow(8000, 8100)))
    with pytest.raises(ValueError, match="windows"):
        Sketch() + Sketch(KeyWindow(8000, 8100))


def test_counts_of_another_window_are_refused():
    with pytest.raises(ValueError, match="counts of this window"):
        Sketch(FULL, np.zeros(7, np.int64))


def test_special_values_are_counted_but_have_no_quantile():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 2.0, -3.0], np.float32)
    sketch = Sketch.of(x)
    assert (sketch.count, sketch.zeros, sketch.nonfinite) == (8, 3, 3)
    assert_within_alpha(sketch.quantile(0.0), -3.0)
    assert_within_alpha(sketch.quantile(1.0), 2.0)
    assert sketch.quantile(0.5) == 0.0 == sketch.magnitude_quantile(0.0)
    assert_within_alpha(sketch.magnitude_quantile(1.0), 3.0)


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_quantiles_outside_zero_to_one_are_refused(q):
    with pytest.raises(ValueError, match="quantile"):
        Sketch.of(np.ones(3, np.float32)).quantile(q)


@pytest.mark.parametrize("x", [[], [np.inf, np.nan]], ids=["empty", "non-finite"])
def test_nothing_finite_has_no_quantile(x):
    sketch = Sketch.of(np.array(x, np.float32))
    assert sketch.mean_square() == 0.0
    with pytest.raises(ValueError, match="without finite"):
        sketch.quantile(0.5)
    with pytest.raises(ValueError, match="without finite"):
        sketch.magnitude_quantile(0.5)


@pytest.mark.parametrize("name", DATASETS)
def test_mean_square(name):
    x = dataset(name, 5000).astype(np.float64)
    assert Sketch.of(x).mean_square() == pytest.approx(np.mean(x**2), rel=2 * ALPHA + ALPHA**2)


def test_values_past_a_narrow_window_go_to_its_shared_bins():
    window = tight_window(np.float32([0.5, 1.0]))
    sketch = Sketch.of(np.float32([0.25, 0.5, 1.0, 2.0, -2.0]), window)
    assert sketch.zeros == 1 and sketch.counts[window.n - 2] == 1 and sketch.counts[2 * window.n - 2] == 1
    assert sketch.quantile(1.0) == window.values()[window.n - 2]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (5, 12, 13)], ids=str)
def test_numpy_dtypes_and_shapes(dtype, shape):
    x = np.random.default_rng(6).standard_normal(shape).astype(dtype)
    np.testing.assert_array_equal(Sketch.of(x).counts, Sketch.of(x.astype(np.float32).reshape(-1)).counts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 12, 13)], ids=str)
def test_torch_dtypes_and_shapes(dtype, shape):
    torch = pytest.importorskip("torch")
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(7))
        .to(getattr(torch, dtype))
        .requires_grad_()
    )
    expected = Sketch.of(x.detach().float().numpy().reshape(-1))
    np.testing.assert_array_equal(Sketch.of(x).counts, expected.counts)


@pytest.mark.parametrize(
    "shape", [(BLOCK_ELEMENTS + 1,), (3, BLOCK_ELEMENTS // 2 + 5), (1500, 1031), (130, 11, 997)], ids=str
)
def test_large_inputs_go_through_in_blocks(shape):
    x = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
    expected = np.bincount(FULL.bin_of(x).reshape(-1), minlength=FULL.size)
    np.testing.assert_array_equal(Sketch.of(x).counts, expected)
    np.testing.assert_array_equal(Sketch.of(x.T).counts, expected)
    np.testing.assert_array_equal(Sketch.of(x[::-1]).counts, expected)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="int64"):
        Sketch.of(np.arange(3))


def test_doubles_past_the_fp32_range_are_infinite():
    assert Sketch.of(np.array([1e300, 1.0])).nonfinite == 1
