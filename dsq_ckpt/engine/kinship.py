"""Whether weights are later ones of the training that earlier codes are of.

Two trainings of one architecture, as the folds of a cross-validation, have the same names and shapes. Their weights are
independent of each other, while those of one training stay alike for long.
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

_SAMPLE = 4096
"""Elements of a chunk that tell."""
_LEVELS = 4
"""Ranges of values whose relation to codes is looked for; of more, samples tell less."""
_SHUFFLES = 8
_SPREADS, _AT_LEAST = 2.0, 20.0
"""How much more codes tell of each other than shuffled ones do by chance, if they are related: ranges of that, nats."""
_RARE = 64
"""Codes other than the most frequent one that a sample needs to tell anything."""
_UNRELATED = 16
"""Chunks without any relation after which the others are not looked at; exact ones that are noted."""


def is_related(weights: Mapping[ChunkKey, torch.Tensor], history: SaveHistory, context: SaveContext) -> bool | None:
    """Return whether any weights depend on the checkpoint before; these are looked at until one of them does.

    None: that cannot be told, or differences are stored.

    Args:
        weights: chunks of this rank that may be lossy, and may be trained.
        history: checkpoints whose codes are in memory.
        context: of the save.
    """
    before = (context.previous, context.parent) if not context.layout.residual else ()
    known = [one for ref in before if ref is not None and (one := history.find(ref.save_id)) is not None]
    earlier: Mapping[ChunkKey, Codes] = next((one.cache.codes for one in known if one.cache.codes), {})
    exact = known[0].watch.exact_codes if known else {}  # of the previous save, which leaves no codes of these
    unrelated = 0
    for key, tensor in weights.items():
        codes = exact.get(key, earlier.get(key))
        if codes is None or key.elements < _SAMPLE or (now := _sample(tensor)) is None:
            continue
        if key in exact and np.array_equal(now, codes):  # frozen, maybe in several trainings
            continue
        found = are_related(now, codes[:: len(codes) // _SAMPLE][:_SAMPLE])
        unrelated += found is False
        if found or unrelated == _UNRELATED:
            return found
    return False if unrelated else None


def watch_for(related: bool | None, history: SaveHistory, context: SaveContext) -> tuple[ChangeWatch, LoadCounts]:
    """Return the looks at the training that a save continues, and this rank's loads since the last of them.

    New ones, if its weights are not `related`: what was seen of another training tells nothing. Its moments look as if
    gradients had renewed these, and its frozen layers as if these had changed.
    """
    known = None if context.previous is None else history.find(context.previous.save_id)
    watch = ChangeWatch() if known is None or related is False else known.watch
    return watch, watch.restores.count_new_loads(known is not None and known.loaded)


def note_exact(watch: ChangeWatch, weights: Mapping[ChunkKey, torch.Tensor], lossy: Set[ChunkKey]) -> None:
    """Note samples of weights that are exact for now, for the next save, if none is lossy, whose codes tell more.

    Args:
        watch: is given them.
        weights: chunks of this rank that may be lossy, and may be trained.
        lossy: keys of those that are.
    """
    told = [key for key in weights if key.elements >= _SAMPLE]
    if any(key in lossy for key in told):
        told = []
    found = {key: _sample(weights[key]) for key in told[:: -(-len(told) // _UNRELATED) or 1]}
    watch.exact_codes = {key: codes for key, codes in found.items() if codes is not None}


def _sample(tensor: torch.Tensor) -> Codes | None:
    """Return codes of some elements, each as frequent as the others; None: they cannot be read.

    That raises nothing, where other ranks would wait: there may be no memory for it.
    """
    tensor = tensor.detach()
    try:
        settle_streams([tensor])
        places = torch.arange(_SAMPLE, device=tensor.device) * (tensor.numel() // _SAMPLE)
        values = tensor[torch.unravel_index(places, tensor.shape)].to("cpu", torch.float32).numpy()
    except (RuntimeError, MemoryError):
        return None
    limits = np.sort(values)[_SAMPLE // _LEVELS :: _SAMPLE // _LEVELS]
    return np.searchsorted(limits, values).astype(np.uint8)


def are_related(codes: Codes, earlier: Codes) -> bool | None:
    """Return whether codes depend on earlier ones of the same chunk; None where that cannot be told.

    Args:
        codes: uint8[n].
        earlier: uint8[n], of the same codebook or of another one.
    """
    step = max(1, len(codes) // _SAMPLE)
    if len(codes) != len(earlier) or len(codes) < _SAMPLE:
        return None
    one, other = codes[::step][:_SAMPLE], earlier[::step][:_SAMPLE]
    if min(len(codes) - np.bincount(codes).max() for codes in (one, other)) < _RARE:
        return None
    by_chance = [_information(one, other[order]) for order in _shuffles()]
    most = max(by_chance)
    return _information(one, other) > most + _SPREADS * (most - min(by_chance)) + _AT_LEAST / len(one)


@cache
def _shuffles() -> list[Counts]:
    """Return the orders of a sample that show what codes tell of each other by chance."""
    generator = np.random.default_rng(0)
    return [generator.permutation(_SAMPLE) for _ in range(_SHUFFLES)]


def _information(one: Codes, other: Codes) -> float:
    """Return the mutual information of two lists of codes, in nats per code, less a part that no order of them changes.

    So it is negative. Codes are bytes.
    """
    counts = np.bincount(one.astype(np.int64) << 8 | other)
    pairs: F64 = counts[counts > 0] / len(one)
    return float((pairs * np.log(pairs)).sum())
