"""How tensors may be coded exactly given those of an earlier checkpoint: sizes and times on recorded runs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import zstandard

from dsq_ckpt.coding import RansCoder, difference, shuffle_compress, shuffle_decompress
from dsq_ckpt.core.arrays import U8, Array
from dsq_ckpt.storage.packs import reference_place
from evaluation.peers.states import read
from evaluation.recording import load_recording
from evaluation.report import Column, Row, digits, ratio

DISTANCES = (1, 2, 4, 8, 16)
COLUMNS = (
    Column("<run", "run"), Column("<tensors", "part"), Column("<what", "name"), Column("ratio", "ratio", ratio),
    Column("encode, ns/byte", "encode", digits(1)), Column("decode, ns/byte", "decode", digits(1)),
)
NOTES = """\
ratio: bytes of the tensors over those coded, all pairs of checkpoints together; processor time of one thread, medians
over the pairs, where candidates take turns; 'as saved' is what a save chooses for each pack: by itself, or given the
earlier one"""


def measure(directory: Path, report: Callable[[str], None]) -> Iterator[Row]:
    """Code each checkpoint of a recording given the one before, and given older ones.

    Yields:
        One row per part of the state and candidate, with processor time; then one per distance, with sizes alone.
    """
    recorded = load_recording(directory).info["settings"]
    run = {"run": f"{recorded['workload']}, seed {recorded['seed']}"}
    wide, narrow = list(read(directory, True))[1:], list(read(directory, False, torch.bfloat16))[1:]
    parts: dict[str, list[Array]] = {
        "weights in bf16": [_joined(state.weights, np.uint16) for state in narrow],
        "weights": [_joined(state.weights, np.uint32) for state in wide],
        **{kind: [_joined(state.moments[kind], np.uint32) for state in wide] for kind in wide[0].moments},
    }
    for part, states in parts.items():
        report(f"{run['run']}: {part}")
        for row in _candidates(states):
            yield run | {"part": part} | row
        for row in _distances(states):
            yield run | {"part": part} | row


def _candidates(states: list[Array]) -> Iterator[Row]:
    """Measure each candidate on each pair of neighbours, in turn."""
    sizes: dict[str, list[int]] = {}
    seconds: dict[str, list[tuple[float, float]]] = {}
    for earlier, now in itertools.pairwise(states):
        for name, (encode, decode) in CANDIDATES.items():
            began = time.process_time()
            data = encode(now, earlier)
            coded = time.process_time()
            if decode is not None and decode(data, earlier) != now.tobytes():
                raise ValueError(f"{name} gave other bytes back")
            sizes.setdefault(name, []).append(len(data))
            seconds.setdefault(name, []).append((coded - began, time.process_time() - coded))
    raw = states[0].nbytes
    for name, own in sizes.items():
        encode_seconds, decode_seconds = (statistics.median(pair) for pair in zip(*seconds[name], strict=True))
        yield {
            "name": name, "ratio": raw * len(own) / sum(own), "encode": 1e9 * encode_seconds / raw,
            "decode": None if CANDIDATES[name][1] is None else 1e9 * decode_seconds / raw,
        }


def _distances(states: list[Array]) -> Iterator[Row]:
    """Measure sizes given a checkpoint further back, and of whole chains: given the last one, and as `packs.before`."""
    known: dict[tuple[int, int], int] = {}

    def size(place: int, earlier: int) -> int:
        if (place, earlier) not in known:
            known[place, earlier] = len(_given(states[place], states[earlier]))
        return known[place, earlier]

    raw, count = states[0].nbytes, len(states)
    for distance in DISTANCES:
        if distance < count:
            own = [size(place, place - distance) for place in range(distance, count)]
            yield {"name": f"as saved, given {distance} before", "ratio": raw * len(own) / sum(own)}
    for name, earlier_of in (("the last one", lambda place: place - 1), ("1, 4 or 16 before", reference_place)):
        own = [size(place, earlier_of(place)) for place in range(1, count)]
        yield {"name": f"chain, each given {name}", "ratio": raw * len(own) / sum(own)}


def _joined(tensors: dict[str, torch.Tensor], dtype: type) -> Array:
    flat = torch.cat([tensor.contiguous().flatten() for tensor in tensors.values()])
    bits: Array = flat.view(torch.uint8).numpy().view(dtype)
    return bits


def _alone(now: Array, earlier: Array) -> bytes:
    return shuffle_compress(now.tobytes(), now.itemsize)


def _alone_back(data: bytes, earlier: Array) -> bytes:
    return shuffle_decompress(data, earlier.itemsize, earlier.nbytes)


def _difference(now: Array, earlier: Array) -> bytes:
    return difference.encode(now.tobytes(), earlier.tobytes(), now.itemsize)


def _difference_back(data: bytes, earlier: Array) -> bytes:
    return difference.decode(data, earlier.tobytes(), earlier.itemsize)


def _given(now: Array, earlier: Array) -> bytes:
    return min(_alone(now, earlier), _difference(now, earlier), key=len)


def _planes(changes: Array) -> list[U8]:
    return list(np.ascontiguousarray(changes.view(np.uint8).reshape(-1, changes.itemsize).T))


def _coded(change: Callable[[Array, Array], Array], given: bool, now: Array, earlier: Array) -> bytes:
    """Code the bytes of changes by rANS, given the exponents of the earlier numbers or given none."""
    context, parts = difference._exponent_contexts(earlier) if given else np.zeros(len(now), np.uint8), []
    for plane in _planes(change(now, earlier)):
        counts = difference._joint_counts(plane, context)
        coder = RansCoder.fit(counts if given else counts.sum(0, keepdims=True))
        parts += [coder.to_bytes(), coder.encode(plane, context if given else None)]
    return b"".join(parts)


def _zstd(change: Callable[[Array, Array], Array], now: Array, earlier: Array) -> bytes:
    return b"".join(zstandard.ZstdCompressor().compress(plane.data) for plane in _planes(change(now, earlier)))


def _itself(now: Array, earlier: Array) -> Array:
    return difference._differences(now, np.zeros_like(now))  # sign behind the exponent, which is a byte then


CANDIDATES: dict[str, tuple[Callable[[Array, Array], bytes], Callable[[bytes, Array], bytes] | None]] = {
    "by itself, zstd": (_alone, _alone_back),
    "by itself, rANS": (partial(_coded, _itself, False), None),
    "XOR, zstd": (partial(_zstd, np.bitwise_xor), None),
    "XOR, rANS": (partial(_coded, np.bitwise_xor, False), None),
    "XOR, rANS given exponents": (partial(_coded, np.bitwise_xor, True), None),
    "difference, zstd": (partial(_zstd, difference._differences), None),
    "difference, rANS": (partial(_coded, difference._differences, False), None),
    "difference, rANS given exponents": (partial(_coded, difference._differences, True), None),
    "difference, as saved": (_difference, _difference_back),
}
"""Encoders, and decoders of those that are in use."""
