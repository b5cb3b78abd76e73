"""One save: what the ranks agree on, what each rank computes and writes, and the commit.

Nothing here knows DCP; the storage writer (and other integrations) drive these steps.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dsq_ckpt.config.schema import DSQConfig, TensorConfig
from dsq_ckpt.core.interrupts import let_signals_through
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.engine import chain
from dsq_ckpt.engine.chain import Base, Descent, Parent
from dsq_ckpt.engine.inheritance import inherit
from dsq_ckpt.engine.remembered import Memory, ParentRef
from dsq_ckpt.errors import DSQError, SaveFailed
from dsq_ckpt.quantization import device
from dsq_ckpt.quantization.analysis import MEASURED, Analysis, Layout, ParentModel, Sketches, measure
from dsq_ckpt.quantization.chunk import (
    Chunk,
    ChunkKey,
    CodeSource,
    Floats32,
    QuantizingChunk,
    all_finite,
    brings_nearer,
    flat_values,
)
from dsq_ckpt.quantization.codebook import Fitted
from dsq_ckpt.quantization.device.coding import DeviceChunk, TablesOf
from dsq_ckpt.quantization.device.passes import parent_on_device
from dsq_ckpt.quantization.moments import Frame, OctaveFrame, UpdateFrame
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import FileInfo, sync_directory
from dsq_ckpt.storage.manifest import Sizes
from dsq_ckpt.storage.shard import Piece, ShardWriter, Written


@dataclass(frozen=True)
class Agreement:
    """What all ranks of a save agree on before data is touched. Plain data: it travels in DCP's plans."""

    save_id: str
    ranks: int
    previous: ParentRef | None
    parent: ParentRef | None
    model: ParentModel | None
    layout: Layout
    exact: bool = False
    """Nothing is stored lossy, whatever the configuration says: see `too_many_resumes`."""
    lossy_resumes: int = 0
    """How often the run was restored from lossy state before."""

    @classmethod
    def new(
        cls, ranks: int, descent: Descent, parent: ParentRef | None, layout: Layout, exact: bool = False
    ) -> Agreement:
        """Made by the coordinator, which alone reads the parent's model: the shape of the collective follows from it.

        Raises:
            CheckpointNotFound, CorruptCheckpoint: the parent cannot be read.
        """
        model = None
        if parent is not None:
            with Checkpoint(Path(parent.path)) as checkpoint:
                # Codebooks of values serve no differences, nor do those of other differences, which have other sizes.
                model = ParentModel({}, {}) if layout.residual else checkpoint.model().usable_for(layout)
        return cls(
            uuid.uuid4().hex[:16], ranks, descent.previous, parent, model, layout, exact, descent.lossy_resumes
        )


@dataclass(frozen=True)
class SecondMoment:
    """The same chunk of the second moments: what a first moment is measured by."""

    fqn: str
    load: Callable[[], torch.Tensor]


@dataclass
class Item:
    """One tensor chunk of this rank: `load` gives its local tensor; `config` None means exact."""

    key: ChunkKey
    dtype: torch.dtype
    kind: str
    group: str
    config: TensorConfig | None
    load: Callable[[], torch.Tensor]
    on_device: bool = True
    second_moment: SecondMoment | None = None


@dataclass
class Coded:
    """A chunk ready to be entropy-coded: its codes and what they are coded against."""

    chunk: CodeSource
    base: Base | None


@dataclass
class RankResult:
    """What one rank wrote, and on which host."""

    rank: int
    host: str = field(default_factory=platform.node)
    files: list[FileInfo] = field(default_factory=list)
    refinement: FileInfo | None = None
    requires: list[str] = field(default_factory=list)
    written: dict[ChunkKey | str, Written] = field(default_factory=dict)
    kinds: dict[str, Sizes] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    units: list[ChunkKey] = field(default_factory=list)
    """Chunks that a reader of this rank's records needs beside them."""


def too_many_resumes(resumes: int, config: DSQConfig) -> str | None:
    """A warning, if the run was restored from lossy state so often that its checkpoints are to be exact from now on."""
    limit = config.search.max_lossy_resumes
    if limit is None or resumes < limit:
        return None
    return (
        f"the run was restored from lossy state {resumes} time(s), and search.max_lossy_resumes is {limit}: weights "
        "and optimizer state of this checkpoint are stored exactly"
    )


def agree(
    path: Path, parent: str | os.PathLike[str] | None, config: DSQConfig, ranks: int, layouts: Iterable[Layout]
) -> Agreement:
    """What the coordinator decides: what the checkpoint comes after, and what it is coded against.

    Args:
        path: the new checkpoint.
        parent: see `chain.descent`.
        config: of the save.
        ranks: that save.
        layouts: of all ranks.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: a parent named by the caller cannot be read.
    """
    layout = Layout.union(layouts)
    descent = chain.descent(path, parent, layout.shapes)
    if (warning := too_many_resumes(descent.lossy_resumes, config)) is not None:
        warn(warning)
        return Agreement.new(ranks, descent, None, layout, exact=True)
    try:
        return Agreement.new(ranks, descent, chain.choose_parent(descent.base, parent, config), layout)
    except DSQError as error:
        if parent != "auto":
            raise
        warn(f"the parent checkpoint cannot be read; writing a keyframe instead of a delta: {error}")
        return Agreement.new(ranks, descent, None, layout)


def lossy_items(items: Sequence[Item]) -> list[Item]:
    """Items that are to be quantized."""
    return [item for item in items if item.config is not None and item.config.method == "quantize"]


def measured_items(items: Sequence[Item], layout: Layout) -> list[Item]:
    """Optimizer state that is not quantized itself, but tells the size of gradients."""
    wanted = any(c.codebook.gradient_power > 0 for c in layout.groups.values())
    return [item for item in items if wanted and item.key.fqn in layout.state and item.key.fqn not in layout.tensors]


def sketch(
    items: Sequence[Item], measured: Sequence[Item], agreement: Agreement, config: DSQConfig, comm: Communicator,
    workers: Workers, parent: Callable[[], Parent | None], gradients: Mapping[ChunkKey, torch.Tensor] | None = None,
) -> tuple[Sketches, dict[ChunkKey, Base]]:
    """The collective part of a save: local sketches and their merge.

    Args:
        items: the lossy items of this rank.
        measured: those that are only measured.
        agreement: of all ranks.
        config: of the save.
        comm: of the ranks that save.
        workers: threads.
        parent: opens the parent checkpoint; called so that its failure reaches the other ranks.
        gradients: averaged, of weights, by chunk.

    Returns:
        The sketches, and what each chunk is coded against.
    """
    bases: dict[ChunkKey, Base] = {}

    def load_chunks() -> list[Chunk]:
        view = parent()
        residual = agreement.layout.residual
        loaded = (load_chunk(item, view, bases, gradients or {}, residual) for item in items)
        chunks = [chunk for chunk in loaded if chunk is not None]
        return chunks + [Chunk(item.key, item.load(), MEASURED, 0, on_device=item.on_device) for item in measured]

    sketches = measure(
        load_chunks, agreement.layout, agreement.model, config.quantize.outlier_octaves, comm, workers,
        0 if agreement.parent is None else agreement.parent.depth,
    )
    return sketches, bases


def load_chunk(
    item: Item, view: Parent | None, bases: dict[ChunkKey, Base], gradients: Mapping[ChunkKey, torch.Tensor],
    residual: bool,
) -> Chunk | None:
    """A lossy item's tensor, with previous codes or, if `residual`, with the values that its difference is taken to.

    What it is coded against goes to `bases`. None: there is nothing to take a difference to, or it is too far
    off, so the chunk is stored exactly.
    """
    assert item.config is not None
    tensor = item.load()
    chunk = Chunk(
        item.key, tensor, item.group, item.config.refinement_bits, gradient=gradients.get(item.key),
        on_device=item.on_device, frame=_frame(item, tensor),
    )
    if not residual:
        previous = view.codes(item.key, item.group) if view else None
        if previous is None:
            return chunk
        bases[item.key] = previous[0]
        chunk = replace(chunk, parent=previous[1], resident=view.resident(item.key) if view else None)
        if device.serves(chunk):
            with suppress(torch.OutOfMemoryError):
                return replace(chunk, resident=parent_on_device(chunk))
        return replace(chunk, on_device=False, resident=None)
    known = view.values(item.key) if view else None
    if known is not None:
        difference = replace(chunk, onto=known[1])
        if brings_nearer(difference):
            bases[item.key] = known[0]
            return difference
    return None if all_finite(chunk) else chunk  # NaN and Inf are for `measure` to find


def _frame(item: Item, tensor: torch.Tensor) -> Frame | None:
    """The coordinates that an item is quantized in.

    Raises:
        SaveFailed: the chunk of its second moments is of another shape.
    """
    if item.config is not None and item.config.codebook.coordinates == "octaves":
        return OctaveFrame()
    if item.second_moment is None:
        return None
    squares = item.second_moment.load().detach()
    if squares.shape != tensor.shape:
        raise SaveFailed(
            f"'{item.key.fqn}' has a chunk of shape {tuple(tensor.shape)}, and '{item.second_moment.fqn}', which "
            f"measures it, one of {tuple(squares.shape)}; save both in the same layout, or store exp_avg exactly"
        )
    return UpdateFrame(item.second_moment.fqn, squares.to(tensor.device).contiguous().view(-1))


def exact_values(plain: Iterable[Item], layout: Layout) -> dict[ChunkKey, Floats32]:
    """Of chunks that are stored exactly, what the next save takes differences to.

    Copies: training goes on in the tensors, and what is staged may move to shared memory under a view of it.
    """
    wanted = (item for item in plain if layout.residual and item.key.fqn in layout.tensors)
    return {item.key: flat_values(item.load()).copy() for item in wanted}


def quantize(chunk: Chunk, bases: dict[ChunkKey, Base], analysis: Analysis, tables: TablesOf) -> Coded:
    """The chunk's codes, made as they are written, or on its device, and what they are coded against."""
    fitted = analysis.fitted[chunk.group]
    source: CodeSource | None = None
    if device.serves(chunk) and fitted.turn is None:
        with suppress(torch.OutOfMemoryError):
            source = DeviceChunk(chunk, tables.of(fitted, chunk.tensor.device))
    source = source or QuantizingChunk(chunk, fitted)
    coded = source.parent is not None or chunk.onto is not None
    return Coded(source, bases.get(chunk.key) if coded else None)


def remember(memory: Memory, chunk: CodeSource, config: DSQConfig) -> None:
    """Keep what the next save needs of a chunk; valid once all its blocks were asked for."""
    if chunk.values is None:
        memory.codes[chunk.key] = chunk.codes
    else:
        memory.values[chunk.key] = chunk.values
    if isinstance(chunk, DeviceChunk) and chunk.resident is not None and config.delta.enabled:
        memory.resident[chunk.key] = chunk.resident


def write_rank(
    directory: Path, agreement: Agreement, rank: int, config: DSQConfig, fitted: dict[str, Fitted],
    coded: Iterable[Coded], plain: Iterable[Item], objects: Iterable[tuple[str, bytes]],
    dtypes: dict[ChunkKey, torch.dtype], kinds: dict[ChunkKey, str], workers: Workers,
    tied: Mapping[ChunkKey, ChunkKey],
) -> tuple[RankResult, Memory]:
    """Write the files of one rank; returns what was written, and what the next save needs of what was coded.

    `coded` is consumed one by one, so that only codes, or values, stay in memory.
    """
    result = RankResult(rank)
    memory = Memory()
    by_kind: dict[str, list[Written]] = defaultdict(list)
    with ShardWriter(directory, agreement.save_id, rank, config, workers=workers, fitted=fitted) as shard:
        keys = []

        def pieces() -> Iterator[Piece]:
            for chunk, base in ((piece.chunk, piece.base) for piece in coded):
                keys.append(chunk.key)
                if chunk.second_moment is not None:
                    result.units.append(chunk.key._replace(fqn=chunk.second_moment))
                remember(memory, chunk, config)
                if base is None:
                    yield Piece(chunk, dtypes[chunk.key], None, frozenset())
                elif base.residual:
                    yield Piece(chunk, dtypes[chunk.key], None, base.requires, base.ref)
                else:
                    yield Piece(chunk, dtypes[chunk.key], base.ref, base.requires)

        for place, written in enumerate(shard.add_coded(pieces())):
            result.written[keys[place]] = written
            by_kind[kinds[keys[place]]].append(written)
        for item in plain:
            let_signals_through()
            stored = None
            if item.config is not None and item.config.method == "bf16" and item.dtype.itemsize > 2:
                stored = torch.bfloat16
            written = shard.add_plain(item.key, item.load(), stored)
            result.written[item.key] = written
            by_kind[item.kind if stored else "exact"].append(written)
        for fqn, data in objects:
            written = shard.add_bytes(fqn, data)
            result.written[fqn] = written
            by_kind["exact"].append(written)
        let_signals_through()
        base_file, result.refinement, result.requires = shard.finish()
        if agreement.parent is not None and result.requires:
            inherit(
                Path(agreement.parent.path), directory, frozenset(result.requires), config.storage.keyframe_copies,
                config.storage.fsync,
            )
        if config.storage.fsync:
            sync_directory(directory)
    result.files.append(base_file)
    for key, first in tied.items():
        result.written[key] = result.written[first]
        result.tied[key.fqn] = first.fqn
    for kind, parts in by_kind.items():
        result.kinds[kind] = Sizes(
            logical=sum(part.logical for part in parts), base=sum(part.base for part in parts),
            refinement=sum(part.refinement for part in parts),
        )
    return result, memory
