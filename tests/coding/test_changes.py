"""Blocks that list changes: the same bytes on every path, as the page says, and no damage is worse than an error."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from dsq_ckpt import native
from dsq_ckpt.coding import ChangesCoder, CodingError, RansCoder, changes, coder_class, fit_fastest
from tests.coding import common
from tests.helpers.independent_coders import Changes, Refused, token_row

PATHS = native.available()


def updated(coder, data, parent):
    codes = parent.copy()
    coder.update(data, codes)
    return codes


def on_every_path(counts, codes, parent):
    """Return the coder and the block, which all paths write alike, and read into another array and in place."""
    def in_place(coder):
        if parent is not None:
            np.testing.assert_array_equal(updated(coder, coder.encode(codes, parent), parent), codes)

    return common.on_every_path(ChangesCoder, counts, codes, parent, in_place)


def mixed(n, seed, alphabet=40):
    """(codes, parent) of which some never change, some seldom, at rates far apart, and some in two cases of three."""
    rng = np.random.default_rng(seed)
    parent = rng.integers(0, alphabet, n).astype(np.uint8)
    rates = np.array([0.0, 0.0005, 0.004, 0.03, 0.2, 0.65])[np.arange(alphabet) % 6]
    codes = np.where(rng.random(n) < rates[parent], (parent + rng.integers(1, 4, n)) % alphabet, parent)
    return codes.astype(np.uint8), parent


@settings(max_examples=100, deadline=None)
@given(common.blocks())
def test_round_trip(block):
    codes, parent, counts = block
    if counts.shape[0] <= 256:
        on_every_path(counts, codes, parent)


LENGTHS = [1, 2, 31, 63, 64, 65, 127, 1000, 32_767, 40_000, 70_001]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("kind", ["seldom", "hardly any", "mixed", "none", "all", "many previous codes"])
def test_every_length_is_read_by_a_reader_written_from_the_page(n, kind):
    codes, parent = {
        "seldom": lambda: common.migrating(n, 40, 0.98, n), "hardly any": lambda: common.migrating(n, 40, 0.9998, n),
        "mixed": lambda: mixed(n, n), "none": lambda: (np.full(n, 3, np.uint8),) * 2,
        "all": lambda: (np.full(n, 4, np.uint8), np.full(n, 3, np.uint8)),
        "many previous codes": lambda: mixed(n, n, 251),
    }[kind]()
    counts = common.count(codes, parent, 251, 252)
    coder, block = on_every_path(counts, codes, parent)
    if n < 70_000:
        assert Changes(coder.to_bytes()).decode(block, n, parent.tolist()) == codes.tolist()


def test_lists_are_what_the_page_says():
    """The streams of a block, made by a plain loop, are coded by `RansCoder` to the same states and words."""
    codes, parent = mixed(3000, 5)
    coder, block = on_every_path(common.count(codes, parent, 40, 40), codes, parent)
    reader = Changes(coder.to_bytes())
    streams, gaps, listed = [[] for _ in reader.limits], [0] * len(reader.limits), []
    for code, before in zip(codes.tolist(), parent.tolist(), strict=True):
        k = reader.kinds[before]
        if k < len(gaps) and code == before:
            gaps[k] += 1
        elif k < len(gaps):
            while gaps[k] >= reader.limits[k]:
                streams[k].append(reader.limits[k])
                gaps[k] -= reader.limits[k]
            streams[k].append(gaps[k])
            gaps[k] = 0
        if k == len(gaps) or code != before:
            listed.append((before, code))
    assert len(streams) >= 2 and {changes.NEVER, len(gaps)} <= set(reader.kinds)
    rows = [40 + k for k, stream in enumerate(streams) for _ in stream] + [before for before, _ in listed]
    symbols = [token for stream in streams for token in stream] + [code for _, code in listed]
    rans = RansCoder.fit(np.zeros((len(reader.limits) + 41, 256), np.int64))
    rans.__dict__["_encoder_tables"] = coder._encoder_tables
    own = rans.encode(np.array(symbols, np.uint8), np.array(rows, np.uint8))
    assert block.endswith(own) and len(block) - len(own) == sum(
        1 + (len(stream) << (k == 0) >= 128) for k, stream in enumerate(streams)
    )


@pytest.mark.parametrize("stay", [0.999, 0.99, 0.97, 0.95])
def test_size_is_that_of_lanes(stay):
    codes, parent = common.migrating(1_000_000, 48, stay, 1)
    counts = common.count(codes, parent, 48, 48)
    lanes, lists = RansCoder.fit(counts), ChangesCoder.fit(counts)
    entropy = common.conditional_entropy(counts) / 8
    assert len(lists.encode(codes, parent)) <= 1.01 * entropy + 100
    assert lists.expected_bits(counts) / 8 == pytest.approx(len(lists.encode(codes, parent)), rel=0.01, abs=60)
    assert len(lists.to_bytes()) < len(lanes.to_bytes()) + 40
    chosen = fit_fastest(counts)
    assert isinstance(chosen, ChangesCoder) and chosen.to_bytes() == lists.to_bytes()


def test_few_classes_for_one_rate_and_several_for_many():
    for rates, most in (([0.01], 1), ([0.01, 0.011], 1), ([0.001, 0.1], 2), ([0.2, 0.0002, 0.02, 0.002], 4)):
        counts = np.zeros((9, 8), np.int64)
        for code in range(8):
            counts[code, code] = round(10**5 / rates[code % len(rates)])
            counts[code, (code + 1) % 8] = 10**5
        assert len(ChangesCoder.fit(counts)._rates) == most


def test_lanes_where_lists_would_be_no_gain():
    often, parent = common.migrating(100_000, 32, 0.7, 2)
    shifted = ((parent + 1) % 32).astype(np.uint8)  # seldom another code, but never the same
    for codes, before, contexts in ((often, parent, 32), (shifted, parent, 32), (parent, None, 0), (parent, parent, 32),
                                    (often, parent, 256)):
        assert type(fit_fastest(common.count(codes, before, contexts, 64))) is RansCoder
    assert coder_class("changes") is ChangesCoder


def test_every_gap_row_is_a_row():
    rates = itertools.chain(range(1, 3000), range(3000, changes.UNIT // 4, 97), [changes.UNIT // 4 - 1])
    for rate in rates:
        first, freqs = changes.fit_gap_row(rate)
        assert 2 <= len(freqs) <= 255 and min(freqs) >= 1, rate
        assert sum(freqs) in {1 << bits for bits in range(10, 16)} and sum(freqs) - freqs[first] <= 4095, rate


def test_every_gap_row_is_that_of_the_page():
    """Also where what the others leave is less than what another token has."""
    moved = 0
    for rate in itertools.chain(range(1, 200), range(48_000, 55_000, 7), range(200, changes.UNIT // 4, 1009)):
        first, freqs = changes.fit_gap_row(rate)
        limit, row = token_row(rate)
        assert len(freqs) == limit + 1 and sum(freqs) == 1 << row.bits
        assert sorted(row.ranges) == list(enumerate(freqs)) and row.ranges[-1][0] == first
        moved += freqs[first] < max(freqs)
    assert moved


def test_a_code_without_a_count_is_named(path):
    parent = np.zeros(40_000, np.uint8)
    parent[:100] = 1
    codes = parent.copy()
    codes[7::1000] = 2
    counts = common.count(codes, parent, 3, 4)
    coder = ChangesCoder.fit(counts)
    for at, code in ((11, 0), (39_999, 1)):  # one that never changes, and one that changes to something else
        other = codes.copy()
        other[at] = code
        with pytest.raises(CodingError, match=f"code {code} at index {at} has no count after code {parent[at]}"):
            coder.encode(other, parent)


def test_after_an_error_codes_are_as_they_were(path):
    codes, parent = common.migrating(20_000, 32, 0.97, 4)
    coder = ChangesCoder.fit(common.count(codes, parent, 32, 32))
    data = coder.encode(codes, parent)
    for damaged in (data[:-2], data + b"\0\0", b"", b"\x80" * 9, b"\xff\xff\x7f" + data):
        own = parent.copy()
        with pytest.raises(CodingError):
            coder.update(damaged, own)
        np.testing.assert_array_equal(own, parent)
    for wrong in (np.full(10, 32, np.uint8), np.zeros(10, np.int8), np.zeros(20, np.uint8)[::2]):
        with pytest.raises(CodingError):
            coder.update(data, wrong)
    coder.update(b"", np.empty(0, np.uint8))
    with pytest.raises(CodingError, match="expected none"):
        coder.update(b"\0", np.empty(0, np.uint8))


def test_codes_that_never_change_may_not(path):
    counts = np.array([[9, 0, 0], [0, 99, 1], [0, 0, 0], [0, 0, 0]])
    coder = ChangesCoder.fit(counts)
    with pytest.raises(CodingError, match="has no count"):
        coder.encode(np.array([1], np.uint8), np.array([0], np.uint8))
    with pytest.raises(CodingError, match="has no count"):
        coder.encode(np.array([0], np.uint8), np.array([1], np.uint8))
    assert coder.expected_bits(counts[:, [1, 0, 2]]) == float("inf")


def test_codes_that_stay_are_codes_of_the_model(path):
    """A code that stays could be one that the codebook lacks, if the parent has more levels."""
    wide, narrow = np.zeros((7, 6), np.int64), np.zeros((7, 4), np.int64)
    wide[range(6), range(6)], narrow[range(4), range(4)] = 99, 99
    wide[0, 1] = narrow[0, 1] = 1
    parent = np.array([0, 3, 5, 1], np.uint8)
    model, data = ChangesCoder.fit(narrow).to_bytes(), ChangesCoder.fit(wide).encode(parent, parent)
    coder, own = ChangesCoder.from_bytes(model), parent.copy()
    with pytest.raises(CodingError, match="code 5"):
        coder.encode(parent, parent)
    with pytest.raises(CodingError, match="code 5, the model has 4 symbols"):
        coder.update(data, own)
    np.testing.assert_array_equal(own, parent)
    with pytest.raises(Refused, match="codes of the model"):
        Changes(model).decode(data, 4, parent.tolist())


def test_other_coders_decode_in_place_too():
    codes, parent = common.migrating(5000, 32, 0.7, 4)
    coder = RansCoder.fit(common.count(codes, parent, 32, 32))
    assert not coder.in_place and ChangesCoder.in_place
    np.testing.assert_array_equal(updated(coder, coder.encode(codes, parent), parent), codes)


def test_arguments(path):
    common.check_arguments(ChangesCoder)
    with pytest.raises(CodingError, match="at most 255"):
        ChangesCoder.fit(np.ones((257, 4), np.int64))


@pytest.mark.parametrize("n", [600, 5000, 40_000])
def test_damage(n, path):
    codes, parent = mixed(n, 4)
    counts = common.count(codes, parent, 40, 40)
    counts[-1, ::3] = 10 ** np.arange(14) // 1000 + 1
    coder = ChangesCoder.fit(counts)
    common.check_damage(coder, codes, parent, seed=1)
    common.check_model_damage(coder, codes, parent, seed=2)


def test_blocks_that_the_page_refuses_are_refused_on_every_path():
    """Damaged blocks are refused by all readers or by none, and then read alike."""
    rng = np.random.default_rng(0)
    for n, seed in ((3000, 5), (33_000, 6)):
        codes, parent = mixed(n, seed)
        coder = ChangesCoder.fit(common.count(codes, parent, 40, 40))
        data, reader = coder.encode(codes, parent), Changes(coder.to_bytes())
        for _ in range(30):
            damaged = bytearray(data)
            at = rng.integers(0, 12 if rng.random() < 0.5 else len(data))
            damaged[at] ^= 1 << rng.integers(0, 8)
            results = set()
            for name in PATHS:
                native.force(name)
                try:
                    results.add(updated(coder, bytes(damaged), parent).tobytes())
                except CodingError:
                    results.add(None)
            try:
                results.add(bytes(reader.decode(bytes(damaged), n, parent.tolist())))
            except Refused:
                results.add(None)
            assert len(results) == 1


def golden_block():
    """(codes, parent) of 120,000 codes, the same on every machine."""
    u, v, w = common.lcg(6000, 1), common.lcg(6000, 2), common.lcg(6000, 3)
    parent = np.tile((16 * u).astype(np.uint8), 20)
    rate = np.array([0, 0.001, 0.01, 0.05, 0.5])[parent % 5]
    moved = np.concatenate([np.roll(v, shift) for shift in range(20)]) < rate
    return np.where(moved, np.tile((16 * w).astype(np.uint8), 20), parent).astype(np.uint8), parent


def test_golden_bytes(path):
    common.check_golden(ChangesCoder)
    codes, parent = golden_block()
    coder = ChangesCoder.fit(common.count(codes, parent, 16, 16))
    block = coder.encode(codes, parent)
    digests = {"model": coder.to_bytes().hex(), "block": hashlib.sha256(block).hexdigest()}
    assert digests == common.GOLDEN["changes"]["lanes"]
    np.testing.assert_array_equal(updated(coder, block, parent), codes)
