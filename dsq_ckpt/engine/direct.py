"""A save without DCP: parts of named tensors from every rank of a communicator, into one checkpoint directory.

DCP plans, gathers and agrees for the storage writer. DeepSpeed and MPI do not, so here the ranks do it themselves, with
the same steps and the same files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.interrupts import held_signals, let_signals_through
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.core.nesting import Path as NestedPath
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, RankUnreachable, together, told_together
from dsq_ckpt.engine.commit import commit, retire
from dsq_ckpt.engine.parts import Part, items_of, layout_of
from dsq_ckpt.engine.quantizing import quantize_items
from dsq_ckpt.engine.remembered import Memory, remember_committed, remember_pending
from dsq_ckpt.engine.session import Agreement, Item, RankResult, agree, exact_values, write_rank
from dsq_ckpt.engine.terms import Terms, refuse_different
from dsq_ckpt.engine.ties import Ties
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.analysis import Fractions, Layout
from dsq_ckpt.quantization.choice import Choice, Chooser, as_configured
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage import attachments, gc
from dsq_ckpt.storage.container import FileInfo, file_checksum, make_directory
from dsq_ckpt.storage.index import uncovered
from dsq_ckpt.storage.targets import Landing, refuse_checkpoint


class Attachment(Protocol):
    """Writes a file of another format, which lies beside the data files."""

    def __call__(self, stream: IO[bytes], save_id: str) -> None:
        """Write to a stream; `save_id` is the save's."""


@dataclass
class Contribution:
    """What one rank brings to a save.

    Attributes:
        parts: chunks that this rank writes; no other rank may bring the same chunk.
        replicas: chunks that lie here and are written by another rank; a search evaluates them too.
        objects: bytes by name, of what is no tensor.
        nesting: path by name of tensor and object, by which nested state dicts are put together; a `Nesting` also has
            what such paths leave out.
        attachments: by file name.
        gradients: averaged, of local parts of weights, by chunk or by name of the parameter.
    """

    parts: Sequence[Part]
    replicas: Sequence[Part] = ()
    objects: Mapping[str, bytes] = field(default_factory=dict)
    nesting: Mapping[str, NestedPath] = field(default_factory=dict)
    attachments: Mapping[str, Attachment] = field(default_factory=dict)
    gradients: Mapping[str | ChunkKey, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Brought:
    """A contribution with how its parts are stored."""

    own: Contribution
    items: list[Item]
    tied: dict[ChunkKey, ChunkKey]
    replicas: list[Item]


@dataclass
class _Plan:
    """What is in a checkpoint, by all ranks."""

    tensors: dict[str, dict[str, Any]]
    objects: list[str]
    nesting: Nesting


@dataclass
class _Done:
    """What the coordinator needs to know of a rank; it is pickled."""

    result: RankResult
    tensors: dict[str, dict[str, Any]]
    objects: list[str]
    nesting: Nesting
    attachments: list[FileInfo]


@held_signals()
def save_parts(
    path: Path, contribution: Callable[[], Contribution], config: DSQConfig, comm: Communicator, *,
    types: Mapping[str, str] | None = None, parent: str | os.PathLike[str] | None = "auto", overwrite: bool = False,
    pinned: bool = False, chooser: Chooser = as_configured, fractions: Fractions | None = None,
) -> Choice:
    """Save what the ranks bring; collective over `comm`. The checkpoint is complete on return, or was never there.

    Args:
        path: the checkpoint directory, absolute, on storage that all ranks share.
        contribution: of this rank; called so that its failure reaches the others.
        config: the same on all ranks, but for what `terms` leaves to each.
        comm: of the ranks that save.
        types: see `assign`.
        parent: see `DSQStorageWriter`.
        overwrite: replace a complete checkpoint at `path`.
        pinned: keep its refinement layer for good.
        chooser: chooses the configuration when the sketches are known.
        fractions: what the chooser may prune and protect by sensitivity.

    Returns:
        How it was stored.

    Raises:
        DSQError: on all ranks, when any failed; earlier checkpoints are untouched.
    """
    started = time.time()

    found: list[_Brought] = []

    def prepare() -> tuple[Terms, Layout]:
        own = contribution()
        let_signals_through()
        items, replicas = items_of(own.parts, config, types), items_of(own.replicas, config, types)
        ties = Ties.of(items, replicas)
        found.append(_Brought(own, ties.kept(items), ties.first, ties.kept(replicas)))
        return Terms.of(path, config), layout_of(own.parts, config, types, bool(own.gradients), fractions)

    offers = told_together(comm, prepare)
    refuse_different([terms for terms, _ in offers])
    brought, own = found[0], found[0].own

    landing: Landing | None = None

    def decide() -> Agreement | None:
        nonlocal landing
        if comm.rank:
            return None
        refuse_checkpoint(path, overwrite, attached=bool(own.attachments))
        landing = Landing(path)
        agreement = agree(path, parent, config, comm.size, [layout for _, layout in offers])
        landing.claim(agreement.save_id, agreement.parent and agreement.parent.path)
        if own.attachments:
            attachments.keep_plain(path, config.storage.fsync)
        return agreement

    hidden: dict[str, Path] = {}
    try:
        agreement = told_together(comm, decide)[0]
        assert agreement is not None
        kept: list[tuple[Choice, Memory]] = []

        def written() -> _Done:
            done, chosen, codes = _written(path, brought, agreement, config, comm, chooser, hidden)
            kept.append((chosen, codes))
            attachments.journal(path, agreement.save_id, comm.rank, done.attachments, config.storage.fsync)
            return done

        everybody = told_together(comm, written)
        choice, memory = kept[0]
        plan: _Plan | None = None

        def published() -> None:
            nonlocal plan
            plan = _planned(everybody)  # fails on all ranks alike, before any gives a name to anything
            attachments.publish(path, hidden, config.storage.fsync)

        try:
            if any(done.attachments for done in everybody):
                together(comm, published)
            together(comm, lambda: None if comm.rank else _committed(
                path, agreement, everybody, plan or _planned(everybody), choice, overwrite, pinned, started
            ))
        except BaseException:
            if comm.rank == 0:
                with suppress(OSError):
                    attachments.restore(path, agreement.save_id)
            raise
    except RankUnreachable:
        raise  # others may still write
    except BaseException:
        if landing is not None:
            landing.discard()
        raise
    finally:
        for temporary in hidden.values():
            temporary.unlink(missing_ok=True)
    remember_pending(path, agreement.save_id, memory, agreement.layout.shapes, agreement.previous)
    remember_committed(path, agreement.save_id)
    return choice


def _written(
    path: Path, brought: _Brought, agreement: Agreement, config: DSQConfig, comm: Communicator, chooser: Chooser,
    hidden: dict[str, Path],
) -> tuple[_Done, Choice, Memory]:
    """Sketch, choose, quantize and write the files of this rank; `hidden` takes the attachments' temporary names."""
    own, items, storage = brought.own, brought.items, config.storage
    with Workers(storage.thread_count(), storage.block_elements) as workers:
        quantized = quantize_items(
            items, brought.replicas, agreement, config, chooser, own.gradients, comm, workers
        )
        choice, plain = quantized.choice, quantized.plain
        if agreement.exact:
            for item in plain:
                item.config = None  # not as bf16 either
        make_directory(path, storage.fsync)
        result, memory = write_rank(
            path, agreement, comm.rank, choice.config, choice.analysis.fitted, quantized.coded, plain,
            own.objects.items(), {item.key: item.dtype for item in items}, {item.key: item.kind for item in items},
            workers, brought.tied,
        )
        memory.values |= exact_values(plain, agreement.layout)
    let_signals_through()
    files = []
    for name, write in own.attachments.items():
        temporary = path / f".{name}.dsq-{agreement.save_id[:8]}.tmp"
        hidden[name] = temporary
        attachments.write(temporary, partial(write, save_id=agreement.save_id), storage.fsync)
        files.append(FileInfo(name, *file_checksum(temporary)))
    nesting = own.nesting if isinstance(own.nesting, Nesting) else Nesting(own.nesting)
    return _Done(result, _inventory(own.parts), list(own.objects), nesting, files), choice, memory


def _planned(everybody: Sequence[_Done]) -> _Plan:
    """All that was brought, if that is whole tensors."""
    plan = _Plan({}, [name for done in everybody for name in done.objects], Nesting({}))
    paths: dict[str, NestedPath] = {}
    seen: dict[ChunkKey | str, int] = {}
    for rank, done in enumerate(everybody):
        paths.update(done.nesting)
        for name in done.objects:
            _once(seen, name, rank)
        for fqn, tensor in done.tensors.items():
            known = plan.tensors.setdefault(fqn, {**tensor, "chunks": []})
            _alike(fqn, known, tensor)
            for key in tensor["chunks"]:
                _once(seen, key, rank)
            known["chunks"] += tensor["chunks"]
    for fqn, tensor in plan.tensors.items():
        if problem := uncovered(tensor["shape"], [(key.offsets, key.shape) for key in tensor["chunks"]]):
            raise SaveFailed(f"'{fqn}' of shape {tensor['shape']} was brought so that {problem}")
    plan.nesting = Nesting.merged(paths, [done.nesting for done in everybody])
    return plan


def _committed(
    path: Path, agreement: Agreement, everybody: Sequence[_Done], plan: _Plan, choice: Choice, overwrite: bool,
    pinned: bool, started: float,
) -> None:
    attached = [file for done in everybody for file in done.attachments]
    committed = commit(
        path, agreement, [done.result for done in everybody], plan.tensors, plan.objects, plan.nesting.as_json(),
        choice, attached, overwrite=overwrite, pinned=pinned, started=started,
    )
    if not committed.flushed:
        return
    attachments.forget(path, [file.name for file in attached])
    retire(path, choice.config)
    with suppress(OSError):  # what an interrupted save to this path left; what is younger belongs to another one
        gc.collect_in(path, time.time() - started)


def _once(seen: dict[ChunkKey | str, int], key: ChunkKey | str, rank: int) -> None:
    if key in seen:
        raise SaveFailed(f"{key} was brought by rank {seen[key]} and by rank {rank}; one of them must write it")
    seen[key] = rank


def _inventory(parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    for part in parts:
        dtype = str(part.dtype).removeprefix("torch.")
        tensor = {"dtype": dtype, "shape": list(part.size), "chunks": [part.key]}
        known = tensors.setdefault(part.key.fqn, {**tensor, "chunks": []})
        _alike(part.key.fqn, known, tensor)
        known["chunks"].append(part.key)
    return tensors


def _alike(fqn: str, known: dict[str, Any], tensor: dict[str, Any]) -> None:
    for what in ("dtype", "shape"):
        if known[what] != tensor[what]:
            raise SaveFailed(f"parts of '{fqn}' were brought with {what} {known[what]} and {tensor[what]}")
