from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.coding import CodingError, HuffmanCoder, RansCoder, huffman_bits
from dsq_ckpt.coding import _huffman_kernels as kernels
from tests.coding import common

FLAGS = list(itertools.product([True, False], [True, False]))


def reference_bits(counts) -> int:
    """Huffman's algorithm with explicit trees."""
    heap = [(c, i, [i]) for i, c in enumerate(counts)]
    heapq.heapify(heap)
    lengths = [0] * len(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        for i in a[2] + b[2]:
            lengths[i] += 1
        heapq.heappush(heap, (a[0] + b[0], a[1], a[2] + b[2]))
    return sum(c * n for c, n in zip(counts, lengths, strict=True))


@settings(max_examples=100, deadline=None)
@given(common.blocks(), st.sampled_from(FLAGS))
def test_round_trip(block, flags):
    codes, parent, counts = block
    coder = HuffmanCoder.fit(counts, rearrange=flags[0], run_length=flags[1])
    again = HuffmanCoder.from_bytes(coder.to_bytes())
    assert (again.rearrange, again.run_length) == flags
    common.check_round_trip(coder, codes, parent)


@pytest.mark.parametrize("length", [2, 255, 256, 257, 258, 511, 512, 513, 514, 1023, 1024, 70_000, 1_000_003])
def test_long_runs(length):
    codes = np.concatenate((np.zeros(length, np.uint8), [1], np.zeros(length, np.uint8), [1, 1])).astype(
        np.uint8
    )
    for parent in (None, np.zeros_like(codes), np.arange(codes.size).astype(np.uint8) % 3):
        coder = HuffmanCoder.fit(common.count(codes, parent, 3, 2))
        assert len(common.check_round_trip(coder, codes, parent)) < 120


def test_tokens_are_values_and_runs_above_one():
    values = np.array([3] + [0] * 5 + [1] * 2 + [2] + [1] * 1000, np.uint8)
    tokens = np.empty(values.size, np.uint16)
    n = kernels.tokenize(values, 4, True, tokens)
    run = 4 - 1  # the token of run length r is 3 + r, that of 2**k is 4 + 247 + k
    assert tokens[:n].tolist() == [3, 0, run + 5, 1, run + 2, 2, 1, 4 + 247 + 9, run + 256, run + 232]
    assert kernels.tokenize(values, 4, False, tokens) == values.size


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10**9) | st.integers(1, 3), min_size=2, max_size=400))
def test_code_lengths_are_optimal_or_limited(counts):
    lengths = kernels.huffman_lengths(np.array(counts, np.int64))
    assert sum(2.0**-n for n in lengths) == 1 and lengths.max() <= kernels.MAX_LENGTH
    bits = int((lengths * counts).sum())
    optimum = reference_bits(counts)
    assert bits >= optimum
    if max(counts) / sum(counts) < 0.5 and lengths.max() < kernels.MAX_LENGTH:
        assert bits == optimum


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-300, 300) | st.integers(0, 2), min_size=1, max_size=300))
def test_huffman_bits(symbols):
    counts = np.unique(symbols, return_counts=True)[1].tolist()
    assert huffman_bits(np.array(symbols)) == reference_bits(counts)


def test_huffman_bits_of_nothing_and_of_one_value():
    assert huffman_bits(np.empty(0, np.int64)) == 0
    assert huffman_bits(np.full(9, 7)) == 0
    assert huffman_bits(np.array([1, 1, 2, 3])) == 6


@pytest.mark.parametrize(("contexts", "symbols"), [(5, 40), (40, 5), (256, 3), (3, 256), (64, 64)])
def test_alphabets_of_parent_and_codes_may_differ(contexts, symbols):
    rng = np.random.default_rng(0)
    parent = rng.integers(0, contexts, 5000).astype(np.uint8)
    codes = rng.integers(0, symbols, 5000).astype(np.uint8)
    counts = common.count(codes, parent, contexts, symbols)
    for coder in (HuffmanCoder.fit(counts), HuffmanCoder.fit(counts, rearrange=False), RansCoder.fit(counts)):
        common.check_round_trip(coder, codes, parent)


def test_groups_that_migrate_most_do_not_break_the_runs_of_the_others():
    """Section 6: rearrangement pays when migration rates differ between codes."""
    rng = np.random.default_rng(1)
    parent = rng.integers(0, 8, 200_000).astype(np.uint8)
    moves = rng.random(parent.size) < np.where(parent == 0, 0.5, 0.0005)
    codes = np.where(moves, rng.integers(0, 8, parent.size), parent).astype(np.uint8)
    counts = common.count(codes, parent, 8, 8)
    sizes = {
        flags: len(HuffmanCoder.fit(counts, rearrange=flags[0], run_length=flags[1]).encode(codes, parent))
        for flags in FLAGS
    }
    assert sizes[True, True] < 0.8 * min(sizes[False, True], sizes[True, False], sizes[False, False])
    assert len(RansCoder.fit(counts).encode(codes, parent)) < sizes[True, True]


@pytest.mark.parametrize("stay", [0.999, 0.97, 0.7])
@pytest.mark.parametrize("flags", FLAGS)
def test_expected_bits(stay, flags):
    codes, parent = common.migrating(300_000, 32, stay, 5)
    counts = common.count(codes, parent, 32, 32)
    coder = HuffmanCoder.fit(counts, *flags)
    assert coder.expected_bits(counts) == pytest.approx(8 * len(coder.encode(codes, parent)), rel=0.1)


def test_arguments():
    common.check_arguments(HuffmanCoder)


@pytest.mark.parametrize("flags", FLAGS)
def test_damage(flags):
    codes, parent = common.migrating(2000, 32, 0.7, 4)
    counts = common.count(codes, parent, 32, 32)
    counts[-1] = 1
    coder = HuffmanCoder.fit(counts, *flags)
    common.check_damage(coder, codes, parent, seed=1, noticed=1.0)
    common.check_model_damage(coder, codes, parent, seed=2)
    common.check_damage(coder, codes, None, seed=3, noticed=1.0)


def test_a_code_outside_the_alphabet_is_damage():
    parent = np.zeros(4, np.uint8)
    wide = HuffmanCoder.fit(np.ones((9, 8), np.int64))
    narrow = HuffmanCoder.fit(np.ones((9, 2), np.int64))
    with pytest.raises(CodingError, match="not below 2"):
        common.decode(narrow, wide.encode(np.full(4, 5, np.uint8), parent), parent, 4)


def test_golden_bytes():
    common.check_golden(HuffmanCoder)
