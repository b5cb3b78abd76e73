"""From the items of a rank to codes: sketches merged with the other ranks, the choice how to store, quantization."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.interrupts import let_signals_through
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.unchanged import checksums, named
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, together, told_together
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.ancestry import with_sound_parent
from dsq_ckpt.engine.chain import Parent
from dsq_ckpt.engine.remembered import ParentRef, find, release_resident
from dsq_ckpt.engine.session import (
    Agreement,
    Coded,
    Item,
    load_chunk,
    lossy_items,
    measured_items,
    quantize,
    sketch,
)
from dsq_ckpt.errors import DSQError, NonFiniteTensor, SaveFailed
from dsq_ckpt.quantization.analysis import Analysis, Layout, Sketches
from dsq_ckpt.quantization.choice import Choice, Chooser, all_exact, as_configured
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey
from dsq_ckpt.quantization.device.coding import TablesOf
from dsq_ckpt.quantization.groups import kind_of, unwrapped


@dataclass
class Quantized:
    """What a rank writes.

    Attributes:
        coded: chunks that are quantized as they are asked for, one by one.
        plain: items that are stored as they are.
        choice: how all ranks store theirs.
    """

    coded: Iterator[Coded]
    plain: list[Item]
    choice: Choice


def quantize_items(
    items: list[Item], replicas: list[Item], agreement: Agreement, config: DSQConfig, chooser: Chooser,
    gradients: Mapping[Any, torch.Tensor], comm: Communicator, workers: Workers,
) -> Quantized:
    """Merge sketches with the other ranks, choose, then quantize lazily, chunk by chunk; collective.

    Args:
        items: of this rank.
        replicas: items that lie here but are written by another rank; a search evaluates them too.
        agreement: of all ranks.
        config: of the save.
        chooser: not asked where the agreement says that all is exact.
        gradients: averaged, of local shards, by chunk or by name of the parameter.
        comm: of the ranks that save.
        workers: threads.

    Raises:
        SaveFailed: on all ranks, when any rank failed, or what is saved changed while the chooser looked at it.
        NonFiniteTensor: there is NaN or Inf, and the configuration asks for an error.
    """
    agreement = with_sound_parent(agreement, comm, workers)
    opened: list[Parent] = []
    chooser = all_exact if agreement.exact else chooser
    if agreement.parent is None and agreement.previous is not None:
        release_resident(Path(agreement.previous.path))

    def parent() -> Parent | None:
        if lossy_items(items):
            warmup.wait("save")
        if agreement.parent is not None and agreement.model is not None:
            opened.append(Parent(ParentRef(*agreement.parent), agreement.model, workers))
            return opened[0]
        return None

    averaged = {
        item.key: found for item in (*items, *replicas)
        if item.kind == "weights" and (found := _gradient(item.key, gradients)) is not None
    }
    try:
        sketches, bases = sketch(
            lossy_items(items), measured_items(items, agreement.layout), agreement, config, comm, workers, parent,
            averaged,
        )
        others: list[Chunk] = []
        before: dict[ChunkKey, Hashable] = {}
        searches = chooser not in (as_configured, all_exact)
        if searches:  # a failure must reach the ranks that go on to evaluate
            view, residual = opened[0] if opened else None, agreement.layout.residual
            others = together(comm, lambda: _weights(replicas, sketches, view, averaged, residual))
            before = together(comm, lambda: _state(items, replicas, workers))
    except DSQError:
        if agreement.parent is not None and (known := find(agreement.parent.save_id)) is not None:
            known.suspect = True
        raise
    finally:
        for view in opened:
            view.close()
    mine = [chunk for chunk in sketches.chunks if chunk.group.startswith("weights/")]
    choice = chooser(sketches, [*mine, *others], config, comm, workers)
    choice = replace(choice, analysis=replace(choice.analysis, worst=sketches.worst(choice.analysis)))
    if searches:
        together(comm, lambda: _check_unchanged(before, _state(items, replicas, workers)))
    if sketches.nonfinite:
        told = told_together(comm, lambda: _not_finite(items, sketches.nonfinite))
        beyond = sketches.nonfinite.difference(*told)
        for warning in (_out_of_range(beyond), _check_nonfinite(sketches.nonfinite - beyond, config)):
            if warning and comm.rank == 0:
                warn(warning)
    if comm.rank == 0:
        _warn_of_updates(choice.analysis, agreement.layout)
    chunks = deque(
        replace(chunk, refinement_bits=choice.analysis.fitted[chunk.group].refinement_bits)
        for chunk in sketches.chunks if chunk.group in choice.analysis.fitted
    )
    written = {chunk.key for chunk in chunks}
    tables = TablesOf()

    def coded() -> Iterator[Coded]:
        """No chunk is held longer than it takes to quantize it: with it go the previous codes in device memory."""
        while chunks:
            let_signals_through()
            yield quantize(chunks.popleft(), bases, choice.analysis, tables)

    return Quantized(
        coded(),
        [item for item in items if item.key not in written], choice,
    )


def _not_finite(items: list[Item], suspected: frozenset[str]) -> set[str]:
    """Return the suspected tensors that hold NaN, Inf or negative second moments themselves, by name."""
    def has(item: Item) -> bool:
        values = item.load()
        return not bool(values.isfinite().all()) or (item.kind == "exp_avg_sq" and bool((values < 0).any()))

    return {item.key.fqn for item in lossy_items(items) if item.key.fqn in suspected and has(item)}


def _check_nonfinite(found: Collection[str], config: DSQConfig) -> str | None:
    """Make a warning naming tensors with NaN or Inf.

    Raises:
        NonFiniteTensor: the configuration asks for an error.
    """
    if not found:
        return None
    names = sorted(found)
    message = f"{len(names)} tensor(s) hold NaN or Inf: {_first(names)}"
    if any(kind_of(name) == "exp_avg_sq" for name in names):
        message += " (of exp_avg_sq, negative values count as such)"
    if config.quantize.nonfinite == "error":
        raise NonFiniteTensor(message + "; the checkpoint was not written (quantize.nonfinite is 'error')")
    return message + "; stored exactly in this checkpoint"


def _out_of_range(found: Collection[str]) -> str | None:
    """Make a warning naming tensors that are finite, and beyond what can be quantized."""
    if not found:
        return None
    return (
        f"{len(found)} tensor(s) hold finite values beyond the range of normal float32 numbers, in which they are "
        "quantized (first moments in units of Adam's update, where their second moments are nearly zero): "
        f"{_first(sorted(found))}; stored exactly in this checkpoint"
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _state(items: list[Item], replicas: list[Item], workers: Workers) -> dict[ChunkKey, Hashable]:
    return checksums({item.key: item.load for item in (*items, *replicas)}, workers)


def _warn_of_updates(analysis: Analysis, layout: Layout) -> None:
    """Name groups of first moments whose bound on the error of the update asks for more bits than are allowed."""
    for group, fitted in analysis.fitted.items():
        codebook, most = layout.groups[group].codebook, layout.groups[group].refinement_bits
        if fitted.update_error is None or not most or not codebook.update_bound:
            continue
        if fitted.update_error > codebook.update_bound:
            warn(
                f"a restore from this checkpoint changes Adam's next update in '{group}' by {fitted.update_error:.0%}, "
                f"more than the {codebook.update_bound:.0%} of quantize.exp_avg.codebook.error: raise "
                f"quantize.exp_avg.refinement_bits, which is {most}, or store exp_avg with method exact"
            )


def _check_unchanged(before: Mapping[ChunkKey, Hashable], after: Mapping[ChunkKey, Hashable]) -> None:
    """Refuse to store what is no longer what the sketches were made of."""
    changed = sorted({key.fqn for key, found in before.items() if after[key] != found})
    if changed:
        raise SaveFailed(
            f"`evaluate` or `check` changed {named(changed)}: they must leave model and optimizer as they are. The "
            "checkpoint was not written, and what changed was not put back: load an earlier checkpoint before training "
            "goes on"
        )


def _weights(
    replicas: list[Item], sketches: Sketches, view: Parent | None, gradients: Mapping[ChunkKey, torch.Tensor],
    residual: bool,
) -> list[Chunk]:
    """Chunks of weights that another rank writes, scaled as that rank scales them."""
    scales = sketches.scales
    return [
        replace(
            chunk, exponent=scales.exponents.get(chunk.key.fqn, 0.0),
            parent=None if chunk.group in scales.anew else chunk.parent,
        )
        for item in lossy_items(replicas)
        if item.kind == "weights" and item.key.fqn not in sketches.nonfinite
        for chunk in [load_chunk(item, view, {}, gradients, residual)]
        if chunk is not None
    ]


def _gradient(key: ChunkKey, gradients: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
    if key in gradients:
        return gradients[key]
    name = unwrapped(key.fqn)
    while name and name not in gradients:
        name = name.partition(".")[2]
    found = gradients.get(name)
    return found if found is not None and found.numel() == key.elements else None
