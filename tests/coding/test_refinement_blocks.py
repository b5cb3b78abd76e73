"""Blocks of a refinement layer: the smaller of packed bits and rANS, and nothing else passes."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dsq_ckpt import kernels
from dsq_ckpt.coding import decoding_tasks, refinement_blocks, shuffle_compress
from dsq_ckpt.core.workers import Scratch
from dsq_ckpt.errors import CodingError
from tests.coding import common


def sample(n: int, bits: int, skew: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and symbols that are nearly always the same given their code, the more so the higher `skew`."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 5, n).astype(np.uint8)
    usual = (codes.astype(np.int64) * 3) % (1 << bits)
    other = rng.integers(0, 1 << bits, n)
    return codes, np.where(rng.random(n) < skew, usual, other).astype(np.uint8)


def decode(block: bytes, codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    outputs = []

    def work():
        outputs.extend((yield from refinement_blocks.decode_symbols(block, codes, bits, Scratch())))

    decoding_tasks.run_task(work())
    symbols, packed = outputs
    if packed:
        kernels.unpack(symbols, bits, out)
    else:
        out[:] = symbols


@pytest.mark.parametrize("n", [1, 7, 4096, 70_001])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("skew", [0.0, 0.9, 1.0])
def test_round_trip_and_never_larger(n: int, bits: int, skew: float) -> None:
    codes, symbols = sample(n, bits, skew)
    packed = kernels.pack(symbols, bits).tobytes()
    block = refinement_blocks.encode(packed, codes, bits)
    assert len(block) <= len(packed)
    out = np.empty(n, np.uint8)
    decode(block, codes, bits, out)
    assert np.array_equal(out, symbols)
    if n > 4096 and skew == 0.9:
        assert len(block) < 0.7 * len(packed)


def test_blocks_of_version_2_are_read() -> None:
    codes, symbols = sample(5000, 2, 0.9)
    block = shuffle_compress(kernels.pack(symbols, 2).tobytes(), 1, 1)
    out = np.empty(5000, np.uint8)
    decode(block, codes, 2, out)
    assert np.array_equal(out, symbols)


def test_empty_blocks_decode() -> None:
    empty = np.empty(0, np.uint8)
    assert refinement_blocks.encode(b"", empty, 2) == b""
    decode(b"", empty, 2, empty)


@pytest.mark.parametrize("damage", [
    lambda block: block[:3], lambda block: block[:-1], lambda block: b"\x01" + struct.pack("<I", 1 << 31) + block[5:],
    lambda block: b"\x02" + block[1:], lambda block: block + b"\0\0", lambda block: block[:20] + b"\xff" + block[21:],
])
def test_damaged_blocks_are_refused(damage) -> None:
    codes, symbols = sample(20_000, 2, 0.9)
    block = refinement_blocks.encode(kernels.pack(symbols, 2).tobytes(), codes, 2)
    out = np.empty(len(codes), np.uint8)
    with pytest.raises(CodingError):
        decode(damage(block), codes, 2, out)


def test_other_codes_than_it_was_coded_with_are_refused() -> None:
    codes, symbols = sample(20_000, 2, 0.9)
    block = refinement_blocks.encode(kernels.pack(symbols, 2).tobytes(), codes, 2)
    with pytest.raises(CodingError, match="a model of 5 codes"):
        decode(block, codes + 3, 2, np.empty(len(codes), np.uint8))


def test_blocks_with_rans_of_model_version_1_are_read() -> None:
    codes = (5 * common.lcg(6000, 11)).astype(np.uint8)
    other = (4 * common.lcg(6000, 13)).astype(np.uint8)
    symbols = np.where(common.lcg(6000, 12) < 0.9, codes * 3 % 4, other).astype(np.uint8)
    out = np.empty(6000, np.uint8)
    decode(bytes.fromhex(common.GOLDEN["layered1"]), codes, 2, out)
    assert np.array_equal(out, symbols)
