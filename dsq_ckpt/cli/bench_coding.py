"""Benchmark of entropy coding on one core, for `dsq bench`, with codes that have the statistics of recorded runs.

Codes are coded as in a save: lists of changes where few codes change, lanes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dsq_ckpt.coding import fit_fastest
from dsq_ckpt.core.arrays import Codes, Counts

COUNT = 1 << 20
"""Codes of a block."""
_LEVELS = 39
STREAMS = {"3.5 bit": 0.0, "1.4 bit": 0.3942, "0.3 bit": 0.04583, "0.12 bit": 0.014856}
"""Change of weights between checkpoints, in steps of the lattice; 0 stands for a keyframe. Deltas of recorded runs have
0.2 to 0.5 bits per code, and more only early in training."""


def stream(change: float) -> tuple[Codes, Codes | None]:
    """Return the codes of a block and the parent's codes, for weights of a heavy-tailed distribution on a lattice."""
    rng = np.random.default_rng(1)
    weights = rng.standard_t(6, COUNT)
    order = np.argsort(np.argsort(np.abs(np.arange(_LEVELS) - _LEVELS // 2), kind="stable")).astype(np.uint8)

    def codes(values: np.ndarray, step: float) -> Codes:
        encoded: Codes = order[np.clip(np.rint(values / step), -19, 19).astype(np.int64) + 19]
        return encoded

    if not change:
        return codes(weights, 0.42), None
    return codes(weights + change * 0.5 * rng.standard_t(5, COUNT), 0.5), codes(weights, 0.5)


def coding_benchmarks() -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Return the functions to be timed, encoding and decoding of each stream, and the bits per code of each stream.

    To decode a list includes a copy of the parent's codes, which a load needs once for each chain.
    """
    work: dict[str, Callable[[], object]] = {}
    bits = {}
    for name, change in STREAMS.items():
        codes, parent = stream(change)
        coder = fit_fastest(_counts(codes, parent))
        data, out = coder.encode(codes, parent), np.empty_like(codes)
        bits[name] = 8 * len(data) / COUNT
        work[f"encode, {name}"] = partial(coder.encode, codes, parent)
        work[f"decode, {name}"] = partial(coder.decode, data, parent, out)
    return work, bits


def _counts(codes: Codes, parent: Codes | None) -> Counts:
    rows = np.full(COUNT, _LEVELS) if parent is None else parent
    joint = np.bincount(rows.astype(np.int64) * _LEVELS + codes, minlength=(_LEVELS + 1) * _LEVELS)
    return joint.reshape(_LEVELS + 1, _LEVELS).astype(np.int64)
