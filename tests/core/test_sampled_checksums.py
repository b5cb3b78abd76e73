"""Checksums of samples tell one tensor from another, whatever its layout.

Sharded tensors are in `tests/dcp/workers/frozen.py`.
"""

import pytest
import torch

from dsq_ckpt.core.sampled_checksums import SampleSum, join_sums, sum_sample


def text_of(tensor):
    sample_sum = sum_sample(tensor)
    assert sample_sum is not None
    return join_sums([sample_sum])


@pytest.mark.parametrize("shape", [(), (7,), (512,), (300, 50), (5, 6, 7, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_equal_tensors_have_equal_checksums_and_others_do_not(shape, dtype):
    torch.manual_seed(0)
    tensor = (100 * torch.rand(shape)).to(dtype)
    text = text_of(tensor)
    strided = torch.empty(*shape, 2, dtype=dtype)[..., 0]
    strided.copy_(tensor)
    other = (tensor.float() + 100 * torch.rand(shape)).to(dtype)
    assert text == text_of(tensor.clone()) == text_of(strided) != text_of(other)
    assert text.startswith(f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))} ")


def test_each_element_of_a_small_tensor_counts():
    tensor = torch.zeros(8, 9)
    texts = {text_of(tensor)}
    for place in range(72):
        changed = tensor.clone()
        changed.view(-1)[place] = -0.0
        texts.add(text_of(changed))
    assert len(texts) == 73


@pytest.mark.parametrize("tensor", [
    torch.empty(3, device="meta"), torch.zeros(3, dtype=torch.complex64), torch.eye(3).to_sparse(),
    torch.nn.LazyLinear(3).weight, torch.zeros(3, dtype=torch.complex64).conj().imag,
    torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)]),
], ids=["meta", "complex", "sparse", "lazy", "negative", "nested"])
def test_tensors_without_plain_elements_have_none(tensor):
    assert sum_sample(tensor) is None


def test_ranks_that_differ_or_lack_elements_have_no_checksum_together():
    whole = SampleSum("float32", (4,), 4, 11)
    shards = [whole._replace(elements=3, total=13), whole._replace(elements=1, total=-2)]
    assert join_sums([whole, whole]) == join_sums(shards)
    assert join_sums([whole, whole._replace(elements=0, total=0)]) == join_sums([whole])
    for others in ([whole._replace(total=12)], [whole._replace(shape=(2, 2))], [whole._replace(elements=3)]):
        assert join_sums([whole, *others]) is None
    assert join_sums([whole._replace(elements=3)]) is None is join_sums([SampleSum("float32", (0,), 0, 0)])
