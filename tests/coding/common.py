"""Data and checks that every coder shares."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from dsq_ckpt import native
from dsq_ckpt.coding import Coder, CodingError

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def count(codes, parent, contexts, symbols):
    """counts[p, c], int64 (contexts + 1, symbols); the last row without a parent."""
    counts = np.zeros((contexts + 1, symbols), np.int64)
    np.add.at(counts, (np.full(codes.size, contexts) if parent is None else parent, codes), 1)
    return counts


def conditional_entropy(counts) -> float:
    """Bits of all counted codes, sum of -c log2(c / row total)."""
    p = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float(-(counts * np.log2(np.where(p > 0, p, 1))).sum())


def lcg(n, seed):
    """Uniform numbers in [0, 1) that no release of NumPy changes."""
    out = np.empty(n)
    for i in range(n):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        out[i] = (seed >> 11) / 2**53
    return out


def migrating(n, alphabet, stay, seed, spread=6.0):
    """Laplacian parent codes, of which a fraction 1 - stay moves by one or a few levels: (codes, parent)."""
    rng = np.random.default_rng(seed)
    middle = alphabet // 2
    parent = np.clip(np.rint(rng.laplace(middle, spread, n)), 0, alphabet - 1).astype(np.int64)
    step = rng.choice([-1, 1], n) * rng.geometric(0.8, n)
    codes = np.clip(parent + step * (rng.random(n) > stay), 0, alphabet - 1)
    return codes.astype(np.uint8), parent.astype(np.uint8)


@st.composite
def blocks(draw):
    """(codes, parent or None, counts), skewed and not, of up to 300 or, by repetition, 10,000 codes."""
    contexts, symbols = draw(
        st.sampled_from([(1, 1), (2, 5), (5, 2), (64, 64), (9, 33), (256, 256), (3, 256)])
    )
    n = draw(st.integers(0, 300))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    skew = draw(st.sampled_from([0.0, 1.0, 4.0, 30.0]))
    codes = (symbols * rng.random(n) ** (1 + skew)).astype(np.uint8)
    parent = (contexts * rng.random(n) ** (1 + skew)).astype(np.uint8) if draw(st.booleans()) else None
    if draw(st.booleans()) and n:
        repeats = np.minimum(rng.geometric(draw(st.sampled_from([0.5, 0.03])), n), 10_000 // n + 1)
        codes = np.repeat(codes, repeats)
        parent = None if parent is None else np.repeat(parent, repeats)
    counts = count(codes, parent, contexts, symbols)
    if draw(st.booleans()):
        counts = counts * draw(st.sampled_from([1, 10**6])) + (rng.random(counts.shape) < 0.3)
    return codes, parent, counts


def decode(coder: Coder, data, parent, n):
    out = np.full(n, 0xAA, np.uint8)
    coder.decode(data, parent, out)
    return out


def check_round_trip(coder: Coder, codes, parent) -> bytes:
    """The coder, and the coder read back, encode to the same bytes and decode to the codes; the bytes."""
    data = coder.encode(codes, parent)
    model = coder.to_bytes()
    again = type(coder).from_bytes(model)
    assert again.to_bytes() == model
    assert (again.contexts, again.symbols) == (coder.contexts, coder.symbols)
    assert again.encode(codes, parent) == data
    for reader in (coder, again):
        np.testing.assert_array_equal(decode(reader, memoryview(data), parent, codes.size), codes)
    return data


def on_every_path(kind, counts, codes, parent, check=lambda coder: None):
    """Return the coder and the block, which all paths write alike, and read; `check` is called on each path, too."""
    blocks, models = set(), set()
    for name in native.available():
        native.force(name)
        coder = kind.fit(counts)
        blocks.add(check_round_trip(coder, codes, parent))
        models.add(coder.to_bytes())
        check(coder)
    assert len(blocks) == len(models) == 1
    return coder, blocks.pop()


def check_arguments(cls: type[Coder]) -> None:
    """What the contract rejects, it rejects with `CodingError`."""
    codes, parent = migrating(500, 16, 0.8, 1)
    coder = cls.fit(count(codes, parent, 16, 16))
    data = coder.encode(codes, parent)

    both = np.concatenate((parent, parent[:1]))
    for out in (both[:-1], both[1:]):
        with pytest.raises(CodingError, match="out overlaps parent"):
            coder.decode(data, both[:-1], out)
    strided = np.repeat(codes, 2)[::2]
    assert coder.encode(strided, np.repeat(parent, 2)[::2]) == data
    read_only = np.zeros(500, np.uint8)
    read_only.flags.writeable = False
    for out in (
        np.zeros(1000, np.uint8)[::2],
        np.zeros(500, np.int8),
        np.zeros((500, 1), np.uint8),
        read_only,
    ):
        with pytest.raises(CodingError):
            coder.decode(data, parent, out)
    for bad_codes, bad_parent in (
        (codes.astype(np.int64), parent),
        (codes, parent[:-1]),
        (codes, parent.astype(np.int32)),
        (codes, np.full(500, 16, np.uint8)),  # no such context
        (np.full(500, 200, np.uint8), parent),  # not in the alphabet
        (codes, None),  # no counts in the last row
        (
            np.where(np.arange(500) == 77, 15 - parent // 8 * 15, codes).astype(np.uint8),
            parent,
        ),  # a zero count
    ):
        with pytest.raises(CodingError):
            coder.encode(bad_codes, bad_parent)
    with pytest.raises(CodingError, match="contexts"):
        coder.decode(data, np.full(500, 255, np.uint8), np.empty(500, np.uint8))
    with pytest.raises(CodingError, match="expected none"):
        coder.decode(b"\0", None, np.empty(0, np.uint8))
    for bad_counts in (
        np.zeros(5, np.int64),
        np.zeros((258, 4), np.int64),
        np.zeros((3, 257), np.int64),
        np.zeros((3, 0), np.int64),
        np.full((2, 2), -1),
        np.ones((2, 2)),
        np.full((2, 2), 2**60),
    ):
        with pytest.raises(CodingError):
            cls.fit(bad_counts)
    with pytest.raises(CodingError, match="shape"):
        coder.expected_bits(np.zeros((3, 3), np.int64))
    assert math.isinf(coder.expected_bits(np.ones((17, 16), np.int64)))


def check_damage(coder: Coder, codes, parent, seed: int, rounds: int = 150, noticed: float = 1.5) -> None:
    """Altered, cut and prolonged blocks raise or give wrong codes; cut and prolonged ones always raise."""
    data = coder.encode(codes, parent)
    rng = np.random.default_rng(seed)
    for cut in {0, 1, 2, 3, len(data) // 2, len(data) - 2, len(data) - 1}:
        with pytest.raises(CodingError):
            decode(coder, data[:cut], parent, codes.size)
    for extra in (b"\0", b"\0\0", b"\1\0\0\0"):
        with pytest.raises(CodingError):
            decode(coder, data + extra, parent, codes.size)
    raised = 0
    for _ in range(rounds):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            damaged[at] ^= 1 << rng.integers(0, 8)
        for changed, other in ((bytes(damaged), parent), (rng.bytes(len(data)), parent), (data, None)):
            try:
                decode(coder, changed, other, codes.size)
            except CodingError:
                raised += 1
    assert raised > noticed * rounds


def check_model_damage(coder: Coder, codes, parent, seed: int) -> None:
    """Altered models raise, or are models; a coder made from one stays inside its arrays."""
    model = coder.to_bytes()
    data = coder.encode(codes, parent)
    for cut in range(len(model)):
        with pytest.raises(CodingError):
            type(coder).from_bytes(model[:cut])
    with pytest.raises(CodingError):
        type(coder).from_bytes(model + b"\0")
    rng = np.random.default_rng(seed)
    for _ in range(300):
        damaged = bytearray(model)
        damaged[rng.integers(0, len(model))] ^= 1 << rng.integers(0, 8)
        try:
            other = type(coder).from_bytes(bytes(damaged))
            decode(other, data, parent, codes.size)
        except CodingError:
            pass


def golden_cases():
    """Name -> (codes, parent, contexts, symbols): small, and the same on every machine."""
    u, v = lcg(6000, 1), lcg(6000, 2)
    parent = (8 + 7 * (2 * u - 1) ** 3).astype(np.uint8)
    codes = np.where(v > 0.1, parent, (16 * lcg(6000, 3)).astype(np.uint8))
    rare = np.where(lcg(6000, 4) < 0.004, (60 * lcg(6000, 5)).astype(np.uint8), 7).astype(np.uint8)
    return {
        "migrating": (codes[:1000], parent[:1000], 16, 16),
        "four lanes": (codes[:4100], parent[:4100], 16, 17),
        "rare": (rare, None, 0, 60),
        "certain": (np.full(100, 3, np.uint8), None, 2, 4),
    }


def check_golden(cls: type[Coder]) -> None:
    """Today's bytes are the committed ones: a change of them is a change of the format."""
    for name, (codes, parent, contexts, symbols) in golden_cases().items():
        golden = GOLDEN[cls.name][name]
        coder = cls.fit(count(codes, parent, contexts, symbols))
        assert coder.to_bytes().hex() == golden["model"], name
        assert coder.encode(codes, parent).hex() == golden["block"], name
        old = cls.from_bytes(bytes.fromhex(golden["model"]))
        np.testing.assert_array_equal(decode(old, bytes.fromhex(golden["block"]), parent, codes.size), codes)
