"""GlobalSketch on every backend: exact counts, whatever the dtype, the length and where memory begins."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsq_ckpt import kernels
from dsq_ckpt.kernels.keys import FULL, KeyWindow
from tests.helpers import reference_kernels
from tests.kernels.subjects import DTYPES, LARGE, NAMES, ROWS, WINDOW, as_fp32, assert_same, codes, floats, subject_of

WINDOWS = [FULL, WINDOW, KeyWindow(64, 65), KeyWindow(16319, 16320)]


def check(subject, x, window, scale, offset=0):
    expected = np.full(window.size, 3, np.int64)
    result = subject(expected)
    reference_kernels.sketch(as_fp32(x), window.lo, window.hi, scale, expected)
    subject.backend.sketch(subject(x, offset), window.lo, window.hi, scale, result)
    assert_same(result, expected)


def check_joint(subject, x, parent, window, scale, rows=ROWS, offset=0):
    expected = np.full((rows, window.size), 3, np.int64)
    result = subject(expected)
    reference_kernels.joint_sketch(as_fp32(x), parent, 7, window.lo, window.hi, scale, expected)
    before = None if parent is None else subject(parent, offset)
    subject.backend.joint_sketch(subject(x, offset), before, 7, window.lo, window.hi, scale, result)
    subject.backend.check()
    assert_same(result, expected)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(subject, window):
    for n, scale in zip((1, 300), (1.0, 0.3), strict=True):
        check(subject, floats(n, n), window, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(subject, dtype):
    for n in subject.sizes:
        x = floats(n, n, dtype)
        check(subject, x, WINDOW, 0.3)
        check_joint(subject, x, codes(n, n), WINDOW, 1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 3])
def test_views_that_are_not_aligned(subject, dtype, offset):
    x = floats(8, 300, dtype)
    check_joint(subject, x, codes(8, 300), WINDOW, 1.0, offset=offset)


def test_without_previous_codes_all_are_of_one_row(subject):
    check_joint(subject, floats(3, 300), None, WINDOW, 0.3)


@pytest.mark.parametrize("rows", [1, 8, 100, 256])
def test_rows(subject, rows):
    """One histogram, several side by side, atomics in global memory."""
    check_joint(subject, floats(4, 300), codes(4, 300, rows), WINDOW, 1.0, max(rows, 8))


def test_large(monkeypatch):
    """More than 2**24 elements, a number that fp32 does not hold."""
    subject, n = subject_of(LARGE, monkeypatch), 2**24 + 1
    x, parent = floats(5, n), codes(5, n, 8)
    expected = np.zeros((8, WINDOW.size), np.int64)
    result = subject(expected)
    kernels.joint_sketch(x.numpy(), parent, 0, WINDOW.lo, WINDOW.hi, 0.3, expected)
    with np.errstate(all="ignore"):
        subject.backend.joint_sketch(subject(x), subject(parent), 0, WINDOW.lo, WINDOW.hi, 0.3, result)
    assert expected.sum() == n
    assert_same(result, expected)


def test_copies_of_a_table_too_large_for_histograms(monkeypatch):
    """Where there are many more elements than bins, programs count into copies."""
    subject = subject_of("triton", monkeypatch)
    from dsq_ckpt.triton_kernels import counting

    monkeypatch.setattr(counting, "MAX_BINS", 64)
    monkeypatch.setattr(counting, "_MAX_BALLOT_BINS", 64)
    window = KeyWindow(7900, 7967)
    plan = counting.make_plan(window.size, torch.device(subject.device))
    assert plan.bins == 0 and plan.copies > 1
    with np.errstate(all="ignore"):
        check(subject, floats(5, 100_003), window, 1.0)


def test_one_bin_takes_all(subject):
    check(subject, torch.full((300,), 0.02), WINDOW, 1.0)
    check(subject, torch.zeros(300), WINDOW, 1.0)


def test_shapes_do_not_matter_once_flat(subject):
    x = floats(6, 5 * 12 * 3).view(5, 12, 3)
    check(subject, x.permute(2, 0, 1).contiguous().view(-1), WINDOW, 1.0)


def test_wrong_arguments(subject):
    x, parent = subject(torch.ones(8)), subject(np.full(8, 9, np.uint8))
    counts = subject(np.zeros((9, WINDOW.size), np.int64))
    sketch, joint = subject.backend.sketch, subject.backend.joint_sketch
    span = WINDOW.lo, WINDOW.hi
    with pytest.raises(ValueError, match="parent: found"):
        joint(x, parent, 0, *span, 1.0, counts)
        subject.backend.check()
    subject.backend.check()  # told once
    with pytest.raises(ValueError, match="row 9"):
        joint(x, None, 9, *span, 1.0, counts)
    with pytest.raises(ValueError, match="shape"):
        joint(x, None, 0, *span, 1.0, counts[:, :-1].contiguous())
    with pytest.raises(ValueError, match="counts"):
        sketch(x, *span, 1.0, counts[0][:-1])
    with pytest.raises(ValueError, match="contiguous"):
        sketch(subject(torch.ones(16))[::2], *span, 1.0, counts[0])
    with pytest.raises(ValueError, match="contiguous"):
        sketch(x.double(), *span, 1.0, counts[0])
    with pytest.raises(ValueError, match="parent"):
        joint(x, parent[:-1], 0, *span, 1.0, counts)
    for scale in (0.0, -1.0, np.inf, np.nan, 1e60):
        with pytest.raises(ValueError, match="inv_scale"):
            sketch(x, *span, scale, counts[0])


@pytest.mark.parametrize("name", NAMES[2:])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(0, 200),
    seed=st.integers(0, 99),
    low=st.integers(64, 16319),
    width=st.integers(1, 2000),
    scale=st.sampled_from([1.0, 0.3, 1e30, 1e-30, 2.0**-140]) | st.floats(2.0**-126, 2.0**120, width=32),
)
def test_any_input(name, monkeypatch, n, seed, low, width, scale):
    subject, window = subject_of(name, monkeypatch), KeyWindow(low, min(low + width, 16320))
    x = floats(seed, n, DTYPES[seed % 3])
    with np.errstate(all="ignore"):
        check(subject, x, window, scale)
        check_joint(subject, x, codes(seed, n), window, scale)


@pytest.mark.parametrize("n", [1, 300, 1 << 16, 1 << 22])
@pytest.mark.parametrize("bins", [300, 32518, 180_600])
def test_no_more_bins_are_cleared_and_summed_than_elements_are_counted(monkeypatch, bins, n):
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from dsq_ckpt.triton_kernels import counting, launch

    counts, cleared = torch.zeros(bins, dtype=torch.int64), []

    def launched(kernel, grid, n, into, copies, width, **_):
        assert into.numel() == copies * width == copies * bins
        cleared.append(0 if into is counts else into.numel())

    monkeypatch.setattr(launch, "launch", launched)
    monkeypatch.setattr(launch, "device_limits", lambda device: launch.DeviceLimits(132, 227 << 10))
    counting.run_counting(None, counting.make_plan(bins, counts.device), n, lambda part: (), counts)
    assert cleared and sum(cleared) <= n


@pytest.mark.parametrize("shared", [48 << 10, 64 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("bins", [1, 8, 300, 1806, 32518, 36120, 65537, 1 << 23])
def test_plans_fit_the_device(monkeypatch, bins, shared):
    """Every bin has a place, histograms fit shared memory, and what programs count takes bounded memory."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from dsq_ckpt.triton_kernels import counting, launch

    monkeypatch.setattr(launch, "device_limits", lambda device: launch.DeviceLimits(132, shared))
    plan = counting.make_plan(bins, torch.device("cpu"))
    if plan.bins:
        assert plan.bins * plan.splits >= bins and plan.bins * 4 < shared
        assert plan.bins & (plan.bins - 1) == 0 and plan.tile & (plan.tile - 1) == 0
    assert plan.programs >= 1 and plan.copies >= 1
    assert plan.copies == 1 or plan.copies * bins * 4 <= 32 << 20
