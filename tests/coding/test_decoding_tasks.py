"""Two blocks decoded in turns: what each gives alone, and its error, whatever the other one is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dsq_ckpt import native
from dsq_ckpt.coding import ChangesCoder, CodingError, HuffmanCoder, RansCoder, decoding_tasks
from dsq_ckpt.coding.decoding_tasks import BlockRequest
from tests.coding import common


@pytest.fixture(params=native.available(), autouse=True)
def path(request):
    """Each path in turn."""
    native.force(request.param)
    yield request.param
    native.force(None)


def block(cls, codes, parent, contexts, symbols, added=0):
    """The coder, the bytes, previous codes and codes of a block."""
    coder = cls.fit(common.count(codes, parent, contexts, symbols) + added)
    return coder, coder.encode(codes, parent), parent, codes


def rare(n, seed, symbols=256):
    """Codes of which many are so rare that they are escaped, and what to add to their counts for that."""
    rng = np.random.default_rng(seed)
    codes = np.where(rng.random(n) < 0.05, rng.integers(0, symbols, n), 3).astype(np.uint8)
    return codes, np.where(np.arange(symbols) == 3, 10**7, 1)


def samples():
    """Blocks by name: one row with few entries or many, rows in registers or not, escapes, one lane, other coders."""
    codes, _ = common.migrating(70_001, 39, 0.5, 1)
    even = np.random.default_rng(2).integers(0, 200, 40_000).astype(np.uint8)
    blocks = {
        "small row": block(RansCoder, codes, None, 0, 39),
        "shorter": block(RansCoder, codes[:33_333], None, 0, 39),
        "skewed row": block(RansCoder, np.where(codes % 16, 7, codes).astype(np.uint8), None, 0, 39),
        "long row": block(RansCoder, even, None, 0, 200),
        "one lane": block(RansCoder, codes[:3000], None, 0, 39),
        "certain": block(RansCoder, np.full(40_000, 3, np.uint8), None, 0, 5),
        "of lists": block(ChangesCoder, *common.migrating(40_000, 39, 0.98, 3), 39, 39),
        "huffman": block(HuffmanCoder, codes, None, 0, 39),
    }
    for seed, (contexts, stay) in enumerate(((39, 0.6), (64, 0.9), (30, 0.995), (65, 0.6), (256, 0.6))):
        blocks[f"{contexts} rows"] = block(
            RansCoder, *common.migrating(50_000 + 999 * seed, contexts, stay, seed, 0.2 * contexts), contexts, contexts
        )
    few, added = rare(40_000, 4)
    blocks["escapes"] = block(RansCoder, few, None, 0, 256, added)
    parent = np.random.default_rng(5).integers(0, 3, 40_000).astype(np.uint8)
    blocks["escapes in rows"] = block(RansCoder, few, parent, 3, 256, added)
    return blocks


def wanted(sample, data=None):
    coder, own, parent, codes = sample
    return BlockRequest(coder, memoryview(own if data is None else data), parent, np.full(codes.size, 0xAA, np.uint8))


def alone(request):
    """The codes of a block that is decoded alone, and its error."""
    again = request._replace(out=np.empty_like(request.out))
    try:
        again.decode()
    except CodingError as error:
        return again.out, str(error)
    return again.out, None


def check(*both):
    """Blocks give what each gives alone."""
    for request, error in zip(both, decoding_tasks.decode_blocks(list(both)), strict=True):
        codes, message = alone(request)
        assert message == (None if error is None else str(error))
        if error is None:
            np.testing.assert_array_equal(request.out, codes)


def test_any_two_blocks():
    all_samples = samples()
    for first, second in itertools.combinations_with_replacement(all_samples, 2):
        both = [wanted(all_samples[first]), wanted(all_samples[second])]
        assert decoding_tasks.decode_blocks(both) == [None, None], (first, second)
        for request, name in zip(both, (first, second), strict=True):
            np.testing.assert_array_equal(request.out, all_samples[name][3], f"{first}, {second}")


def test_one_block_decodes():
    sample = samples()["small row"]
    [error] = decoding_tasks.decode_blocks([request := wanted(sample)])
    assert error is None and np.array_equal(request.out, sample[3])
    assert decoding_tasks.decode_blocks([]) == []


@pytest.mark.parametrize("name", ["small row", "long row", "39 rows", "escapes", "escapes in rows"])
def test_damaged_blocks(name):
    sample, rng = samples()[name], np.random.default_rng(0)
    data = sample[1]
    damaged = [data[: len(data) // 4 * 2], data[:-2], data[:3], data[:133], data + b"\0\0", bytes(len(data))]
    for _ in range(20):
        changed = bytearray(data)
        changed[rng.integers(2, len(data))] ^= 1 << rng.integers(0, 8)
        damaged.append(bytes(changed))
    for bad in damaged:
        check(wanted(sample), wanted(sample, bad))
        check(wanted(sample, bad), wanted(sample))
    check(wanted(sample, damaged[0]), wanted(sample, damaged[1]))


def test_wrong_arguments():
    all_samples = samples()
    one = wanted(all_samples["39 rows"])
    other = one._replace(parent=np.full(one.out.size, 39, np.uint8))
    check(wanted(all_samples["39 rows"]), other)
    check(other, wanted(all_samples["39 rows"]))
    for bad in (
        one._replace(parent=one.parent[:-1]), one._replace(out=np.empty(2 * one.out.size, np.uint8)[::2]),
        one._replace(parent=one.parent.astype(np.int16)),
    ):
        [none, error] = decoding_tasks.decode_blocks([one, bad])
        assert none is None and isinstance(error, CodingError)
    [error, none] = decoding_tasks.decode_blocks([one._replace(out=one.parent.copy(), parent=None), one])
    assert none is None and isinstance(error, CodingError)
    both = np.concatenate((one.parent, one.parent[:1]))
    [error, none] = decoding_tasks.decode_blocks([one._replace(parent=both[:-1], out=both[1:]), one])
    assert none is None and "overlaps" in str(error)


def test_works_of_different_lengths_and_errors():
    """Each is resumed when its block was decoded, with its error; what waits, when nothing else is left."""
    all_samples, order = samples(), []

    def work(name, count):
        for number in range(count):
            request = wanted(all_samples["small row"], b"\1" if number == 2 else None)
            try:
                yield request
            except CodingError:
                order.append((name, "error"))
                raise ValueError(name) from None
            assert np.array_equal(request.out, all_samples["small row"][3])
            order.append((name, number))

    def waits():
        yield None
        order.append("resumed")
        yield wanted(all_samples["39 rows"])

    assert decoding_tasks.run_tasks([waits(), work("a", 2)]) == [None, None]
    assert order == [("a", 0), ("a", 1), "resumed"]
    order.clear()
    errors = decoding_tasks.run_tasks([work("a", 3), work("b", 1)])
    assert isinstance(errors[0], ValueError) and errors[1] is None
    assert order == [("a", 0), ("b", 0), ("a", 1), ("a", "error")]
    decoding_tasks.run_task(work("c", 1))
    with pytest.raises(ValueError, match="d"):
        decoding_tasks.run_task(work("d", 3))
