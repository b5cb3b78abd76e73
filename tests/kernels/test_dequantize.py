"""Values from codes on every backend, into any dtype."""

import numpy as np
import pytest
import torch

from dsq_ckpt import kernels
from tests.helpers import reference_kernels
from tests.kernels.subjects import DTYPES, LARGE, ROWS, assert_same, codes, floats, subject_of


def check(subject, n, dtype, protected_code=9, protected_count=None, scale=0.7, offset=0):
    known, levels = codes(n, n), floats(n + 1, ROWS).numpy()
    held = int((known == protected_code).sum()) if protected_count is None else protected_count
    protected, expected = floats(n + 2, held).numpy(), np.empty(n, np.float32)
    used = reference_kernels.dequantize(known, levels, scale, protected_code, protected, expected)
    result = subject(torch.full((n,), 7.0, dtype=dtype), offset)
    count = subject.backend.dequantize(
        subject(known, offset), subject(levels), scale, protected_code, subject(protected), result
    )
    subject.backend.check()
    assert int(count) == used and count.dtype == torch.int64
    assert_same(result, torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(subject, dtype):
    for n in subject.sizes:
        check(subject, n, dtype)
        check(subject, n, dtype, -1, scale=1e30, offset=1)


@pytest.mark.parametrize("protected_count", [0, 3, 40])
def test_more_or_fewer_protected_values_than_codes(subject, protected_count):
    """Too few are reported, and not read past their end."""
    check(subject, 300, torch.float32, 9, protected_count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log_domain", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_refined(subject, dtype, bits, log_domain):
    rng, n = np.random.default_rng(bits), 300
    known, refinement = codes(bits, n, 256), codes(bits + 1, n, 1 << bits)
    low = rng.uniform(100.0, 130.0, 256) if log_domain else rng.normal(0.0, 0.02, 256)
    width = rng.uniform(0.001, 2.0, 256) if log_domain else rng.uniform(1e-4, 0.02, 256)
    width[::4] = 0.0
    sign, levels = np.where(rng.random(256) < 0.5, -1.0, 1.0), floats(1, 256).numpy()
    protected, expected = floats(2, 5).numpy(), np.empty(n, np.float32)
    tables = [subject(table) for table in (low, width, sign, levels)]
    for protected_code in (-1, 9):
        used = reference_kernels.dequantize_refined(
            known, refinement, bits, low, width, sign, levels, 0.7, protected_code, protected, log_domain, expected
        )
        result = subject.empty(n, dtype)
        count = subject.backend.dequantize_refined(
            subject(known, 3), subject(refinement, 1), bits, *tables, 0.7, protected_code, subject(protected),
            log_domain, result,
        )
        assert int(count) == used
        assert_same(result, torch.from_numpy(expected).to(dtype))


def test_large(monkeypatch):
    subject, n = subject_of(LARGE, monkeypatch), 2**22 + 1
    known, levels, expected = codes(5, n), floats(5, ROWS).numpy(), np.empty(n, np.float32)
    protected = floats(6, int((known == 9).sum())).numpy()
    kernels.dequantize(known, levels, 0.7, 9, protected, expected)
    result = subject.empty(n, torch.float32)
    count = subject.backend.dequantize(subject(known), subject(levels), 0.7, 9, subject(protected), result)
    assert int(count) == protected.size
    assert_same(result, expected)


def test_wrong_arguments(subject):
    known, out, nothing = subject(np.full(8, 9, np.uint8)), subject.empty(8, torch.float32), subject.empty(0).float()
    cell, levels = subject(np.ones(256)), subject(np.ones(256, np.float32))
    dequantize, refined = subject.backend.dequantize, subject.backend.dequantize_refined
    for few in (levels[:9], levels[:0]):
        with pytest.raises(ValueError, match=r"codes|levels"):
            dequantize(known, few, 1.0, -1, nothing, out)
            subject.backend.check()
    with pytest.raises(ValueError, match="codes: found"):
        refined(known, known, 8, cell, cell[:9], cell, levels, 1.0, -1, nothing, False, out)
        subject.backend.check()
    with pytest.raises(ValueError, match="refinement: found"):
        refined(known, known, 3, cell, cell, cell, levels, 1.0, -1, nothing, False, out)
        subject.backend.check()
    with pytest.raises(ValueError, match="bits"):
        refined(known, known, 0, cell, cell, cell, levels, 1.0, -1, nothing, False, out)
    with pytest.raises(ValueError, match="out"):
        dequantize(known, levels, 1.0, -1, nothing, out[:-1])
    with pytest.raises(ValueError, match="protected"):
        dequantize(known, levels, 1.0, -1, nothing.double(), out)
