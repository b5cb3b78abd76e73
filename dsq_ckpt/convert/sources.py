"""Checkpoints that others wrote, opened: safetensors, `torch.save`, plain DCP directories, and our own.

What a source holds is known when it is open; values are read when they are asked for, so that a rank reads what it
compresses and no more. Files are mapped where their format allows it. Nothing is unpickled, with one exception: torch
reads the metadata and the objects of a plain DCP directory by unpickling, which can run code of whoever wrote it.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dsq_ckpt.convert import export
from dsq_ckpt.convert.mapped_files import (
    INDEX,
    SAFETENSORS,
    UNDERSTOOD,
    State,
    safetensors_state,
    shards_of,
    torch_state,
)
from dsq_ckpt.core.nesting import Nesting, restore_parameter_numbers
from dsq_ckpt.core.urls import is_url
from dsq_ckpt.distributed.job import get_job_rank
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, LoadFailed, described
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.attachments import refuse_without_tensors, warn_about_attachments
from dsq_ckpt.storage.manifest import Manifest, is_complete, iter_checkpoints
from dsq_ckpt.storage.other_formats import describe_other_format
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.record_fields import parse_dtype

Values = dict[ChunkKey, torch.Tensor]

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


class Stored(NamedTuple):
    """A tensor of a source.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of the tensor.
        chunks: offsets and shapes of the parts in which it is stored.
        memory: equal for tensors that share all of their memory; None: it shares none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    memory: Any = None


class Source(Protocol):
    """A checkpoint that is open.

    Attributes:
        tensors: by flat name, in the order of the state dict.
        nesting: by which the state dict is put together.
        mapped: parts of a chunk can be read without the rest of it.
    """

    tensors: dict[str, Stored]
    nesting: Nesting
    mapped: bool

    def read(self, keys: Iterable[ChunkKey]) -> Values:
        """Read chunks of tensors, on the CPU if they are in a file; for mapped sources also parts of chunks.

        Raises:
            CorruptCheckpoint: a file is damaged.
        """

    def objects(self) -> State:
        """Return the values that are no tensors, by flat name.

        Raises:
            LoadFailed: it is more than plain data.
        """

    def close(self) -> None:
        """Close its files; what was read stays."""


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint that somebody wrote.

    Args:
        path: a `.safetensors` file; the index of several (`*.safetensors.index.json`) or a directory with them; a
            `torch.save` file; a plain DCP directory, to be trusted (see above); or a dsq_ckpt checkpoint, with its
            refinement layer where that was kept.

    Raises:
        CheckpointNotFound: nothing is there, or nothing that is understood.
        CorruptCheckpoint: a file is damaged, or is not what its name says.
        LoadFailed: a file cannot be opened, holds more than plain data, or is no state dict, `safetensors` is not
            installed, or all tensors of a tag of DeepSpeed are in DeepSpeed's own files.
    """
    if is_url(path):
        raise ConfigError(
            f"source {str(path)!r}: expected a file or directory of the local file system; download it first"
        )
    path = expand_path(path)
    try:
        if path.is_dir():
            return _directory(path)
        if not path.is_file():
            raise CheckpointNotFound(f"'{path}' does not exist; name {UNDERSTOOD}")
        if path.name.endswith(SAFETENSORS):
            return InMemory(safetensors_state([(path, None)]))
        if path.suffix == ".json":
            return InMemory(safetensors_state(shards_of(path)))
        return InMemory(torch_state(path))
    except OSError as error:
        if isinstance(error, CheckpointNotFound):
            raise
        raise LoadFailed(f"'{error.filename or path}' cannot be read: {error.strerror or error}") from error


def whole_state(source: Source) -> State:
    """Return the whole state dict of a source, in memory, as whole tensors."""
    if isinstance(source, InMemory):
        return source.state
    values = source.read(
        ChunkKey(name, *chunk) for name, stored in source.tensors.items() for chunk in stored.chunks
    )
    flat = source.objects()
    for name, stored in source.tensors.items():
        parts = [(offsets, shape, values.pop(ChunkKey(name, offsets, shape))) for offsets, shape in stored.chunks]
        if len(parts) == 1:
            flat[name] = parts[0][2]
            continue
        flat[name] = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        for offsets, shape, part in parts:
            flat[name][tuple(slice(start, start + n) for start, n in zip(offsets, shape, strict=True))] = part
    root = source.nesting.unflatten({name: flat[name] for name in source.nesting if name in flat})
    restore_parameter_numbers(root, {id(root)})
    return root


class InMemory:
    """A state dict, in memory or in mapped files."""

    mapped = True

    def __init__(self, state: State) -> None:
        self.state = state
        self._flat, paths = flatten_state_dict(state)
        self.nesting = Nesting.of(state, paths)
        self.tensors = {
            name: Stored(tuple(value.shape), value.dtype, (_all_of(value.shape),), _memory(value))
            for name, value in self._flat.items() if isinstance(value, torch.Tensor)
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        value: torch.Tensor = self._flat[name]
        return value

    def read(self, keys: Iterable[ChunkKey]) -> Values:
        values = {}
        for key in keys:
            whole = self.tensor(key.fqn).detach()
            values[key] = whole if key.shape == tuple(whole.shape) else whole[
                tuple(slice(start, start + length) for start, length in zip(key.offsets, key.shape, strict=True))
            ]
        return values

    def objects(self) -> State:
        return {name: value for name, value in self._flat.items() if name not in self.tensors}

    def close(self) -> None:
        """Do nothing: only mappings are open."""


def _all_of(shape: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and shape of the only chunk of a tensor."""
    shape = tuple(shape)
    return (0,) * len(shape), shape


def _memory(value: torch.Tensor) -> Any:
    ordinary = type(value) in (torch.Tensor, torch.nn.Parameter)  # others may hold their values elsewhere
    if not ordinary or value.is_meta or value.layout is not torch.strided or not value.numel():
        return None
    return value.device, value.data_ptr(), value.stride(), value.dtype, value.shape


class _Own:
    """A checkpoint of ours."""

    mapped = False

    def __init__(self, path: Path) -> None:
        self._opened = export.Opened(path, "auto", None)
        try:
            refuse_without_tensors(self._opened.checkpoint, "compressed", LoadFailed)
            warn_about_attachments(self._opened.checkpoint, "compressed", get_job_rank())
        except BaseException:
            self._opened.close()
            raise
        with self._opened.checkpoint.translate_errors():
            self.tensors = _covered(path, {
                name: Stored(tuple(tensor["shape"]), parse_dtype(tensor["dtype"]), tuple(
                    (tuple(offsets), tuple(shape)) for offsets, shape, _, _ in tensor["chunks"]
                )) for name, tensor in self._opened.tensors.items()
            })
        paths = self._opened.paths
        self.nesting = Nesting({name: (name,) for name in self._opened.order()}) if paths is None else paths

    def read(self, keys: Iterable[ChunkKey]) -> Values:
        return {key: self._opened.chunk(key.fqn, key.offsets) for key in keys}

    def objects(self) -> State:
        try:
            return {name: self._opened.object(name, allow_pickle=False) for name in self._opened.objects}
        except export.ExportError as error:
            raise LoadFailed(
                f"{error.args[0].partition(';')[0]}, and nothing is unpickled here; where you trust it, load it with "
                "dsq_ckpt.load and compress the state dict"
            ) from error

    def close(self) -> None:
        self._opened.close()


class _DCP:
    """A plain DCP directory, by torch's own reader."""

    mapped = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[MetadataIndex, Any] = {}
        with self._readable(".metadata"):
            self._reader = dcp.FileSystemReader(path)
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, True)
            self._parts.update(metadata.storage_data)
            held, paths = metadata.state_dict_metadata, metadata.planner_data
            self.tensors = _covered(path, {
                name: Stored(tuple(entry.size), entry.properties.dtype, tuple(
                    (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks
                )) for name, entry in held.items() if isinstance(entry, TensorStorageMetadata)
            })
            known = paths if isinstance(paths, dict) else {}
            self.nesting = Nesting({name: known.get(name, (name,)) for name in held}, empty=())

    def read(self, keys: Iterable[ChunkKey]) -> Values:
        values = {key: torch.empty(key.shape, dtype=self.tensors[key.fqn].dtype, device="cpu") for key in keys}
        wanted = {MetadataIndex(key.fqn, torch.Size(key.offsets)): key for key in values if key.elements}
        self._load(
            [_item(LoadItemType.TENSOR, index, key.shape) for index, key in wanted.items()],
            _Planner({index: values[key] for index, key in wanted.items()}),
        )
        return values

    def objects(self) -> State:
        names = [name for name in self.nesting if name not in self.tensors]
        planner = _Planner({})
        self._load([_item(LoadItemType.BYTE_IO, MetadataIndex(name), (0,)) for name in names], planner)
        return planner.objects

    def close(self) -> None:
        """Close nothing: files are open only while they are read."""

    def _load(self, items: list[ReadItem], planner: _Planner) -> None:
        by_file: dict[str, list[ReadItem]] = {}
        with self._readable(".metadata"):
            for item in items:
                by_file.setdefault(self._parts[item.storage_index].relative_path, []).append(item)
        for name, held in by_file.items():  # one at a time, so that an error names the file
            with self._readable(name):
                self._reader.read_data(self._reader.prepare_local_plan(LoadPlan(held)), planner).wait()

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except CorruptCheckpoint:
            raise
        except Exception as error:
            raise CorruptCheckpoint(
                f"'{self._path}' cannot be read as a plain DCP checkpoint: '{name}'{self._wrong(name, error)}"
            ) from error

    def _wrong(self, name: str, error: Exception) -> str:
        """Return what is wrong with a file; of one that was cut short torch tells what its zip reader met."""
        if isinstance(error, OSError):
            return " is missing" if isinstance(error, FileNotFoundError) else f": {error.strerror}"
        size = (self._path / name).stat().st_size
        end = max((part.offset + part.length for part in self._parts.values() if part.relative_path == name), default=0)
        if size < end:
            return f" was cut short: it has {size} of {end} bytes"
        return f": {described(error).splitlines()[0].partition('. ')[0]}"


class _Planner(DefaultLoadPlanner):
    """Tells DCP's reader where chunks go, and takes objects."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.objects: State = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._targets[read_item.dest_index]


def _item(kind: LoadItemType, index: MetadataIndex, shape: tuple[int, ...]) -> ReadItem:
    """Return a whole chunk, or an object."""
    offsets = torch.Size([0] * len(shape))
    return ReadItem(kind, index, offsets, index, offsets, torch.Size(shape))


def _covered(path: Path, tensors: dict[str, Stored]) -> dict[str, Stored]:
    for name, stored in tensors.items():
        filled = sum(math.prod(shape) for _, shape in stored.chunks)
        if filled != math.prod(stored.shape):
            raise CorruptCheckpoint(
                f"'{path}': chunks of '{name}' hold {filled} of {math.prod(stored.shape)} elements"
            )
    return tensors


def _directory(path: Path) -> Source:
    if is_complete(path):
        return _Own(path)
    if (path / ".metadata").is_file():
        return _DCP(path)
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    indexes = [name for name in names if name.endswith(INDEX)]
    if f"model{INDEX}" in indexes:  # as on the hub; others beside it are variants of it
        indexes = [f"model{INDEX}"]
    if len(indexes) > 1:
        raise CheckpointNotFound(f"'{path}' holds several indexes: {', '.join(indexes)}; name one of them")
    if indexes:
        return InMemory(safetensors_state(shards_of(path / indexes[0])))
    shards = [name for name in names if name.endswith(SAFETENSORS)]
    if shards:
        return InMemory(safetensors_state([(path / name, None) for name in shards]))
    if next(iter_checkpoints(path, lambda *_: None), None) is not None:
        Manifest.read(path)  # raises: it is a run, and which is its newest checkpoint
    if other := describe_other_format(path):
        raise CheckpointNotFound(f"'{path}' {other}")
    pickled = [name for name in names if name.endswith(_TORCH_SUFFIXES)]
    found = f"; it holds {', '.join(pickled[:3])}: name the file" if pickled else ""
    raise CheckpointNotFound(f"'{path}' is not {UNDERSTOOD}{found}")
