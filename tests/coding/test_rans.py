from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings

from dsq_ckpt.coding import CodingError, HuffmanCoder, RansCoder, coder_class
from dsq_ckpt.coding.rans import lanes
from tests.coding import common


class Reader:
    """The format of `rans.py`, read as its docstring says, in plain Python."""

    def __init__(self, model: bytes) -> None:
        assert model[0] == 1
        self.contexts = int.from_bytes(model[1:3], "little")
        self.bits = int.from_bytes(model[5:], "little")
        self.rows = [self.row() for _ in range(self.contexts + 1)]
        assert self.bits == 0

    def take(self, width: int) -> int:
        value = self.bits & ((1 << width) - 1)
        self.bits >>= width
        return value

    def number(self) -> int:
        k = 0
        while self.take(1) == 0:
            k += 1
        return (1 << k) - 1 + self.take(k)

    def row(self):
        """([(symbol or None for the escape, start, frequency)], escaped symbols)"""
        symbol, first, freqs, escaped = -1, None, {}, []
        for _ in range(self.number()):
            symbol += self.number() + 1
            v = self.take(7)
            if v == 0:
                escaped.append(symbol)
            elif v == 127:
                first = symbol
            else:
                freqs[symbol] = v if v < 16 else (8 + v % 8) << (v // 8 - 1)
        if escaped:
            v = self.take(7)
            freqs[None] = v if v < 16 else (8 + v % 8) << (v // 8 - 1)
        ranges = []
        if first is not None:
            ranges.append((first, 0, 2**15 - sum(freqs.values())))
            for s, freq in freqs.items():
                ranges.append((s, ranges[-1][1] + ranges[-1][2], freq))
        return ranges, escaped

    def decode(self, data: bytes, parent, n: int) -> list[int]:
        n_lanes = 1 if n < 4096 else 4 if n < 65536 else 8
        states = [65536] * n_lanes
        if data:
            states = [int.from_bytes(data[4 * i : 4 * i + 4], "little") for i in range(n_lanes)]
        words = iter(np.frombuffer(data[4 * n_lanes :], "<u2").tolist())
        codes = []
        for i in range(n):
            ranges, escaped = self.rows[self.contexts if parent is None else int(parent[i])]
            x = states[i % n_lanes]
            symbol, start, freq = next(r for r in ranges if r[1] <= x % 2**15 < r[1] + r[2])
            x = freq * (x // 2**15) + x % 2**15 - start
            if x < 65536:
                x = x * 65536 + next(words)
            if symbol is None:
                freq = 2**15 // len(escaped)
                j = x % 2**15 // freq
                symbol = escaped[j]
                x = freq * (x // 2**15) + x % 2**15 - j * freq
                if x < 65536:
                    x = x * 65536 + next(words)
            states[i % n_lanes] = x
            codes.append(symbol)
        assert states == [65536] * n_lanes and next(words, None) is None
        return codes


def _skewed(n, rate, power, seed):
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, 65) ** power
    return np.where(rng.random(n) < rate, rng.choice(64, n, p=weights / weights.sum()), 40).astype(np.uint8)


N = 1_000_000
DISTRIBUTIONS = {
    **{f"stay {stay}": common.migrating(N, 64, stay, 1) for stay in (0.999, 0.99, 0.95, 0.8, 0.3)},
    "256 codes": common.migrating(N, 256, 0.9, 2, spread=40.0),
    "few symbols": (
        np.random.default_rng(3).choice(5, N, p=[0.7, 0.12, 0.12, 0.03, 0.03]).astype(np.uint8),
        None,
    ),
    "uniform": (np.random.default_rng(4).integers(0, 196, N).astype(np.uint8), None),
    "0.03 bits, flat rest": (_skewed(N, 0.0017, 0.0, 5), None),
    "0.03 bits, skewed rest": (_skewed(N, 0.003, 3.0, 6), None),
    "0.03 bits, very skewed rest": (_skewed(N, 0.003, 6.0, 7), None),
    "0.003 bits": (_skewed(N, 0.0002, 2.0, 8), None),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_size_is_within_2_percent_of_the_conditional_entropy(name):
    codes, parent = DISTRIBUTIONS[name]
    counts = common.count(codes, parent, 0 if parent is None else 256, 256)
    coder = RansCoder.fit(counts)
    entropy = common.conditional_entropy(counts)
    data = common.check_round_trip(coder, codes, parent)
    assert len(data) <= 1.02 * entropy / 8 + 24
    assert coder.expected_bits(counts) == pytest.approx(entropy, rel=0.02)
    assert coder.expected_bits(counts) >= entropy * (1 - 1e-12)


@settings(max_examples=150, deadline=None)
@given(common.blocks())
def test_round_trip(block):
    codes, parent, counts = block
    common.check_round_trip(RansCoder.fit(counts), codes, parent)


@settings(max_examples=50, deadline=None)
@given(common.blocks())
def test_both_coders_give_the_same_codes(block):
    codes, parent, counts = block
    decoded = []
    for name, cls in (("rans", RansCoder), ("huffman", HuffmanCoder)):
        assert coder_class(name) is cls and cls.name == name
        coder = cls.fit(counts)
        decoded.append(common.decode(coder, coder.encode(codes, parent), parent, codes.size))
    np.testing.assert_array_equal(decoded[0], decoded[1])


def test_a_reader_written_from_the_docstring_reads_it():
    for codes, parent, contexts, symbols in common.golden_cases().values():
        coder = RansCoder.fit(common.count(codes, parent, contexts, symbols))
        reader = Reader(coder.to_bytes())
        assert reader.decode(coder.encode(codes, parent), parent, codes.size) == codes.tolist()


@pytest.mark.parametrize("n", [1, 2, 4095, 4096, 4097, 65535, 65536, 65539])
def test_every_number_of_lanes(n):
    codes, parent = common.migrating(n, 64, 0.7, n)
    counts = common.count(codes, parent, 64, 64)
    data = common.check_round_trip(RansCoder.fit(counts), codes, parent)
    assert len(data) <= 1.02 * common.conditional_entropy(counts) / 8 + 4 * lanes(n)
    assert lanes(n) in (1, 4, 8)


def test_a_small_block_costs_little_more_than_its_entropy():
    codes, parent = common.migrating(2_000_000, 64, 0.94, 5)
    coder = RansCoder.fit(common.count(codes, parent, 64, 64))
    sizes = [
        len(coder.encode(codes[i : i + 20_000], parent[i : i + 20_000])) for i in range(0, codes.size, 20_000)
    ]
    expected = coder.expected_bits(common.count(codes, parent, 64, 64)) / 8 / len(sizes)
    assert expected - 1 < np.mean(sizes) < expected + 16


def test_certain_codes_cost_nothing():
    counts = np.diag(np.arange(1, 65))
    counts = np.concatenate((counts, np.zeros((1, 64), np.int64)))
    coder = RansCoder.fit(counts)
    parent = np.random.default_rng(0).integers(0, 64, 10_000).astype(np.uint8)
    assert coder.encode(parent, parent) == b""
    assert coder.expected_bits(counts) == 0
    np.testing.assert_array_equal(common.decode(coder, b"", parent, parent.size), parent)
    other = np.roll(parent, 1)
    with pytest.raises(CodingError, match=r"code \d+ at index \d+ has no count after code \d+"):
        coder.encode(other, parent)


def test_the_model_is_small():
    codes, parent = common.migrating(4_000_000, 64, 0.9, 3, spread=8.0)
    counts = common.count(codes, parent, 64, 64)
    assert np.count_nonzero(counts) > 500
    assert len(RansCoder.fit(counts).to_bytes()) < 1024


def test_an_empty_model_decodes_nothing():
    coder = RansCoder.fit(np.zeros((1, 1), np.int64))
    assert coder.encode(np.empty(0, np.uint8), None) == b""
    with pytest.raises(CodingError, match="symbol that the model lacks"):
        coder.decode(b"", None, np.empty(3, np.uint8))


def test_threads_share_a_coder():
    codes, parent = common.migrating(400_000, 64, 0.9, 9)
    coder = RansCoder.fit(common.count(codes, parent, 64, 64))
    parts = [slice(i, i + 20_000) for i in range(0, codes.size, 20_000)]
    alone = [coder.encode(codes[part], parent[part]) for part in parts]
    out = np.empty_like(codes)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda part: coder.encode(codes[part], parent[part]), parts)) == alone
        list(pool.map(lambda part, data: coder.decode(data, parent[part], out[part]), parts, alone))
    np.testing.assert_array_equal(out, codes)


def test_arguments():
    common.check_arguments(RansCoder)


@pytest.mark.parametrize("n", [600, 5000])
def test_damage(n):
    codes, parent = common.migrating(n, 32, 0.7, 4)
    counts = common.count(codes, parent, 32, 32)
    counts[-1, ::3] = 10 ** np.arange(11)  # many escapes
    coder = RansCoder.fit(counts)
    common.check_damage(coder, codes, parent, seed=1)
    common.check_model_damage(coder, codes, parent, seed=2)
    keyframe = np.repeat(np.arange(0, 32, 3), n // 11).astype(np.uint8)
    common.check_damage(coder, keyframe, None, seed=3)


def test_golden_bytes():
    common.check_golden(RansCoder)
