"""Detection of weights that belong to another training than the previous codes.

Two trainings of one architecture, as the folds of a cross-validation, have the same names and shapes. Their weights are
independent of each other, while the weights of one training stay dependent for long.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cache

import numpy as np
import torch

from dsq_ckpt.core.arrays import F64, Codes, Counts
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.quantization.chunk import ChunkKey, settle_streams
from dsq_ckpt.quantization.frozen_tensors import ChangeWatch
from dsq_ckpt.quantization.restored_values import LoadCounts

_SAMPLE_SIZE = 4096
"""Elements of a chunk that are compared."""
_LEVELS = 4
"""Ranges of values that are compared with codes; more of them would make the estimate from a sample less certain."""
_PERMUTATIONS = 8
_MIN_SPREADS, _MIN_NATS = 2.0, 20.0
"""Least excess of the mutual information of related codes over that of shuffled ones: in ranges of that, in nats."""
_MIN_RARE_CODES = 64
"""Least number of codes in a sample that are not the most frequent code."""
_MAX_UNRELATED = 16
"""Number of unrelated chunks after which the others are not compared; number of exact chunks that are sampled."""


def is_related(weights: Mapping[ChunkKey, torch.Tensor], history: SaveHistory, context: SaveContext) -> bool | None:
    """Return whether any weights depend on the previous checkpoint; None if unknown, or if differences are stored.

    Chunks are compared until one of them is related.

    Args:
        weights: chunks of this rank that may be lossy, and may be trained.
        history: checkpoints whose codes are in memory.
        context: context of the save.
    """
    before = (context.previous, context.parent) if not context.layout.residual else ()
    checkpoints = [
        checkpoint for ref in before if ref is not None and (checkpoint := history.find(ref.save_id)) is not None
    ]
    earlier: Mapping[ChunkKey, Codes] = next(
        (checkpoint.cache.codes for checkpoint in checkpoints if checkpoint.cache.codes), {}
    )
    exact = checkpoints[0].watch.exact_codes if checkpoints else {}  # samples of weights without codes
    unrelated = 0
    for key, tensor in weights.items():
        codes = exact.get(key, earlier.get(key))
        if codes is None or key.elements < _SAMPLE_SIZE or (current_codes := _quantize_sample(tensor)) is None:
            continue
        if key in exact and np.array_equal(current_codes, codes):  # frozen, perhaps in several trainings
            continue
        related = are_codes_related(current_codes, codes[:: len(codes) // _SAMPLE_SIZE][:_SAMPLE_SIZE])
        unrelated += related is False
        if related or unrelated == _MAX_UNRELATED:
            return related
    return False if unrelated else None


def select_watch(related: bool | None, history: SaveHistory, context: SaveContext) -> tuple[ChangeWatch, LoadCounts]:
    """Return the observations of the training that a save continues, and this rank's loads since the last of them.

    If the weights are not `related`, new observations are started, since those of another training are misleading: its
    moments would look as if they had been renewed by gradients, and its frozen layers as if they had changed.
    """
    checkpoint = None if context.previous is None else history.find(context.previous.save_id)
    watch = ChangeWatch() if checkpoint is None or related is False else checkpoint.watch
    return watch, watch.restores.count_new_loads(checkpoint is not None and checkpoint.loaded)


def record_exact_samples(watch: ChangeWatch, weights: Mapping[ChunkKey, torch.Tensor], lossy: Set[ChunkKey]) -> None:
    """Record samples of exact weights for the next save, unless lossy weights have codes, which are compared instead.

    Args:
        watch: receives the samples.
        weights: chunks of this rank that may be lossy, and may be trained.
        lossy: keys of the chunks that are lossy.
    """
    sampled = [key for key in weights if key.elements >= _SAMPLE_SIZE]
    if any(key in lossy for key in sampled):
        sampled = []
    samples = {key: _quantize_sample(weights[key]) for key in sampled[:: -(-len(sampled) // _MAX_UNRELATED) or 1]}
    watch.exact_codes = {key: codes for key, codes in samples.items() if codes is not None}


def _quantize_sample(tensor: torch.Tensor) -> Codes | None:
    """Return codes of some elements, with equally frequent values; None: they cannot be read.

    Errors, as for lack of memory, are not raised, since other ranks would wait in a collective.
    """
    tensor = tensor.detach()
    try:
        settle_streams([tensor])
        places = torch.arange(_SAMPLE_SIZE, device=tensor.device) * (tensor.numel() // _SAMPLE_SIZE)
        values = tensor[torch.unravel_index(places, tensor.shape)].to("cpu", torch.float32).numpy()
    except (RuntimeError, MemoryError):
        return None
    limits = np.sort(values)[_SAMPLE_SIZE // _LEVELS :: _SAMPLE_SIZE // _LEVELS]
    return np.searchsorted(limits, values).astype(np.uint8)


def are_codes_related(codes: Codes, earlier: Codes) -> bool | None:
    """Return whether codes depend on earlier ones of the same chunk; None: unknown.

    Args:
        codes: uint8[n].
        earlier: uint8[n], of the same codebook or of another one.
    """
    step = max(1, len(codes) // _SAMPLE_SIZE)
    if len(codes) != len(earlier) or len(codes) < _SAMPLE_SIZE:
        return None
    one, other = codes[::step][:_SAMPLE_SIZE], earlier[::step][:_SAMPLE_SIZE]
    if min(len(codes) - np.bincount(codes).max() for codes in (one, other)) < _MIN_RARE_CODES:
        return None
    by_chance = [_mutual_information(one, other[order]) for order in _make_permutations()]
    highest = max(by_chance)
    return _mutual_information(one, other) > highest + _MIN_SPREADS * (highest - min(by_chance)) + _MIN_NATS / len(one)


@cache
def _make_permutations() -> list[Counts]:
    """Return permutations of a sample, for the mutual information of independent codes."""
    generator = np.random.default_rng(0)
    return [generator.permutation(_SAMPLE_SIZE) for _ in range(_PERMUTATIONS)]


def _mutual_information(one: Codes, other: Codes) -> float:
    """Return the mutual information of two lists of codes, uint8, in nats per code, up to a constant.

    The constant depends on the counts of each list only. The result is negative.
    """
    counts = np.bincount(one.astype(np.int64) << 8 | other)
    pairs: F64 = counts[counts > 0] / len(one)
    return float((pairs * np.log(pairs)).sum())
