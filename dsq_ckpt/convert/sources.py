"""Readers of checkpoints to compress: safetensors, `torch.save`, plain DCP directories, and dsq_ckpt checkpoints.

An open source has the names and shapes of its tensors. Values are read on access, so a rank reads only what it
compresses. Files are memory-mapped if their format allows it. Nothing is unpickled, with one exception: torch unpickles
the metadata and the objects of a plain DCP directory, which can run code of whoever wrote it.
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
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dsq_ckpt.convert import export
from dsq_ckpt.convert.mapped_files import (
    INDEX,
    SAFETENSORS,
    SUPPORTED_SOURCES,
    State,
    open_safetensors,
    open_torch_file,
    read_safetensors_index,
)
from dsq_ckpt.core.flat_names import flatten
from dsq_ckpt.core.nesting import Nesting, restore_parameter_numbers
from dsq_ckpt.core.tensor_subclasses import to_storable
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


class StoredTensor(NamedTuple):
    """A tensor of a source.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of the tensor.
        chunks: offsets and shapes of the parts in which it is stored.
        memory: key that is equal for tensors with the same memory; None: the tensor shares no memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    memory: Any = None


class Source(Protocol):
    """An open checkpoint.

    Attributes:
        tensors: tensors by flat name, in the order of the state dict.
        nesting: nesting of the state dict.
        mapped: parts of a chunk can be read without the rest of it.
    """

    tensors: dict[str, StoredTensor]
    nesting: Nesting
    mapped: bool

    def read(self, keys: Iterable[ChunkKey]) -> Values:
        """Read chunks of tensors, to the CPU if they are in a file; for mapped sources also parts of chunks.

        Raises:
            CorruptCheckpoint: a file is damaged.
        """

    def objects(self) -> State:
        """Return the values that are not tensors, by flat name.

        Raises:
            LoadFailed: a value is more than plain data.
        """

    def close(self) -> None:
        """Close its files; values that were read stay valid."""


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint.

    Args:
        path: a `.safetensors` file; the index of several (`*.safetensors.index.json`) or a directory with them; a
            `torch.save` file; a plain DCP directory, which must be trusted (see above); or a dsq_ckpt checkpoint, with
            its refinement layer if that was kept.

    Raises:
        CheckpointNotFound: there is no file or directory, or none of a supported format.
        CorruptCheckpoint: a file is damaged, or does not have the format of its suffix.
        LoadFailed: a file cannot be opened, holds more than plain data, or is not a state dict; `safetensors` is not
            installed; or all tensors of a tag of DeepSpeed are in DeepSpeed's own files.
    """
    if is_url(path):
        raise ConfigError(
            f"source {str(path)!r}: expected a file or directory of the local file system; download it first"
        )
    path = expand_path(path)
    try:
        if path.is_dir():
            return _open_directory(path)
        if not path.is_file():
            raise CheckpointNotFound(f"'{path}' does not exist; name {SUPPORTED_SOURCES}")
        if path.name.endswith(SAFETENSORS):
            return InMemory(open_safetensors([(path, None)]))
        if path.suffix == ".json":
            return InMemory(open_safetensors(read_safetensors_index(path)))
        return InMemory(open_torch_file(path))
    except OSError as error:
        if isinstance(error, CheckpointNotFound):
            raise
        raise LoadFailed(f"'{error.filename or path}' cannot be read: {error.strerror or error}") from error


def read_state_dict(source: Source) -> State:
    """Return the nested state dict of a source, with whole tensors in memory."""
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
        for offsets, shape, tensor in parts:
            flat[name][tuple(slice(start, start + n) for start, n in zip(offsets, shape, strict=True))] = tensor
    root = source.nesting.unflatten({name: flat[name] for name in source.nesting if name in flat})
    restore_parameter_numbers(root, {id(root)})
    return root


class InMemory:
    """A state dict in memory or in memory-mapped files.

    Raises:
        SaveFailed: a tensor cannot be stored; the message names it.
    """

    mapped = True

    def __init__(self, state: State) -> None:
        self.state = to_storable(state)
        self._flat, paths = flatten(self.state)
        self.nesting = Nesting.of(self.state, paths)
        self.tensors = {
            name: StoredTensor(tuple(value.shape), value.dtype, (_whole_chunk(value.shape),), _memory_key(value))
            for name, value in self._flat.items() if isinstance(value, torch.Tensor)
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        value: torch.Tensor = self._flat[name]
        return value

    def read(self, keys: Iterable[ChunkKey]) -> Values:
        values = {}
        for key in keys:
            source = self.tensor(key.fqn).detach()
            values[key] = source if key.shape == tuple(source.shape) else source[
                tuple(slice(start, start + length) for start, length in zip(key.offsets, key.shape, strict=True))
            ]
        return values

    def objects(self) -> State:
        return {name: value for name, value in self._flat.items() if name not in self.tensors}

    def close(self) -> None:
        """Do nothing: mappings have no open files."""
def _whole_chunk(shape: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and shape of the chunk that is a whole tensor."""
    shape = tuple(shape)
    return (0,) * len(shape), shape


def _memory_key(value: torch.Tensor) -> Any:
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)  # subclasses may have their values elsewhere
    if not is_plain or value.is_meta or value.layout is not torch.strided or not value.numel():
        return None
    return value.device, value.data_ptr(), value.stride(), value.dtype, value.shape


class _DSQSource:
    """A dsq_ckpt checkpoint."""

    mapped = False

    def __init__(self, path: Path) -> None:
        self._opened = export.OpenedCheckpoint(path, "auto", None)
        try:
            refuse_without_tensors(self._opened.checkpoint, "compressed", LoadFailed)
            warn_about_attachments(self._opened.checkpoint, "compressed", get_job_rank())
        except BaseException:
            self._opened.close()
            raise
        with self._opened.checkpoint.translate_errors():
            self.tensors = _check_coverage(path, {
                name: StoredTensor(tuple(tensor["shape"]), parse_dtype(tensor["dtype"]), tuple(
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


class _DCPSource:
    """A plain DCP directory, read by torch's own reader."""

    mapped = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[MetadataIndex, Any] = {}
        with self._translate_errors(".metadata"):
            self._reader = dcp.FileSystemReader(path)
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, True)
            self._parts.update(metadata.storage_data)
            entries, paths = metadata.state_dict_metadata, metadata.planner_data
            self.tensors = _check_coverage(path, {
                name: StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(
                    (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks
                )) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
            })
            paths_by_name = paths if isinstance(paths, dict) else {}
            self.nesting = Nesting({name: paths_by_name.get(name, (name,)) for name in entries}, empty=())

    def read(self, keys: Iterable[ChunkKey]) -> Values:
        values = {key: torch.empty(key.shape, dtype=self.tensors[key.fqn].dtype, device="cpu") for key in keys}
        requested = {MetadataIndex(key.fqn, torch.Size(key.offsets)): key for key in values if key.elements}
        self._load(
            [_read_item(LoadItemType.TENSOR, index, key.shape) for index, key in requested.items()],
            _ChunkPlanner({index: values[key] for index, key in requested.items()}),
        )
        return values

    def objects(self) -> State:
        names = [name for name in self.nesting if name not in self.tensors]
        planner = _ChunkPlanner({})
        self._load([_read_item(LoadItemType.BYTE_IO, MetadataIndex(name), (0,)) for name in names], planner)
        return planner.objects

    def close(self) -> None:
        """Do nothing: files are open only during reads."""

    def _load(self, items: list[ReadItem], planner: _ChunkPlanner) -> None:
        by_file: dict[str, list[ReadItem]] = {}
        with self._translate_errors(".metadata"):
            for item in items:
                by_file.setdefault(self._parts[item.storage_index].relative_path, []).append(item)
        for name, refs in by_file.items():  # one at a time, so that an error names the file
            with self._translate_errors(name):
                self._reader.read_data(self._reader.prepare_local_plan(LoadPlan(refs)), planner).wait()

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except CorruptCheckpoint:
            raise
        except Exception as error:
            raise CorruptCheckpoint(
                f"'{self._path}' cannot be read as a plain DCP checkpoint: '{name}'{self._describe_error(name, error)}"
            ) from error

    def _describe_error(self, name: str, error: Exception) -> str:
        """Return the problem of a file; for a truncated one, torch reports an error of its zip reader."""
        if isinstance(error, OSError):
            return " is missing" if isinstance(error, FileNotFoundError) else f": {error.strerror}"
        size = (self._path / name).stat().st_size
        end = max((part.offset + part.length for part in self._parts.values() if part.relative_path == name), default=0)
        if size < end:
            return f" was cut short: it has {size} of {end} bytes"
        return f": {described(error).splitlines()[0].partition('. ')[0]}"


class _ChunkPlanner(DefaultLoadPlanner):
    """A planner that reads chunks into given tensors, and collects objects."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.objects: State = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._targets[read_item.dest_index]


def _read_item(kind: LoadItemType, index: MetadataIndex, shape: tuple[int, ...]) -> ReadItem:
    """Return the read item of a whole chunk, or of an object."""
    offsets = torch.Size([0] * len(shape))
    return ReadItem(kind, index, offsets, index, offsets, torch.Size(shape))


def _check_coverage(path: Path, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return `tensors` after checking that chunks cover each of them.

    Raises:
        CorruptCheckpoint: they do not.
    """
    for name, stored in tensors.items():
        filled = sum(math.prod(shape) for _, shape in stored.chunks)
        if filled != math.prod(stored.shape):
            raise CorruptCheckpoint(
                f"'{path}': chunks of '{name}' hold {filled} of {math.prod(stored.shape)} elements"
            )
    return tensors


def _open_directory(path: Path) -> Source:
    if is_complete(path):
        return _DSQSource(path)
    if (path / ".metadata").is_file():
        return _DCPSource(path)
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    indexes = [name for name in names if name.endswith(INDEX)]
    if f"model{INDEX}" in indexes:  # the name on the Hugging Face hub; the others are variants
        indexes = [f"model{INDEX}"]
    if len(indexes) > 1:
        raise CheckpointNotFound(f"'{path}' holds several indexes: {', '.join(indexes)}; name one of them")
    if indexes:
        return InMemory(open_safetensors(read_safetensors_index(path / indexes[0])))
    shards = [name for name in names if name.endswith(SAFETENSORS)]
    if shards:
        return InMemory(open_safetensors([(path / name, None) for name in shards]))
    if next(iter_checkpoints(path, lambda *_: None), None) is not None:
        Manifest.read(path)  # raises an error that names the run's newest checkpoint
    if other_format := describe_other_format(path):
        raise CheckpointNotFound(f"'{path}' {other_format}")
    pickled = [name for name in names if name.endswith(_TORCH_SUFFIXES)]
    hint = f"; it holds {', '.join(pickled[:3])}: name the file" if pickled else ""
    raise CheckpointNotFound(f"'{path}' is not {SUPPORTED_SOURCES}{hint}")
