"""Every kernel gives the same bits in NumPy, in Numba and in C."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsq_ckpt import native
from dsq_ckpt.kernels import cpu
from dsq_ckpt.kernels.keys import FULL, KeyWindow
from tests.helpers import reference_kernels

SIZES = [0, 1, 2, 3, 5, 63, 64, 65, 4095, 4096, 4097, 12_345, 140_003]
"""Around the unrolling by 4, the blocks of 64 and 4096, and the histogram's threshold."""
WINDOWS = [FULL, KeyWindow(7300, 8200), KeyWindow(64, 65), KeyWindow(16319, 16320)]
SCALES = [1.0, 0.3, 1e30, 1e-30]
ROWS = 64


@pytest.fixture(scope="module", params=dict.fromkeys(("numba", native.available()[-1])), autouse=True)
def _path(request):
    """Numba, and the fastest path in C."""
    native.force(request.param)
    yield
    native.force(None)


def random_floats(seed: int, n: int) -> np.ndarray:
    """Half ordinary weights, half random bit patterns: subnormals, infinities, NaN, both zeros."""
    rng = np.random.default_rng(seed)
    x = (0.02 * rng.standard_normal(n)).astype(np.float32)
    wild = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    x = np.where(rng.random(n) < 0.5, x, wild)
    x[rng.random(n) < 0.1] = 0.0
    x[rng.random(n) < 0.05] = -0.0
    return x


def random_codes(seed: int, n: int, below: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, n).astype(np.uint8)


def assert_same_bits(left: np.ndarray, right: np.ndarray) -> None:
    assert left.dtype == right.dtype
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[left.dtype.itemsize]
    np.testing.assert_array_equal(left.view(kind), right.view(kind))


def check_sketch(x, window, scale):
    counts = [np.full(window.size, 3, np.int64) for _ in range(2)]
    reference_kernels.sketch(x, window.lo, window.hi, scale, counts[0])
    cpu.sketch(x, window.lo, window.hi, scale, counts[1])
    assert counts[0].sum() == 3 * window.size + x.size
    assert_same_bits(*counts)


def check_joint_sketch(x, parent, window, scale):
    counts = [np.full((ROWS, window.size), 3, np.int64) for _ in range(2)]
    reference_kernels.joint_sketch(x, parent, 7, window.lo, window.hi, scale, counts[0])
    cpu.joint_sketch(x, parent, 7, window.lo, window.hi, scale, counts[1])
    assert counts[0].sum() == 3 * counts[0].size + x.size
    assert_same_bits(*counts)


def check_quantize(x, parent, window, scale):
    table = random_codes(1, ROWS * window.size).reshape(ROWS, window.size)
    codes = [np.full(x.size, 255, np.uint8) for _ in range(2)]
    reference_kernels.quantize(x, parent, 7, window.lo, window.hi, scale, table, codes[0])
    cpu.quantize(x, parent, 7, window.lo, window.hi, scale, table, codes[1])
    assert_same_bits(*codes)


def cells(seed: int, log_domain: bool) -> tuple[np.ndarray, np.ndarray]:
    """Lower edges and widths of 256 cells, every fourth one not refined."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(100.0, 130.0, 256) if log_domain else rng.normal(0.0, 0.02, 256)
    width = rng.uniform(0.001, 2.0, 256) if log_domain else rng.uniform(1e-4, 0.02, 256)
    width[::4] = 0.0
    return low, width


def check_refine(x, codes, scale, bits, log_domain):
    low, width = cells(2, log_domain)
    inv_width = np.divide(1.0, width, out=np.zeros(256), where=width > 0)
    out = [np.full(x.size, 255, np.uint8) for _ in range(2)]
    reference_kernels.refine(x, codes, scale, low, inv_width, bits, log_domain, out[0])
    cpu.refine(x, codes, scale, low, inv_width, bits, log_domain, out[1])
    assert (out[0] < 1 << bits).all()
    assert (out[0][width[codes] == 0] == 0).all()
    assert_same_bits(*out)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_sketch(n, window, scale):
    check_sketch(random_floats(n, n), window, scale)


@pytest.mark.parametrize("n", SIZES)
def test_octaves(n):
    x = random_floats(n, n)
    counts = [np.full(512, 3, np.int64) for _ in range(2)]
    for implementation, octaves in zip((reference_kernels, cpu), counts, strict=True):
        implementation.count_octaves(x, octaves)
    assert_same_bits(*counts)
    assert counts[0].sum() == x.size + 3 * 512
    for implementation in (reference_kernels, cpu):
        with pytest.raises(ValueError, match="counts"):
            implementation.count_octaves(x, counts[0][:256])


@pytest.mark.parametrize("with_parent", [True, False])
@pytest.mark.parametrize("scale", SCALES[:2])
@pytest.mark.parametrize("n", SIZES)
def test_joint_sketch_and_quantize(n, scale, with_parent):
    x, parent = random_floats(n, n), random_codes(n + 1, n) if with_parent else None
    check_joint_sketch(x, parent, WINDOWS[1], scale)
    check_quantize(x, parent, WINDOWS[1], scale)


@pytest.mark.parametrize("protected_code", [-1, 0, 9, 63, 255])
@pytest.mark.parametrize("n", SIZES)
def test_gather_protected(n, protected_code):
    x, codes = random_floats(n, n), random_codes(n + 1, n)
    expected = reference_kernels.gather_protected(x, codes, protected_code)
    assert_same_bits(expected, cpu.gather_protected(x, codes, protected_code))
    assert_same_bits(expected, x.view(np.uint32)[codes == protected_code])


@pytest.mark.parametrize("log_domain", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("scale", SCALES[:2])
@pytest.mark.parametrize("n", SIZES)
def test_refine(n, scale, bits, log_domain):
    check_refine(random_floats(n, n), random_codes(n + 1, n, 256), scale, bits, log_domain)


@pytest.mark.parametrize("protected_code", [-1, 0, 9, 63])
@pytest.mark.parametrize("n", SIZES)
def test_dequantize(n, protected_code):
    codes, protected = random_codes(n, n), random_floats(n + 1, n)
    levels = random_floats(n + 2, ROWS)
    out = [np.empty(n, np.float32) for _ in range(2)]
    used = [
        implementation.dequantize(codes, levels, 0.7, protected_code, protected, o)
        for implementation, o in zip((reference_kernels, cpu), out, strict=True)
    ]
    assert used[0] == used[1] == np.count_nonzero(codes == protected_code)
    assert_same_bits(*out)
    assert_same_bits(out[0][codes == protected_code], protected[: used[0]])


@pytest.mark.parametrize("protected_code", [-1, 9])
@pytest.mark.parametrize("log_domain", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("n", SIZES)
def test_dequantize_refined(n, bits, log_domain, protected_code):
    codes, refinement = random_codes(n, n), random_codes(n + 1, n, 1 << bits)
    low, width = cells(3, log_domain)
    sign = np.where(np.random.default_rng(4).random(256) < 0.5, -1.0, 1.0)
    levels, protected = random_floats(n + 2, 256), random_floats(n + 3, n)
    out = [np.empty(n, np.float32) for _ in range(2)]
    used = [
        implementation.dequantize_refined(
            codes, refinement, bits, low, width, sign, levels, 0.7, protected_code, protected, log_domain, o
        )
        for implementation, o in zip((reference_kernels, cpu), out, strict=True)
    ]
    assert used[0] == used[1] == np.count_nonzero(codes == protected_code)
    assert_same_bits(*out)


@pytest.mark.parametrize("implementation", [reference_kernels, cpu], ids=["reference", "cpu"])
def test_too_few_protected_values_are_reported_not_read(implementation):
    codes, out = np.full(100, 5, np.uint8), np.zeros(100, np.float32)
    levels = np.full(256, 2.0, np.float32)
    assert implementation.dequantize(codes, levels, 1.0, 5, np.ones(70, np.float32), out) == 100
    np.testing.assert_array_equal(out, [1.0] * 70 + [2.0] * 30)


@pytest.mark.parametrize("implementation", [reference_kernels, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("log_domain", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_refinement_brings_values_within_half_a_part(implementation, bits, log_domain):
    """refine, then dequantize_refined: at most half of `width / 2**bits` off, in the cell's domain."""
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 16, 5000).astype(np.uint8)
    low, width, sign = np.zeros(256), np.zeros(256), np.ones(256)
    if log_domain:  # sixteen cells of half an octave, alternating in sign
        low[:16], width[:16], sign[:16:2] = 120.0 + np.arange(16) / 2, 0.5, -1.0
        u = rng.uniform(low[codes], low[codes] + width[codes])
        x = (u * 2**23).astype(np.uint32).view(np.float32) * sign[codes].astype(np.float32)
    else:
        low[:16], width[:16] = (np.arange(16) - 8) / 8, 1 / 8
        x = rng.uniform(low[codes], low[codes] + width[codes]).astype(np.float32)
    inv_width = np.divide(1.0, width, out=np.zeros(256), where=width > 0)
    symbols, restored = np.empty(x.size, np.uint8), np.empty(x.size, np.float32)
    nothing, levels = np.empty(0, np.float32), np.zeros(256, np.float32)
    implementation.refine(x, codes, 1.0, low, inv_width, bits, log_domain, symbols)
    implementation.dequantize_refined(
        codes, symbols, bits, low, width, sign, levels, 1.0, -1, nothing, log_domain, restored
    )
    if log_domain:
        np.testing.assert_array_equal(np.signbit(restored), np.signbit(x))
        error = np.abs(np.abs(restored).view(np.uint32) / 2**23 - np.abs(x).view(np.uint32) / 2**23)
    else:
        error = np.abs(restored.astype(np.float64) - x)
    assert (error <= 0.5 * width[codes] / 2**bits + 1e-6).all()
    assert len(np.unique(symbols)) == 1 << bits


@pytest.mark.parametrize("seed", [10, 11])
def test_bf16(seed):
    torch = pytest.importorskip("torch")
    x = random_floats(seed, 100_000)
    halves = cpu.to_bf16(x.view(np.uint32))
    assert_same_bits(halves, reference_kernels.to_bf16(x.view(np.uint32)))
    assert_same_bits(cpu.from_bf16(halves), reference_kernels.from_bf16(halves))
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(cpu.from_bf16(halves), expected)
    every = np.arange(1 << 16, dtype=np.uint16)
    again = cpu.to_bf16(cpu.from_bf16(every).view(np.uint32))
    number = ~np.isnan(cpu.from_bf16(every))
    assert_same_bits(again[number], every[number])
    assert np.isnan(cpu.from_bf16(again[~number])).all()


@pytest.mark.parametrize("implementation", [reference_kernels, cpu], ids=["reference", "cpu"])
def test_bad_arguments_are_refused(implementation):
    x, codes, window = np.ones(8, np.float32), np.full(8, 9, np.uint8), WINDOWS[1]
    span = (window.lo, window.hi)
    counts = np.zeros((9, window.size), np.int64)
    out8, out32, table = np.empty(8, np.uint8), np.empty(8, np.float32), counts.astype(np.uint8)
    cell, levels, nothing = np.ones(256), np.ones(256, np.float32), np.empty(0, np.float32)
    with pytest.raises(ValueError, match="parent: found 9"):
        implementation.joint_sketch(x, codes, 0, *span, 1.0, counts)
    with pytest.raises(ValueError, match="row 9"):
        implementation.quantize(x, None, 9, *span, 1.0, table, out8)
    with pytest.raises(ValueError, match="shape"):
        implementation.joint_sketch(x, None, 0, *span, 1.0, counts[:, :-1].copy())
    with pytest.raises(ValueError, match="contiguous float32"):
        implementation.sketch(x.astype(np.float64), *span, 1.0, counts[0])
    with pytest.raises(ValueError, match="contiguous float32"):
        implementation.sketch(np.ones(16, np.float32)[::2], *span, 1.0, counts[0])
    with pytest.raises(ValueError, match="counts"):
        implementation.sketch(x, *span, 1.0, counts[0][:-1])
    for scale in (0.0, -1.0, np.inf, np.nan, 1e60):
        with pytest.raises(ValueError, match="inv_scale"):
            implementation.sketch(x, *span, scale, counts[0])
    with pytest.raises(ValueError, match="codes: found 9"):
        implementation.dequantize(codes, levels[:9].copy(), 1.0, -1, nothing, out32)
    with pytest.raises(ValueError, match="refinement: found 9"):
        implementation.dequantize_refined(
            codes, codes, 3, cell, cell, cell, levels, 1.0, -1, nothing, False, out32
        )
    with pytest.raises(ValueError, match="bits"):
        implementation.refine(x, codes, 1.0, cell, cell, 9, False, out8)


any_floats = hnp.arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)
any_window = st.tuples(st.integers(64, 16319), st.integers(1, 2000)).map(
    lambda w: KeyWindow(w[0], min(w[0] + w[1], 16320))
)
any_scale = st.sampled_from(SCALES) | st.floats(2.0**-126, 2.0**120, width=32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(x=any_floats, window=any_window, scale=any_scale, seed=st.integers(0, 99))
def test_any_input(x, window, scale, seed):
    codes = random_codes(seed, x.size)
    check_sketch(x, window, scale)
    check_quantize(x, codes, window, scale)
    check_joint_sketch(x, codes, window, scale)
    for log_domain in (False, True):
        check_refine(x, codes, scale, 1 + seed % 8, log_domain)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("scale", SCALES[:2])
def test_sketch_of_a_slice_that_is_not_aligned_to_eight_bytes(offset, scale):
    check_sketch(random_floats(12, 140_003)[offset:], FULL, scale)
    check_sketch(random_floats(13, 140_004)[offset:], WINDOWS[1], scale)
