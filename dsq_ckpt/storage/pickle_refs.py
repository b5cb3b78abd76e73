"""Placeholders of tensors in pickled files of another format, whose values are in the checkpoint beside the files.

`torch.save` of a `TensorPlaceholder` writes a call of `decode`, so `torch.load` of the file returns ordinary tensors in
any program that can import this package. Decoding reads checksummed containers and executes no stored code.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.address_ranges import AddressRanges, address_range
from dsq_ckpt.core.arguments import expect
from dsq_ckpt.core.arrays import Codes
from dsq_ckpt.core.flat_ranges import flat_index, is_contiguous
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, LoadFailed, UnsupportedFormat
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.chunk_load import NO_REUSE, ChunkLoad, CodeReuse, decode_all
from dsq_ckpt.storage.manifest import MANIFEST
from dsq_ckpt.storage.record_fields import parse_dtype
from dsq_ckpt.storage.shard import RecordRef

_VERSION = 1
_source: ContextVar[CheckpointSource | None] = ContextVar("_source", default=None)
_code_cache: ContextVar[CodeCache | None] = ContextVar("_kept", default=None)
_checked_files: set[tuple[Path, str, int]] = set()  # files whose checksums were verified


class CheckpointSource(NamedTuple):
    """Checkpoint that holds the values of files being loaded, whether to use its refinement layer, and threads."""

    directory: Path
    refined: bool
    workers: Workers


class CodeCache(NamedTuple):
    """Cache of a checkpoint's codes, filled while its files are loaded."""

    directory: Path
    needs_codes: Callable[[ChunkKey], bool]
    codes: dict[ChunkKey, Codes]
    by_record: dict[RecordRef, Codes]
    """The same by record, and the codes of second moments that first moments were multiplied by."""


class FlatRange(NamedTuple):
    """Range of a flattened stored tensor: `length` elements of `fqn` from `start` on, copied to flat offset `at`."""

    fqn: str
    start: int
    length: int
    at: int


class TensorPlaceholder:
    """Placeholder of a tensor in a state dict to be pickled.

    Args:
        save_id: save id of the checkpoint in whose directory the file will be.
        dtype: dtype of the tensor; ranges stored in another dtype are cast to it.
        shape: shape of the tensor.
        pieces: ranges of stored tensors; elements outside of them and of `rest` are zero.
        rest: values that are in no stored tensor, by flat offset.
    """

    def __init__(
        self, save_id: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: list[FlatRange],
        rest: list[tuple[int, torch.Tensor]],
    ) -> None:
        self._spec = {
            "version": _VERSION, "save_id": save_id, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape),
            "pieces": [tuple(piece) for piece in pieces], "rest": rest,
        }

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return decode, (self._spec,)


def decode(spec: dict[str, Any]) -> torch.Tensor:
    """Return the tensor of a `TensorPlaceholder`, on the CPU; called by unpicklers.

    The checkpoint is the directory of the file that `torch.load` is reading, or that of `stored_in`.

    A universal checkpoint of DeepSpeed has a copy of such a file without the checkpoint. Its weights are in the folder
    `zero`, and those of the file are not used, so they become tensors on the meta device.

    Args:
        spec: content of the placeholder, as `TensorPlaceholder` pickles it.

    Returns:
        The tensor, on the CPU or on the meta device.

    Raises:
        LoadFailed: the file is not read by its path, so that the location of the checkpoint is unknown.
        CheckpointNotFound: the checkpoint beside the file is not complete, or is of another save.
        CorruptCheckpoint: it is altered, or lacks elements of the tensor.
        UnsupportedFormat: it was written by a newer version.
    """
    expect("spec", spec, dict, "the dict in a placeholder that a tag of DeepSpeed holds")
    if spec.get("version") != _VERSION:
        raise UnsupportedFormat(
            f"a tensor is stored in layout {spec.get('version')!r}, this dsq_ckpt reads {_VERSION}; upgrade it"
        )
    file = _find_loading_file()
    source = _source.get()
    directory = source.directory if source is not None else None if file is None else file.parent
    if directory is None:
        raise LoadFailed(
            "a tensor of this file lies in the dsq_ckpt checkpoint beside it, whose path is unknown, since "
            "the file is not read by its path: torch.load(path), or load it "
            "within dsq_ckpt.storage.pickle_refs.stored_in(directory)"
        )
    if (directory / "zero").is_dir() and not (directory / MANIFEST).exists():
        return torch.empty(spec["shape"], dtype=parse_dtype(spec["dtype"]), device="meta")
    checkpoint = _open_checkpoint(directory, spec["save_id"])
    if file is not None and file.parent == directory:
        _check_file(file, checkpoint)
    out = torch.empty(spec["shape"], dtype=parse_dtype(spec["dtype"]), device="cpu")
    flat = out.view(-1)
    for gap in _iter_gaps(flat.numel(), [slice(at, at + length) for *_, length, at in spec["pieces"]]):
        flat[gap].zero_()
    pieces = [(fqn, start, flat[at : at + length]) for fqn, start, length, at in spec["pieces"]]
    if source is not None:
        read_flat(checkpoint, pieces, source.refined, source.workers)
    else:
        with _make_workers() as workers:
            read_flat(checkpoint, pieces, True, workers)
    for at, values in spec["rest"]:
        flat[at : at + values.numel()] = values
    return out


def _make_workers() -> Workers:
    storage = StorageConfig()
    return Workers(storage.thread_count(), storage.block_elements)


def _iter_gaps(count: int, pieces: Iterable[slice]) -> Iterator[slice]:
    """Yield the ranges of a flat tensor of `count` elements that are in no piece."""
    at = 0
    for start, stop, _ in sorted(piece.indices(count) for piece in pieces):
        if start > at:
            yield slice(at, start)
        at = max(at, stop)
    if at < count:
        yield slice(at, count)


decode.__module__ = "dsq_ckpt"  # the name in pickled files, which must not change


def read_flat(
    checkpoint: Checkpoint, pieces: Sequence[tuple[str, int, torch.Tensor]], refined: bool, workers: Workers
) -> None:
    """Read ranges of flattened tensors, decoding chunks in parallel.

    Args:
        checkpoint: opened checkpoint.
        pieces: for each range the name of its tensor, its first element, and its destination, flat, of any dtype,
            whose length is the number of elements.
        refined: use the refinement layer if the checkpoint has it.
        workers: threads.

    Raises:
        CorruptCheckpoint: the checkpoint does not have all elements.
    """
    parts = deque[_ChunkPart]()
    ranges = AddressRanges()

    def loads() -> Iterator[ChunkLoad]:
        for fqn, start, out in pieces:
            for part in _iter_parts(checkpoint, fqn, start, out):
                target = part.out.view(part.key.shape) if part.out.numel() == part.key.elements else None
                into = target if ranges.add(*address_range(part.out)) else None
                cache = _code_cache.get()
                keeps = cache is not None and _needs_codes(cache, checkpoint, part)
                span = None if keeps else (part.first, part.first + part.out.numel())
                load = checkpoint.prepare_load(
                    part.ref, refined and checkpoint.has_refinement, workers, into, span,
                    CodeReuse(True, cache.by_record) if keeps and cache is not None else NO_REUSE,
                )
                parts.append(part._replace(keeps=keeps, done=load.tensor is into))
                yield load

    for load in decode_all(loads(), workers):
        part, code_cache = parts.popleft(), _code_cache.get()
        if part.keeps and load.codes is not None and code_cache is not None:
            code_cache.codes[part.key] = code_cache.by_record[part.ref] = load.codes
            if load.second_moments is not None:
                code_cache.by_record.setdefault(*load.second_moments)
        if not part.done:
            part.out.copy_(load.tensor.view(-1)[part.first : part.first + part.out.numel()])


class _ChunkPart(NamedTuple):
    """Range of a chunk from the element `first` on, and its flat destination.

    Attributes:
        keeps: whether the codes of the chunk are cached.
        done: whether the chunk is decoded directly to its destination.
    """

    ref: RecordRef
    key: ChunkKey
    first: int
    out: torch.Tensor
    keeps: bool = False
    done: bool = False


def _iter_parts(checkpoint: Checkpoint, fqn: str, start: int, out: torch.Tensor) -> Iterator[_ChunkPart]:
    """Yield the ranges of chunks that make up a range of a flattened tensor."""
    tensor = checkpoint.index["tensors"].get(fqn)
    if tensor is None:
        raise CorruptCheckpoint(f"'{checkpoint.directory}' has no '{fqn}', which a file beside it asks for")
    count = 0
    for offsets, shape, file, record in tensor["chunks"]:
        if not is_contiguous(tensor["shape"], shape):
            raise CorruptCheckpoint(f"'{checkpoint.directory}': '{fqn}' is not stored in flat parts")
        position, ref = flat_index(tensor["shape"], offsets), RecordRef(checkpoint.index["files"][file], record)
        first, last = max(position, start), min(position + torch.Size(shape).numel(), start + out.numel())
        if first >= last:
            continue
        count += last - first
        checkpoint.read_record(ref, fqn, tuple(offsets))
        key = ChunkKey(fqn, tuple(offsets), tuple(shape))
        yield _ChunkPart(ref, key, first - position, out[first - start : last - start])
    if count != out.numel():
        raise CorruptCheckpoint(
            f"'{checkpoint.directory}' has {count} of {out.numel()} elements of '{fqn}' that a file beside it asks for"
        )


@contextmanager
def stored_in(directory: str | os.PathLike[str], refined: bool = True) -> Iterator[None]:
    """Use the checkpoint in this directory for all files loaded in the context, whatever their paths.

    Args:
        directory: directory of the checkpoint.
        refined: use its refinement layer if it has one.
    """
    with _make_workers() as workers:
        token = _source.set(CheckpointSource(Path(directory), refined, workers))
        try:
            yield
        finally:
            _source.reset(token)


@contextmanager
def keep_codes(directory: Path, wanted: Callable[[ChunkKey], bool]) -> Iterator[dict[ChunkKey, Codes]]:
    """Cache codes of a checkpoint as they are decoded, so that they are not decoded twice.

    The caller loads the whole checkpoint, and warns itself if it has only its base layer.

    Args:
        directory: directory of the checkpoint; other checkpoints read in the context are not cached.
        wanted: returns whether the codes of a chunk are cached.

    Yields:
        The codes so far, 1 byte per element.
    """
    cache = CodeCache(directory, wanted, {}, {})
    token = _code_cache.set(cache)
    try:
        yield cache.codes
    finally:
        _code_cache.reset(token)


def _needs_codes(cache: CodeCache, checkpoint: Checkpoint, part: _ChunkPart) -> bool:
    """Return whether to cache the codes of a chunk."""
    record = checkpoint.read_record(part.ref)
    coded = record["type"] == "coded" and "residual" not in record
    return coded and cache.directory == checkpoint.directory and cache.needs_codes(part.key)


def _check_file(file: Path, checkpoint: Checkpoint) -> None:
    """Verify the checksum of a file, once.

    Raises:
        CorruptCheckpoint: the file was altered.
    """
    key = (file, checkpoint.manifest.save_id, file.stat().st_mtime_ns)
    if key in _checked_files:
        return
    for name, _, problem in checkpoint.verify([file.name]):
        if problem:
            raise CorruptCheckpoint(f"'{checkpoint.directory / name}' {problem}: altered; load another checkpoint")
    _checked_files.add(key)


def _find_loading_file() -> Path | None:
    """Return the path of the file that `torch.load` is reading, from its stack frame: unpicklers do not know it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "load" and frame.f_globals.get("__name__") == "torch.serialization":
            source = frame.f_locals.get("f")
            name = source if isinstance(source, str | os.PathLike) else getattr(source, "name", None)
            if isinstance(name, str | os.PathLike):
                return Path(os.fspath(name)).absolute()
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


class _OpenCheckpoint(NamedTuple):
    directory: Path
    state: tuple[int, int]
    checkpoint: Checkpoint


_last: _OpenCheckpoint | None = None
_lock = threading.Lock()


def _reset_after_fork() -> None:
    """Reset the state in a child process, which lacks the threads of the lock and of the open checkpoint."""
    global _last, _lock
    _last, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


def _open_checkpoint(directory: Path, save_id: str) -> Checkpoint:
    """Return the checkpoint, opened. The last one stays open, since a file has many tensors."""
    global _last
    with _lock:
        try:
            status = (directory / MANIFEST).stat()
            state = (status.st_mtime_ns, status.st_ino)
        except OSError:
            state = (0, 0)
        if _last is None or (_last.directory, _last.state) != (directory, state):
            close_last_checkpoint()
            checkpoint = Checkpoint(directory)
            cache = _code_cache.get()
            caller_warns = cache is not None and cache.directory == directory
            if checkpoint.manifest.refinement == "dropped" and not caller_warns:
                warn(
                    f"'{directory}' has only its base layer, since a newer checkpoint took over: what is loaded is "
                    "coarser than what was saved"
                )
            _last = _OpenCheckpoint(directory, state, checkpoint)
        held_id = _last.checkpoint.manifest.save_id
        if held_id != save_id:
            raise CheckpointNotFound(
                f"'{directory}' holds save {held_id}, but the file that is loaded belongs to save {save_id}: "
                "overwriting it was interrupted, or the file is from elsewhere; load another checkpoint"
            )
        return _last.checkpoint


def close_last_checkpoint() -> None:
    """Close the last checkpoint that was read."""
    global _last
    if _last is not None:
        _last.checkpoint.close()
        _last = None
