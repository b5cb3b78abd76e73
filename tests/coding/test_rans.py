from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings

from dsq_ckpt import native
from dsq_ckpt.coding import CodingError, HuffmanCoder, RansCoder, coder_class
from dsq_ckpt.coding.rans1 import Rans1Coder
from tests.coding import common
from tests.helpers.independent_coders import Rans, Refused

PATHS = native.available()


def on_every_path(counts, codes, parent) -> bytes:
    """Return the block, which all paths write alike and read."""
    return common.on_every_path(RansCoder, counts, codes, parent)[1]


def _skewed(n, rate, power, seed):
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, 65) ** power
    return np.where(rng.random(n) < rate, rng.choice(64, n, p=weights / weights.sum()), 40).astype(np.uint8)


N = 1_000_000
DISTRIBUTIONS = {  # made by the test, not by everyone who collects it
    **{f"stay {stay}": partial(common.migrating, N, 64, stay, 1) for stay in (0.999, 0.99, 0.95, 0.8, 0.3)},
    "256 codes": lambda: common.migrating(N, 256, 0.9, 2, spread=40.0),
    "few symbols": lambda: (
        np.random.default_rng(3).choice(5, N, p=[0.7, 0.12, 0.12, 0.03, 0.03]).astype(np.uint8),
        None,
    ),
    "uniform": lambda: (np.random.default_rng(4).integers(0, 196, N).astype(np.uint8), None),
    "0.03 bits, flat rest": lambda: (_skewed(N, 0.0017, 0.0, 5), None),
    "0.03 bits, skewed rest": lambda: (_skewed(N, 0.003, 3.0, 6), None),
    "0.03 bits, very skewed rest": lambda: (_skewed(N, 0.003, 6.0, 7), None),
    "0.003 bits": lambda: (_skewed(N, 0.0002, 2.0, 8), None),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_size_is_within_2_percent_of_the_conditional_entropy(name):
    codes, parent = DISTRIBUTIONS[name]()
    counts = common.count(codes, parent, 0 if parent is None else 256, 256)
    coder = RansCoder.fit(counts)
    entropy = common.conditional_entropy(counts)
    data = on_every_path(counts, codes, parent)
    assert len(data) <= 1.02 * entropy / 8 + 100  # states of 32 lanes, which carry little
    assert coder.expected_bits(counts) == pytest.approx(entropy, rel=0.02)
    assert coder.expected_bits(counts) >= entropy * (1 - 1e-12)


@settings(max_examples=150, deadline=None)
@given(common.blocks())
def test_round_trip(block):
    codes, parent, counts = block
    on_every_path(counts, codes, parent)


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


def test_a_reader_written_from_the_page_reads_it():
    for codes, parent, contexts, symbols in common.golden_cases().values():
        coder = RansCoder.fit(common.count(codes, parent, contexts, symbols))
        reader = Rans(coder.to_bytes())
        previous = None if parent is None else parent.tolist()
        assert reader.decode(coder.encode(codes, parent), codes.size, previous) == codes.tolist()


def escaping(n, symbols, seed):
    """(codes, parent) of which many are so rare in their rows that they are escaped."""
    rng = np.random.default_rng(seed)
    codes = np.where(rng.random(n) < 0.05, rng.integers(0, symbols, n), 7).astype(np.uint8)
    return codes, rng.integers(0, 3, n).astype(np.uint8)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 32767, 32768, 32769, 32799, 32800, 40_000, 70_001])
@pytest.mark.parametrize("kind", ["even", "skewed", "hardly any", "escapes", "256 symbols"])
def test_every_length(n, kind):
    codes, parent = {
        "even": lambda: common.migrating(n, 64, 0.3, n), "skewed": lambda: common.migrating(n, 20, 0.98, n),
        "hardly any": lambda: common.migrating(n, 20, 0.9995, n), "escapes": lambda: escaping(n, 250, n),
        "256 symbols": lambda: escaping(n, 256, n),
    }[kind]()
    counts = common.count(codes, parent, 64, 256)
    if kind in ("escapes", "256 symbols"):  # rows that give them no slots
        counts[:3] += np.where(np.arange(256) == 7, 10**7, 0)
    block = on_every_path(counts, codes, parent)
    previous = parent.tolist()
    if n < 70_000:
        assert Rans(RansCoder.fit(counts).to_bytes()).decode(block, n, previous) == codes.tolist()


@pytest.mark.parametrize("contexts", [1, 15, 16, 17, 32, 33, 64, 65, 256])
@pytest.mark.parametrize("stay", [0.5, 0.9999])
def test_every_number_of_rows(contexts, stay):
    """Vectors keep up to 64 rows, and look the others up."""
    codes, parent = common.migrating(50_000, contexts, stay, contexts)
    parent[: 1000] = np.arange(1000) % contexts
    codes[:1000] = parent[:1000]
    on_every_path(common.count(codes, parent, contexts, contexts), codes, parent)


def test_models_of_many_symbols_in_few_slots():
    """Rows in which hundreds of symbols share what a frequent one leaves, with and without the mark of escapes."""
    rng = np.random.default_rng(0)
    for frequent in (3, 255):
        for shape in (1.0, 20.0, 300.0):
            counts = np.zeros((2, 256), np.int64)
            counts[0] = 1 + rng.random(256) ** shape * 10**5
            counts[0, frequent] = 10**6
            codes = np.concatenate((np.arange(256), np.full(40_000, frequent))).astype(np.uint8)
            on_every_path(counts, codes, np.zeros(codes.size, np.uint8))


def test_a_small_block_costs_little_more_than_its_entropy():
    codes, parent = common.migrating(2_000_000, 64, 0.94, 5)
    coder = RansCoder.fit(common.count(codes, parent, 64, 64))
    sizes = [
        len(coder.encode(codes[i : i + 20_000], parent[i : i + 20_000])) for i in range(0, codes.size, 20_000)
    ]
    expected = coder.expected_bits(common.count(codes, parent, 64, 64)) / 8 / len(sizes)
    assert expected - 1 < np.mean(sizes) < expected + 16  # one lane


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


@pytest.mark.parametrize("where", ["end", "before the end", "start"])
def test_a_block_of_no_bytes_is_certain_throughout(where, path):
    """Its uncertain codes leave the state of one lane at a whole number of words, or the states of 32 as they were."""
    counts = np.array([[0, 5], [1, 3], [0, 0]])
    for bits in (16, 32):
        codes, parent = np.ones(40_000, np.uint8), np.zeros(40_000, np.uint8)
        at = {"end": slice(-bits // 2, None), "before the end": slice(-100, -100 + bits // 2),
              "start": slice(0, bits // 2)}[where]
        parent[at], codes[at] = 1, 0
        assert len(common.check_round_trip(RansCoder.fit(counts), codes, parent)) > 0


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


@pytest.mark.parametrize("n", [600, 5000, 40_000])
def test_damage(n, path):
    codes, parent = common.migrating(n, 32, 0.7, 4)
    counts = common.count(codes, parent, 32, 32)
    counts[-1, ::3] = 10 ** np.arange(11)  # many escapes
    coder = RansCoder.fit(counts)
    common.check_damage(coder, codes, parent, seed=1)
    common.check_model_damage(coder, codes, parent, seed=2)
    keyframe = np.repeat(np.arange(0, 32, 3), n // 11).astype(np.uint8)
    common.check_damage(coder, keyframe, None, seed=3)


def test_blocks_that_the_page_refuses_are_refused_on_every_path():
    """Damaged blocks are refused by all readers or by none, and then read alike."""
    codes, parent = common.migrating(33_000, 12, 0.9, 5)
    coder = RansCoder.fit(common.count(codes, parent, 12, 12))
    data, reader, rng = coder.encode(codes, parent), Rans(coder.to_bytes()), np.random.default_rng(0)
    for _ in range(12):
        damaged = bytearray(data)
        damaged[rng.integers(0, 200) if rng.random() < 0.7 else rng.integers(0, len(data))] ^= 1 << rng.integers(0, 8)
        results = set()
        for name in PATHS:
            native.force(name)
            try:
                results.add(common.decode(coder, bytes(damaged), parent, codes.size).tobytes())
            except CodingError:
                results.add(None)
        try:
            results.add(bytes(reader.decode(bytes(damaged), codes.size, parent.tolist())))
        except Refused:
            results.add(None)
        assert len(results) == 1


def test_golden_bytes(path):
    common.check_golden(RansCoder)


def test_blocks_of_model_version_1_are_read():
    for name, (codes, parent, _, _) in common.golden_cases().items():
        model, block = (bytes.fromhex(common.GOLDEN["rans1"][name][part]) for part in ("model", "block"))
        coder = RansCoder.from_bytes(model)
        assert isinstance(coder, Rans1Coder)
        np.testing.assert_array_equal(common.decode(coder, block, parent, codes.size), codes)
        previous = None if parent is None else parent.tolist()
        assert Rans(model).decode(block, codes.size, previous) == codes.tolist()
        for refused in (lambda: coder.encode(codes, parent), coder.to_bytes):  # noqa: B023
            with pytest.raises(CodingError, match="only read"):
                refused()
        for bad in (block[:-1], block + b"\0\0") if block else ():
            with pytest.raises(CodingError):
                common.decode(coder, bad, parent, codes.size)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda coder: pickle.loads(pickle.dumps(coder))])
def test_a_copy_of_a_coder_that_has_decoded_has_tables_of_its_own(copied):
    """Addresses of the original's tables mean nothing when that is gone, or in another process."""
    codes, parent = common.migrating(40_000, 16, 0.8, 1)
    coder = RansCoder.fit(np.ones((17, 16), np.int64))
    data, out = coder.encode(codes, parent), np.empty_like(codes)
    coder.decode(data, parent, out)
    other = copied(coder)
    for table in coder._decoder_tables:
        table.fill(0)
    other.decode(data, parent, out)
    np.testing.assert_array_equal(out, codes)
