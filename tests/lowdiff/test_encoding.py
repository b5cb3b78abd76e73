"""Gradients come back bit for bit, however they are stored, and each way is taken where it applies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.errors import DSQError
from dsq_ckpt.lowdiff.encoding import (
    decode_gradient,
    decode_sparse_indices,
    encode_dense,
    encode_sparse,
    scales_from_probes,
)
from tests.lowdiff.loops import bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 5.9e-8, 1e-40, 65504.0, 65520.0, 3.4e38, 1.0, -1 / 3]


class Blocks(list):
    """Where encodings keep their bytes."""

    def add(self, block: bytes) -> int:
        self.append(block)
        return len(self) - 1


def any_bits(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Random bits: NaN of every payload, denormals, infinities."""
    width = 8 * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-2 ** (width - 1), 2 ** (width - 1) - 1, (count,), generator=generator)
    return whole.to(INTEGERS[dtype.itemsize]).view(dtype)


def dense(values, scales=(1.0,), half=None, levels=None):
    """How values were stored, once they came back."""
    blocks = Blocks()
    entry = encode_dense(values, scales, half, levels, blocks.add)
    out = torch.full_like(values, 7)
    decode_gradient(entry, out, blocks.__getitem__)
    assert bits(out) == bits(values)
    return entry["as"], sum(map(len, blocks))


@given(st.sampled_from(DTYPES), st.integers(0, 300), st.integers(0, 2**32))
def test_any_bits(dtype, count, seed):
    assert dense(any_bits(dtype, count, seed))[0] == "raw" or count < 4


@given(st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), max_size=50), st.sampled_from([1.0, 0.25, 1 / 3, 1e-3]))
def test_special_values(values, scale):
    values = torch.tensor(values, dtype=torch.float32)
    dense(values)
    dense(values, (scale,), torch.float16, torch.tensor(SPECIAL))
    for half in (torch.float16, torch.bfloat16):
        dense(values.to(half).float() * torch.tensor(scale), (scale,))


@given(
    st.sampled_from(DTYPES), st.integers(0, 2**32),
    st.lists(st.integers(0, 2000) | st.integers(0, 40_000), max_size=60), st.integers(1, 3),
)
def test_sparse(dtype, seed, places, times):
    """Any places in any order, some of them several times."""
    elements = 40_001
    whole = torch.zeros(elements, dtype=dtype)
    unique = torch.tensor(sorted(set(places)), dtype=torch.int64)
    whole[unique] = any_bits(dtype, len(unique), seed)
    given_places = torch.tensor(places * times, dtype=torch.int64)
    given_places = given_places[torch.randperm(len(given_places), generator=torch.Generator().manual_seed(seed))]
    blocks = Blocks()
    entry = encode_sparse(given_places, whole[given_places], blocks.add)
    out = torch.full_like(whole, 7)
    decode_gradient(entry, out, blocks.__getitem__)
    assert bits(out) == bits(whole)
    assert torch.equal(decode_sparse_indices(entry, elements, blocks.__getitem__), unique)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps(gap):
    places = torch.tensor([0, gap + 1, 2 * gap + 2])
    blocks = Blocks()
    entry = encode_sparse(places, torch.tensor([1.0, 2.0, 3.0]), blocks.add)
    assert decode_sparse_indices(entry, 2 * gap + 3, blocks.__getitem__).tolist() == places.tolist()


def test_sparse_gradients_with_all_places():
    blocks = Blocks()
    values = any_bits(torch.float32, 1000, 0)
    entry = encode_sparse(torch.arange(1000), values, blocks.add)
    out = torch.empty(1000)
    decode_gradient(entry, out, blocks.__getitem__)
    assert bits(out) == bits(values)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves(half):
    values = (torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 1e-3).to(half).float()
    known, size = dense(values, half=half)
    assert known == "half" and size < 2.1 * 20_000
    assert dense(values)[0] == "half", "found without being told"
    clipped = values * torch.tensor(0.3712345)
    assert dense(clipped)[0] == "raw"
    assert dense(clipped, (0.37123450636863708,), half)[0] == "half"
    assert dense(torch.cat([values, torch.tensor([0.1])]))[0] == "raw", "one that is not, at the end"


def test_palette():
    generator = torch.Generator().manual_seed(0)
    levels = torch.randn(16, generator=generator)
    values = levels[torch.randint(16, (20_000,), generator=generator)]
    way, size = dense(values, levels=levels)
    assert way == "palette" and size < 0.6 * 20_000
    scale = torch.tensor(0.7654321)
    assert dense(values * scale, (1.0, scale.item()), None, levels)[0] == "palette"
    assert dense(values * scale, (1.0,), None, levels)[0] == "raw"
    assert dense(torch.cat([values, torch.ones(1)]), levels=levels)[0] == "raw"
    assert dense(torch.zeros(100), levels=torch.tensor([-0.0, 1.0]))[0] in ("palette", "half")
    many = torch.randn(256, generator=generator)
    assert dense(many.repeat(50), levels=many)[0] == "palette"


def test_empty():
    for dtype in DTYPES:
        assert dense(torch.empty(0, dtype=dtype), levels=torch.ones(2))[0] == "raw"
        blocks = Blocks()
        entry = encode_sparse(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=dtype), blocks.add)
        out = torch.ones(5, dtype=dtype)
        decode_gradient(entry, out, blocks.__getitem__)
        assert not out.any()


@given(st.floats(2**-20, 1.0, width=32), st.integers(0, 1000))
def test_the_scale_is_found(scale, seed):
    """Clipping multiplies by one number; a few elements before and after tell it, or others that do the same."""
    generator = torch.Generator().manual_seed(seed)
    before = [(torch.randn(64, generator=generator) * 10.0**-part).bfloat16().float() for part in range(3)]
    after = [part * torch.tensor(scale, dtype=torch.float32) for part in before]
    scales = scales_from_probes(zip(before, after, strict=True))
    assert scales
    for number in scales:
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one * torch.tensor(number), other)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@settings(deadline=None, max_examples=40)
@given(st.floats(2**-20, 1.0, width=32), st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_values_tell_their_scale(half, scale, size, seed):
    """Nothing is known but the type: 16-bit floats times some number are stored as such, with padding and without."""
    values = torch.randn(2000, generator=torch.Generator().manual_seed(seed)).mul_(size).to(half).float()
    values[:seed % 1990] = 0
    values *= torch.tensor(scale, dtype=torch.float32)
    blocks = []
    entry = encode_dense(values, [1.0], half, None, lambda block: blocks.append(block) or len(blocks) - 1, search=True)
    assert entry["as"] == "half"
    out = torch.empty_like(values)
    decode_gradient(entry, out, blocks.__getitem__)
    assert bits(out) == bits(values)


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, 0.3], [0.3, 1.2345678], [1e-45, 0.0]])
def test_values_that_are_of_no_scale(values):
    values, blocks = torch.tensor(values), []
    add = lambda block: blocks.append(block) or len(blocks) - 1  # noqa: E731
    entry = encode_dense(values, [1.0], torch.bfloat16, None, add, search=True)
    out = torch.empty_like(values)
    decode_gradient(entry, out, blocks.__getitem__)
    assert bits(out) == bits(values)


def test_gradients_without_one_scale():
    tensor = torch.tensor([1.0, 2.0])
    assert scales_from_probes([]) == [1.0]
    assert scales_from_probes([(tensor, tensor)]) == [1.0]
    assert scales_from_probes([(torch.zeros(2), torch.zeros(2))]) == [1.0]
    assert scales_from_probes([(torch.tensor([math.nan, math.inf]), tensor)]) == [1.0]
    assert scales_from_probes([(tensor, torch.tensor([0.5, 0.7]))]) == [], "it was not one number"


@pytest.mark.parametrize("change", [
    {"as": "later"}, {"count": 4}, {"gaps": [0, 2]}, {"values": 0}, {"gaps": [1, 3]}, {"count": 2},
])
def test_entries_that_lie(change):
    blocks = Blocks()
    entry = {**encode_sparse(torch.tensor([1, 5, 900]), torch.ones(3), blocks.add), **change}
    with pytest.raises(DSQError):
        decode_gradient(entry, torch.empty(1000), blocks.__getitem__)
    entry = encode_sparse(torch.tensor([1000]), torch.ones(1), blocks.add)
    with pytest.raises(DSQError):
        decode_gradient(entry, torch.empty(10), blocks.__getitem__)


def test_levels_that_are_not_there():
    blocks = Blocks()
    entry = encode_dense(torch.ones(50), (1.0,), None, torch.tensor([0.0, 1.0]), blocks.add)
    other = encode_dense(torch.full((50,), 5.0), (1.0,), None, torch.tensor([5.0]), blocks.add)
    changed = {**entry, "levels": other["levels"], "count": other["count"]}
    with pytest.raises(DSQError, match="level"):
        decode_gradient(changed, torch.empty(50), blocks.__getitem__)
