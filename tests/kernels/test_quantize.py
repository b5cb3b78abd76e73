"""Codes and refinement symbols on every backend, bit for bit those of NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsq_ckpt import kernels
from dsq_ckpt.kernels.backend import Refinement
from dsq_ckpt.kernels.keys import FULL, KeyWindow
from tests.helpers import reference_kernels
from tests.kernels.subjects import DTYPES, LARGE, NAMES, ROWS, WINDOW, as_fp32, assert_same, codes, floats, subject_of

SPAN = WINDOW.lo, WINDOW.hi


def table_of(seed=1, rows=ROWS, window=WINDOW, below=ROWS):
    return codes(seed, rows * window.size, below).reshape(rows, window.size)


def cells(seed, log_domain):
    """Lower edges and one over the widths of 256 cells, every fourth one not refined."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(100.0, 130.0, 256) if log_domain else rng.normal(0.0, 0.02, 256)
    inverse = 1 / (rng.uniform(0.001, 2.0, 256) if log_domain else rng.uniform(1e-4, 0.02, 256))
    inverse[::4] = 0.0
    return low, inverse


def check(subject, x, parent, scale, bits=0, log_domain=False, offset=0, table=None, window=WINDOW):
    n, table = x.numel(), table_of(window=window) if table is None else table
    low, inverse = cells(2, log_domain)
    expected, places = np.empty(n, np.uint8), np.empty(n, np.uint8)
    reference_kernels.quantize(as_fp32(x), parent, 7, window.lo, window.hi, scale, table, expected)
    result, symbols = subject.empty(n), subject.empty(n)
    refinement = Refinement(subject(low), subject(inverse), bits, log_domain, symbols) if bits else None
    subject.backend.quantize(
        subject(x, offset), None if parent is None else subject(parent, offset), 7, window.lo, window.hi, scale,
        subject(table), result, refinement,
    )
    subject.backend.check()
    assert_same(result, expected)
    if bits:
        reference_kernels.refine(as_fp32(x), expected, scale, low, inverse, bits, log_domain, places)
        assert_same(symbols, places)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(subject, dtype):
    for n in subject.sizes:
        check(subject, floats(n, n, dtype), codes(n, n), 0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log_domain", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_refined_in_the_same_pass(subject, dtype, bits, log_domain):
    check(subject, floats(bits, 300, dtype), codes(bits, 300), 0.3, bits, log_domain)
    check(subject, floats(bits, 70, dtype), None, 1.0, bits, log_domain)


@pytest.mark.parametrize("offset", [1, 3])
def test_views_that_are_not_aligned(subject, offset):
    check(subject, floats(8, 300), codes(8, 300), 1.0, 4, offset=offset)


@pytest.mark.parametrize("window", [FULL, KeyWindow(64, 65), KeyWindow(16319, 16320)], ids=str)
def test_windows(subject, window):
    check(subject, floats(9, 300), codes(9, 300), 1e-30, window=window)


@pytest.mark.parametrize("n", [2**22 + 1, pytest.param(2**24 + 1, marks=pytest.mark.campaign)])
def test_large(monkeypatch, n):
    subject = subject_of(LARGE, monkeypatch)
    x, parent, table = floats(5, n), codes(5, n), table_of()
    expected, result = np.empty(n, np.uint8), subject.empty(n)
    kernels.quantize(x.numpy(), parent, 0, *SPAN, 0.3, table, expected)
    with np.errstate(all="ignore"):
        subject.backend.quantize(subject(x), subject(parent), 0, *SPAN, 0.3, subject(table), result)
    assert_same(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log_domain", [False, True])
def test_refine(subject, dtype, log_domain):
    (low, inverse), n = cells(3, log_domain), 300
    x, known, expected, result = floats(4, n, dtype), codes(4, n, 256), np.empty(n, np.uint8), subject.empty(n)
    for bits in (1, 5):
        reference_kernels.refine(as_fp32(x), known, 0.3, low, inverse, bits, log_domain, expected)
        subject.backend.refine(
            subject(x, 1), subject(known, 1), 0.3, subject(low), subject(inverse), bits, log_domain, result
        )
        assert_same(result, expected)


def test_wrong_arguments(subject):
    x, parent, out = subject(torch.ones(8)), subject(np.full(8, 9, np.uint8)), subject.empty(8)
    table, cell = subject(np.zeros((9, WINDOW.size), np.uint8)), subject(np.ones(256))
    quantize, refine, check = subject.backend.quantize, subject.backend.refine, subject.backend.check
    with pytest.raises(ValueError, match="parent: found"):
        quantize(x, parent, 0, *SPAN, 1.0, table, out)
        check()
    with pytest.raises(ValueError, match="row 9"):
        quantize(x, None, 9, *SPAN, 1.0, table, out)
    with pytest.raises(ValueError, match="shape"):
        quantize(x, None, 0, *SPAN, 1.0, table[:, :-1].contiguous(), out)
    with pytest.raises(ValueError, match="codes"):
        quantize(x, None, 0, *SPAN, 1.0, table, out[:-1])
    with pytest.raises(ValueError, match="table"):
        quantize(x, None, 0, *SPAN, 1.0, table.int(), out)
    with pytest.raises(ValueError, match="bits"):
        refine(x, parent, 1.0, cell, cell, 9, False, out)
    with pytest.raises(ValueError, match="codes: found"):
        refine(x, parent, 1.0, cell[:9], cell, 4, False, out)
        check()
    with pytest.raises(ValueError, match="codes: found"):
        quantize(x, None, 0, *SPAN, 1.0, table + 9, parent, Refinement(cell[:9], cell, 4, False, out))
        check()
    with pytest.raises(ValueError, match="inv_scale"):
        quantize(x, None, 0, *SPAN, 0.0, table, out)


@pytest.mark.parametrize("name", NAMES[2:])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(0, 200),
    seed=st.integers(0, 99),
    bits=st.integers(0, 8),
    log_domain=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, 1e30, 1e-30]) | st.floats(2.0**-126, 2.0**120, width=32),
)
def test_any_input(name, monkeypatch, n, seed, bits, log_domain, scale):
    subject, x, parent = subject_of(name, monkeypatch), floats(seed, n, DTYPES[seed % 3]), codes(seed, n)
    with np.errstate(all="ignore"):
        check(subject, x, parent if seed % 2 else None, scale, bits, log_domain)
