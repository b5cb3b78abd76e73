from __future__ import annotations

import contextlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.coding import CodingError, coder_class, shuffle_compress, shuffle_decompress
from tests.coding.common import GOLDEN


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.sampled_from([1, 2, 4, 8, 3]), st.sampled_from([1, 30]))
def test_round_trip(raw, itemsize, repeats):
    raw = raw * repeats
    raw = raw[: len(raw) // itemsize * itemsize]
    data = shuffle_compress(raw, itemsize)
    assert shuffle_decompress(memoryview(data), itemsize, len(raw)) == raw
    assert shuffle_compress(memoryview(raw), itemsize) == data


def test_bytes_of_equal_significance_come_together():
    raw = np.arange(6, dtype="<u2").tobytes()
    plain = zstandard.ZstdDecompressor().decompress(shuffle_compress(raw, 2))
    assert plain == bytes(range(6)) + bytes(6)


def test_shuffling_pays_for_floats():
    values = np.random.default_rng(0).normal(0, 0.02, 20_000).astype(np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    for array, gain in ((values, 0.95), (bf16, 0.95)):
        raw = array.tobytes()
        assert len(shuffle_compress(raw, array.itemsize)) < gain * len(shuffle_compress(raw, 1))


def test_a_size_that_is_no_multiple():
    with pytest.raises(CodingError, match="whole number of items"):
        shuffle_compress(b"12345", 4)
    with pytest.raises(CodingError, match="whole number of items"):
        shuffle_decompress(shuffle_compress(b"12345678", 4), 4, 7)


@pytest.mark.parametrize("n", [500, 5000])
def test_damage_and_wrong_sizes_raise(n):
    raw = np.random.default_rng(0).normal(size=n).astype(np.float32).tobytes()
    data = shuffle_compress(raw, 4)
    for bad in (b"", data[:10], data[:-1], data + b"\0", b"\0" * len(data), data + data):
        with pytest.raises(CodingError):
            shuffle_decompress(bad, 4, len(raw))
    for size in (0, len(raw) - 4, len(raw) + 4):
        with pytest.raises(CodingError):
            shuffle_decompress(data, 4, size)
    rng = np.random.default_rng(1)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.integers(0, len(data))] ^= 1 << rng.integers(0, 8)
        with contextlib.suppress(CodingError):
            assert len(shuffle_decompress(bytes(damaged), 4, len(raw))) == len(raw)


def test_a_bomb_is_refused_before_it_is_unpacked():
    bomb = zstandard.ZstdCompressor().compress(bytes(200_000_000))
    with pytest.raises(CodingError, match="declares 200000000 bytes, expected 64"):
        shuffle_decompress(bomb, 4, 64)
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(CodingError):
        shuffle_decompress(stream, 4, 1000)


@pytest.mark.parametrize("n", [100, 4096])
def test_old_bytes_are_read(n):
    """What zstd writes may change between its releases, what it reads does not."""
    raw = (np.arange(n) // 64).astype("<u2").tobytes()
    assert shuffle_decompress(bytes.fromhex(GOLDEN["lossless"][str(n)]), 2, len(raw)) == raw


def test_an_unknown_coder_is_named():
    with pytest.raises(CodingError, match="'zip', expected one of"):
        coder_class("zip")
