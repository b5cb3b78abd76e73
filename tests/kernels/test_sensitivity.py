"""Averages of gradients, sensitivities and their classes on every backend."""

import math

import numpy as np
import pytest
import torch

from dsq_ckpt import kernels
from dsq_ckpt.gradients import offload
from dsq_ckpt.kernels.keys import FULL
from tests.kernels.subjects import DTYPES, as_fp32, assert_same, floats


def rounds_once(subject):
    """Whether a fused multiply-add is one: before Triton 3.9 its interpreter rounds the product, as no GPU does."""
    if not subject.name.startswith("triton"):
        return True
    import triton

    from dsq_ckpt.triton_kernels.launch import INTERPRETED

    return not INTERPRETED or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def blended(subject, average, new, weight):
    """What `GradientAverage` makes of them."""
    expected = average.clone()
    if rounds_once(subject):
        offload.update_average(expected, new, weight)
        return expected
    product = new.float() * torch.tensor(weight)
    return expected.mul_(1.0 - weight).add_(product)


def sketch_of(weight, average):
    counts = np.full(FULL.size, 3, np.int64)
    kernels.sketch(kernels.compute_importance(weight, average), FULL.lo, FULL.hi, 1.0, counts)
    return counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blend(subject, dtype):
    for n, weight in zip(subject.sizes, (0.9, 0.1, 0.9, 1.0, 0.5, 1 / 3, 0.9), strict=False):
        average, new = torch.randn(n), torch.randn(n).to(dtype)
        result = subject(average, 1)
        subject.backend.blend(result, subject(new, 1), weight)
        assert_same(result, blended(subject, average, new, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sketch_in_the_same_pass(subject, dtype):
    for n in subject.sizes:
        average, new, weight = torch.randn(n), torch.randn(n).to(dtype), floats(n, n, dtype)
        result, counts = subject(average), subject(np.full(FULL.size, 3, np.int64))
        subject.backend.sketch_sensitivity(subject(weight), result, counts, subject(new), 0.9)
        assert_same(result, blended(subject, average, new, 0.9))
        assert_same(counts, sketch_of(as_fp32(weight), result.cpu().numpy()))


def test_sketch_alone(subject):
    weight, average = floats(1, 300), floats(2, 300)
    result, counts = subject(average), subject(np.full(FULL.size, 3, np.int64))
    subject.backend.sketch_sensitivity(subject(weight), result, counts)
    assert_same(result, average)
    assert_same(counts, sketch_of(weight.numpy(), average.numpy()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_importance(subject, dtype):
    weight, average = floats(1, 300, dtype), floats(2, 300)
    result = subject.backend.compute_importance(subject(weight, 1), subject(average, 3))
    assert_same(result, kernels.compute_importance(as_fp32(weight), average.numpy()))


@pytest.mark.parametrize("limits", [
    (0.0, math.inf), (0.01, 0.03), (2.0**128, math.inf), (math.inf, math.inf), (0.0, 2.0**128), (0.02, 0.01),
    (1e-45, 1e-40), (2.0**-126, 3.3e38), (1e300, 1e300),
])
def test_classes(subject, limits):
    values = floats(3, 300).abs()
    assert_same(subject.backend.classify(subject(values), *limits), kernels.classify(values.numpy(), *limits))


def test_wrong_arguments(subject):
    values, counts = subject(torch.ones(8)), subject(np.zeros(FULL.size, np.int64))
    backend = subject.backend
    with pytest.raises(ValueError, match="average"):
        backend.compute_importance(values, values[:3])
    with pytest.raises(ValueError, match="weight"):
        backend.compute_importance(values.double(), values)
    with pytest.raises(ValueError, match="not numbers"):
        backend.classify(values, math.nan, 1.0)
    with pytest.raises(ValueError, match="importance"):
        backend.classify(values.double(), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"average|new"):
        backend.blend(values, values[:3], 0.9)
    with pytest.raises(ValueError, match="average"):
        backend.blend(values.half(), values, 0.9)
    with pytest.raises(ValueError, match="counts"):
        backend.sketch_sensitivity(values, values, counts[:-1])
