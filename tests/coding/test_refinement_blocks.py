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


def decode(block: bytes, codes: np.ndarray, bits: int, out: np.ndarray, *older: bytes) -> None:
    outputs = []

    def work():
        layers = ((layer, bits) for layer in (block, *older))
        outputs.extend((yield from refinement_blocks.decode_symbols(layers, codes, Scratch())))

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


def moved(symbols: np.ndarray, bits: int, seed: int) -> np.ndarray:
    """Symbols after training has moved their values by at most a few parts."""
    steps = np.random.default_rng(seed).normal(0, 0.4, len(symbols)).round().astype(np.int64)
    return ((symbols + steps) % (1 << bits)).astype(np.uint8)


@pytest.mark.parametrize("n", [1, 4096, 70_001])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_differences_give_the_symbols(n: int, bits: int) -> None:
    codes, symbols = sample(n, bits, 0.0)
    older = kernels.pack(symbols, bits).tobytes()
    symbols = moved(symbols, bits, 0)
    packed = kernels.pack(symbols, bits).tobytes()
    block = refinement_blocks.encode_differences(packed, older, n, bits)
    assert (block is None) == (n == 1)  # a model is larger than a symbol
    if block is None:
        return
    assert n < 70_001 or len(block) < 0.5 * len(packed)
    out = np.empty(n, np.uint8)
    decode(block, codes, bits, out, older)
    assert np.array_equal(out, symbols)
    layers = iter([(block, bits), (older, bits)])
    assert bytes(refinement_blocks.without_differences(layers, n, Scratch())) == packed


def test_unrelated_layers_have_no_differences() -> None:
    (_, one), (_, other) = sample(20_000, 4, 0.0), sample(20_000, 4, 0.0, seed=1)
    packed = [kernels.pack(symbols, 4).tobytes() for symbols in (one, other)]
    assert refinement_blocks.encode_differences(*packed, 20_000, 4) is None


def test_differences_that_no_sample_has_are_coded() -> None:
    """The model is of a sample; every difference has a count in it."""
    one = np.zeros(1 << 20, np.uint8)
    other = one.copy()
    other[np.arange(1, 1 << 20, 4097)] = 9
    packed = [kernels.pack(symbols, 4).tobytes() for symbols in (other, one)]
    block, out = refinement_blocks.encode_differences(*packed, 1 << 20, 4), np.empty(1 << 20, np.uint8)
    assert block is not None
    decode(block, one, 4, out, packed[1])
    assert np.array_equal(out, other)


@pytest.mark.parametrize("older", [
    [], [b"\x01" + bytes(200)], [b"\x28" + bytes(200)], [b""], [b"\x02" + bytes(9_998)], [bytes(10_001)],
], ids=["none", "coded", "zstd", "empty", "differences", "long"])
def test_differences_without_their_older_layer_are_refused(older) -> None:
    codes, symbols = sample(20_000, 4, 0.0)
    packed = [kernels.pack(values, 4).tobytes() for values in (moved(symbols, 4, 0), symbols)]
    block = refinement_blocks.encode_differences(*packed, len(codes), 4)
    with pytest.raises(CodingError, match=r"4 bits that are not there|has no bytes"):
        decode(block, codes, 4, np.empty(len(codes), np.uint8), *older)


def test_an_older_layer_of_other_bits_is_refused() -> None:
    codes, symbols = sample(20_000, 4, 0.0)
    packed = [kernels.pack(values, 4).tobytes() for values in (moved(symbols, 4, 0), symbols)]
    block = refinement_blocks.encode_differences(*packed, len(codes), 4)
    layers = iter([(block, 4), (kernels.pack(symbols, 8).tobytes(), 8)])
    with pytest.raises(CodingError, match="4 bits that are not there"):
        refinement_blocks.without_differences(layers, len(codes), Scratch())
