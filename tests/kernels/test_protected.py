"""Protected values on every backend: in order, as fp32 or as the base layer's bf16."""

import numpy as np
import pytest
import torch

from dsq_ckpt.quantization.chunk import protected_bf16
from tests.helpers import reference_kernels
from tests.kernels.subjects import DTYPES, ROWS, WINDOW, as_fp32, assert_same, codes, floats


def numbers(bits):
    """Bits of fp32 or bf16 numbers as these, so that NaN is compared as NaN."""
    return bits.cpu().view(torch.float32 if bits.dtype == torch.uint32 else torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_sizes(subject, dtype, bf16):
    for n in subject.sizes:
        x, known = floats(n, n, dtype), codes(n, n)
        expected = reference_kernels.gather_protected(as_fp32(x), known, 9)
        result, count = subject.backend.gather_protected(subject(x, 1), subject(known, 1), 9, bf16=bf16)
        assert int(count) == len(expected)
        expected = protected_bf16(expected) if bf16 else expected
        assert result.dtype == (torch.uint16 if bf16 else torch.uint32)
        assert_same(numbers(result), numbers(torch.from_numpy(expected)))


@pytest.mark.parametrize("protected_code", [-1, 0, 5, 255])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_as_counted_while_quantizing(subject, protected_code, share):
    """None, few, all; what quantize counted serves as well as counting anew."""
    n = 300
    x, rng = torch.rand(n) - 0.5, np.random.default_rng(1)
    table = np.where(rng.random((1, WINDOW.size)) < share, max(protected_code, 0), 7).astype(np.uint8)
    result = subject.empty(n)
    tensor = subject(x)
    tally = subject.backend.quantize(
        tensor, None, 0, WINDOW.lo, WINDOW.hi, 1.0, subject(table), result, protected_code=protected_code
    )
    expected = x.numpy().view(np.uint32)[result.cpu().numpy().astype(int) == protected_code]
    for counted in (tally, None):
        assert_same(subject.backend.gather_protected(tensor, result, protected_code, counted)[0], expected)


@pytest.mark.parametrize("bf16", [False, True])
def test_room(subject, bf16):
    """Of elements that fit, all come; of others, those that fit, and how many there are."""
    x, known = floats(1, 300), codes(1, 300)
    expected = reference_kernels.gather_protected(as_fp32(x), known, 9)
    expected, m = protected_bf16(expected) if bf16 else expected, len(expected)
    for capacity in (0, 1, m - 1, m, m + 1, 400):
        result, count = subject.backend.gather_protected(subject(x), subject(known), 9, bf16=bf16, capacity=capacity)
        served = min(m, capacity)
        assert int(count) == m and len(result) >= served
        assert_same(numbers(result)[:served], numbers(torch.from_numpy(expected))[:served])


def test_many_equal_in_order(subject):
    x = torch.arange(300, dtype=torch.float32)
    result = subject.backend.gather_protected(subject(x), subject(np.full(300, 3, np.uint8)), 3)[0]
    assert_same(numbers(result), x)


def test_largest_numbers_do_not_become_infinite(subject):
    x = torch.tensor([3.4028235e38, -3.4028235e38, 3.38e38, 1.0])
    result = subject.backend.gather_protected(subject(x), subject(np.zeros(4, np.uint8)), 0, bf16=True)[0]
    assert numbers(result).isfinite().all()


def test_wrong_arguments(subject):
    x, known = subject(torch.ones(8)), subject(codes(0, 8, ROWS))
    with pytest.raises(ValueError, match="codes"):
        subject.backend.gather_protected(x, known[:-1], 0)
    with pytest.raises(ValueError, match="contiguous"):
        subject.backend.gather_protected(x.double(), known, 0)
