from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.coding import CodingError, difference, shuffle_compress
from tests.coding.common import GOLDEN
from tests.helpers.independent_reader import after


def weights(number: int, n: int = 20_000) -> np.ndarray:
    """bfloat16 as integers: weights of some sizes that move by about the same amount."""
    rng = np.random.default_rng(7)
    values = rng.normal(0, 0.02, n) + 3e-5 * number * np.random.default_rng(number).normal(size=n)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=300), st.binary(max_size=300), st.sampled_from(difference.ITEM_SIZES), st.sampled_from([1, 10])
)
def test_round_trip(now, before, itemsize, repeats):
    """Round trips of any bits, also where zstd or rANS codes them."""
    size = min(len(now), len(before)) // itemsize * itemsize
    now, before = now[:size] * repeats, before[:size] * repeats
    block = difference.encode(memoryview(now), memoryview(before), itemsize)
    assert difference.decode(memoryview(block), before, itemsize) == now
    assert after(before, block, itemsize) == now  # the reader that was written from docs/format.md


@pytest.mark.parametrize("itemsize", difference.ITEM_SIZES)
def test_every_pair_of_extremes(itemsize):
    """NaN and their payloads, zeros of both signs, infinities, the ends of integers."""
    top, ones = 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
    edges = np.array([0, 1, top - 1, top, top + 1, ones, ones - 1, ones >> 2, top | ones >> 9], f"<u{itemsize}")
    now, before = np.repeat(edges, len(edges)), np.tile(edges, len(edges))
    block = difference.encode(now.tobytes(), before.tobytes(), itemsize)
    assert difference.decode(block, before.tobytes(), itemsize) == now.tobytes()
    assert after(before.tobytes(), block, itemsize) == now.tobytes()


def test_a_float_that_moves_a_little_is_a_small_number():
    """Also across zero and to another exponent: the order of bit patterns is that of values."""
    values = np.array([1.0, -1.0, 1e-45, -0.0, 2.0], np.float32)
    moved = np.nextafter(values, np.float32(np.inf))
    changes = difference._differences(moved.view(np.uint32), values.view(np.uint32))
    np.testing.assert_array_equal(changes, [2, 2, 2, 4, 2])  # from -0.0 past 0.0
    back = difference._apply_differences(changes, values.view(np.uint32))
    np.testing.assert_array_equal(back, moved.view(np.uint32))


def test_differences_are_smaller_than_what_peers_do():
    """Than the bytes by themselves, and than XOR, each as zstd compresses them."""
    now, before = weights(2), weights(1)
    block = difference.encode(now.tobytes(), before.tobytes(), 2)
    assert len(block) < 0.7 * len(shuffle_compress((now ^ before).tobytes(), 2))
    assert len(block) < 0.4 * len(shuffle_compress(now.tobytes(), 2))


def test_a_table_for_each_exponent_pays():
    now, before = weights(2), weights(1)
    block = difference.encode(now.tobytes(), before.tobytes(), 2)
    shuffled = np.random.default_rng(0).permutation(len(now))
    changes = difference._differences(now, before)[shuffled]  # the same differences, but of numbers of other sizes
    mixed = difference._apply_differences(changes, before)
    assert len(block) < 0.9 * len(difference.encode(mixed.tobytes(), before.tobytes(), 2))


def test_unchanged_data_takes_no_space():
    raw = np.random.default_rng(0).bytes(1 << 16)
    for itemsize in difference.ITEM_SIZES:
        assert len(difference.encode(raw, raw, itemsize)) <= 15 * itemsize


def test_noise_grows_by_its_head():
    rng = np.random.default_rng(0)
    for itemsize in difference.ITEM_SIZES:
        now, before = rng.bytes(4096), rng.bytes(4096)
        assert len(difference.encode(now, before, itemsize)) == 4096 + 8 * itemsize


def test_runs_are_left_to_zstd():
    """Rows of a table that were not looked up do not change, and are next to each other."""
    before = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    now = before.copy()
    now[1 << 15 :] += np.random.default_rng(1).integers(0, 1 << 16, 1 << 15, dtype=np.uint32)
    assert len(difference.encode(now.tobytes(), before.tobytes(), 4)) < 1.15 * (2 << 15)  # rANS alone: 1.25


def test_wrong_sizes():
    for now, before, itemsize in ((b"12", b"1234", 2), (b"123", b"123", 2), (b"123", b"123", 3), (b"", b"", 16)):
        with pytest.raises(CodingError, match=r"as many|no items"):
            difference.encode(now, before, itemsize)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_damage_raises_or_gives_wrong_items(itemsize):
    raw, before = weights(2, 3000).tobytes(), weights(1, 3000).tobytes()
    block = difference.encode(raw, before, itemsize)
    for bad in (b"", block[:10], block[:-1], block + b"\0", block + block, b"\xff" * len(block)):
        with pytest.raises(CodingError):
            difference.decode(bad, before, itemsize)
    rng = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(block)
        damaged[rng.integers(0, len(block))] ^= 1 << rng.integers(0, 8)
        with contextlib.suppress(CodingError):
            assert len(difference.decode(bytes(damaged), before, itemsize)) == len(before)


def test_a_model_of_the_former_coder_is_refused():
    model = bytes.fromhex(next(iter(GOLDEN["rans1"].values()))["model"])
    block = len(model).to_bytes(4, "little") + b"\0\0\0\0" + model
    with pytest.raises(CodingError, match="version 1"):
        difference.decode(block, b"12", 1)


def test_the_bytes_are_a_promise():
    """Golden values of decoders; what an encoder writes may change with zstd."""
    golden = {name: bytes.fromhex(data) for name, data in GOLDEN["difference"].items()}
    assert difference.decode(golden["block"], golden["before"], 2) == golden["now"]
    assert golden["block"][:4] != bytes(4)  # a model
