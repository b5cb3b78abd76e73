"""Writing of the data files of one rank: the local step of a save."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.back_off import BackOff
from dsq_ckpt.engine.chunks import cache_chunk, copy_exact_values
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import ChunkCache, ParentRef, SaveHistory
from dsq_ckpt.engine.inheritance import link_parent_files, link_refinement, remove_links
from dsq_ckpt.engine.quantizing import QuantizedState
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.container import FileInfo
from dsq_ckpt.storage.manifest import KindSizes
from dsq_ckpt.storage.parent_packs import ParentPackReader
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.shard import ChunkRequest, RefinementSymbols, ShardWriter, WrittenRecord

_MIN_SAVED_SHARE = 1 / 8
"""Bytes that differences must save of packed symbols, as a share of the older files that they keep on the disk."""


@dataclass
class RankResult:
    """The files and records of one rank, from which the coordinator makes the index and the manifest.

    Attributes:
        rank: number of the rank.
        host: name of its host.
        files: base files.
        refinement: refinement file; None: it wrote none.
        requires: names of the parent's files that its records need.
        refinement_requires: names of the parent's files that its refinement needs besides.
        written: record and sizes of each chunk and object.
        kinds: bytes by kind of tensor.
        tied: the stored name by tied name.
        units: chunks of second moments that a reader needs to scale its records of first moments.
        related: whether any of its weights depend on the previous checkpoint; None: unknown.
    """

    rank: int
    host: str = field(default_factory=platform.node)
    files: list[FileInfo] = field(default_factory=list)
    refinement: FileInfo | None = None
    requires: list[str] = field(default_factory=list)
    refinement_requires: list[str] = field(default_factory=list)
    written: dict[ChunkKey | str, WrittenRecord] = field(default_factory=dict)
    kinds: dict[str, KindSizes] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    units: list[ChunkKey] = field(default_factory=list)
    related: bool | None = None


def write_rank(
    path: Path, context: SaveContext, rank: int, state: QuantizedState, workers: Workers, history: SaveHistory
) -> tuple[RankResult, ChunkCache]:
    """Write the files of one rank.

    Args:
        path: directory of the checkpoint; it is created.
        context: context of the save.
        rank: number of this rank.
        state: chunks, quantized one by one as they are written, and objects of this rank.
        workers: threads.
        history: checkpoints that this process committed or loaded.

    Returns:
        The result of this rank, and the chunks cached for the next save.
    """
    config = state.plan.config
    storage = config.storage
    result, cache = RankResult(rank), ChunkCache()
    by_kind: dict[str, list[WrittenRecord]] = defaultdict(list)
    get_storage(path).make_directory(path, storage.fsync)
    packs = None if state.is_self_contained else _open_parent_packs(context.parent, path, history)
    with packs or nullcontext() as older, ShardWriter(
        path, context.save_id, rank, state.plan, workers, older
    ) as shard:
        keys = list[ChunkKey]()
        refinement, links = _link_older_refinement(path, context, config, history)
        kept_bytes = sum((path / name).stat().st_size for name in {symbols.file for symbols in refinement.values()})
        cache.back_off = _continue_back_off(context, history)
        # Either all chunks are the first of a row, or none is, so that one older file at most is needed.
        begins_row = not refinement and not cache.back_off.full_layers and _may_begin_row(path, context, config)

        def chunks() -> Iterator[ChunkRequest]:
            for chunk in state.chunks:
                source, reference = chunk.codes, chunk.parent_record
                keys.append(source.key)
                if source.second_moment is not None:
                    result.units.append(source.key._replace(fqn=source.second_moment))
                if reference is None or not context.reuses_parent:
                    cache_chunk(cache, source, config.delta.enabled)
                dtype, kind = state.items[source.key].dtype, state.items[source.key].kind
                keeps = kind == "weights" and begins_row
                if reference is None:
                    yield ChunkRequest(source, dtype, None, frozenset(), keeps_refinement=keeps)
                elif reference.residual:
                    yield ChunkRequest(source, dtype, None, reference.requires, reference.ref)
                else:
                    yield ChunkRequest(
                        source, dtype, reference.ref, reference.requires,
                        older_refinement=refinement.get(source.key), keeps_refinement=keeps,
                    )

        for index, written in enumerate(shard.add_coded(chunks())):
            result.written[keys[index]] = written
            cache.refs[keys[index]] = written.ref
            if (symbols := shard.symbols.pop(written.ref, None)) is not None:
                cache.refinement[keys[index]] = symbols
            by_kind[state.items[keys[index]].kind].append(written)
        saved = shard.saved_by_differences
        if refinement and saved is not None and saved >= _MIN_SAVED_SHARE * kept_bytes:
            cache.back_off = BackOff()
        elif refinement:
            cache.refinement.clear()  # weights have moved too far, or are coded otherwise: the row ends
            # Later differences of a row may be too far from its first layer.
            if saved is not None and all(symbols.uses == 0 for symbols in refinement.values()):
                cache.back_off = cache.back_off.after_miss()
        for item in state.unquantized:
            run_pending_handlers()
            stored = item.rounded_dtype
            written = shard.add_plain(item.key, item.load(), stored)
            result.written[item.key] = written
            cache.refs[item.key] = written.ref
            by_kind[item.kind if stored else "exact"].append(written)
        for fqn, data in state.objects:
            written = shard.add_bytes(fqn, data)
            result.written[fqn] = written
            by_kind["exact"].append(written)
        run_pending_handlers()
        base_file, result.refinement, result.requires, result.refinement_requires = shard.finish()
        if context.parent is not None and result.requires:
            before = context.previous if context.parent.position > 1 else None
            link_parent_files(context.parent, path, frozenset(result.requires), storage, before)
        remove_links(link for link in links if link.name not in result.refinement_requires)
        if storage.fsync and context.ranks > 1:  # with one rank the commit flushes the directory
            get_storage(path).flush(path)
    result.files.append(base_file)
    result.related = state.related
    for key, first in state.tied.items():
        result.written[key] = result.written[first]
        result.tied[key.fqn] = first.fqn
    for kind, records in by_kind.items():
        result.kinds[kind] = KindSizes(
            logical=sum(record.logical for record in records), base=sum(record.base for record in records),
            refinement=sum(record.refinement for record in records),
        )
    if not state.is_staged:
        cache.values |= copy_exact_values(state.unquantized, context.layout)
    return result, cache


def _continue_back_off(context: SaveContext, history: SaveHistory) -> BackOff:
    """Return what the back-off of the save before leaves for this one."""
    before = context.previous or context.parent
    known = None if before is None else history.find(before.save_id)
    return BackOff() if known is None else known.cache.back_off.after_save()


def _may_begin_row(path: Path, context: SaveContext, config: DSQConfig) -> bool:
    """Return whether later saves may store refinement as the difference to that of this save."""
    deltas = config.delta.enabled and config.delta.against == "codes" and not context.reuses_parent
    return config.refinement.stores_differences and deltas and not is_remote(path)


def _link_older_refinement(
    path: Path, context: SaveContext, config: DSQConfig, history: SaveHistory
) -> tuple[dict[ChunkKey, RefinementSymbols], list[Path]]:
    """Return the symbols of older refinement that this one may be the difference to, and new links to its files."""
    if context.parent is None or not context.refines_parent:
        return {}, []
    parent = history.find(context.parent.save_id)
    if parent is None or parent.suspect:
        return {}, []
    symbols = {
        key: symbols for key, symbols in parent.cache.refinement.items()
        if symbols.uses < config.refinement.max_differences and symbols.step == config.storage.block_elements
    }
    links = link_refinement(expand_path(context.parent.path), path, {chunk.file for chunk in symbols.values()})
    return ({}, []) if links is None else (symbols, links)


def _open_parent_packs(parent: ParentRef | None, path: Path, history: SaveHistory) -> ParentPackReader | None:
    """Return the packs of the parent against which exact data may be coded; None: none can be used."""
    if parent is None or (is_remote(expand_path(parent.path)) and not is_remote(path)):  # remote files cannot be linked
        return None
    cached = history.find(parent.save_id)
    return ParentPackReader(expand_path(parent.path), parent.save_id, {} if cached is None else cached.cache.refs)
