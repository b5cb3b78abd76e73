"""Files of a checkpoint: locations of records and their verified bytes, without decoding."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import xxhash

from dsq_ckpt.coding import shuffle_decompress
from dsq_ckpt.core.regular_files import unreadable_error
from dsq_ckpt.errors import CheckpointNotFound, CodingError, CorruptCheckpoint, DSQError, LoadFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.concurrent_changes import REMOVAL_TIMEOUT, read_current_checksum
from dsq_ckpt.storage.container import Block, ContainerReader, checksum_file, unpack_json
from dsq_ckpt.storage.index import check_index
from dsq_ckpt.storage.manifest import ANCESTOR_ROLES, REFINEMENT_ROLES, Manifest, ManifestFile
from dsq_ckpt.storage.pack_reader import PackReader
from dsq_ckpt.storage.packs import PackRef
from dsq_ckpt.storage.shard import RecordRef

_MAX_CHAIN = 100_000  # records of a chain
_DATA_NAME = re.compile(r"(?P<save>[0-9a-f]{16})-(?P<rank>\d{5,9})\.(?P<kind>dsq|refinement)")
_MAX_ATTEMPTS = 5  # to open a checkpoint that is overwritten meanwhile
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Files = TypeVar("_Files", bound="CheckpointFiles")


def translate_record_errors(
    method: Callable[Concatenate[_Files, RecordRef, _P], _T]
) -> Callable[Concatenate[_Files, RecordRef, _P], _T]:
    """Translate errors of a method that reads a record; see `CheckpointFiles.translate_errors`."""

    @functools.wraps(method)
    def wrapper(self: _Files, ref: RecordRef, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:  # faster than `with`, for methods that are called for each record of each chain
            return method(self, ref, *args, **kwargs)
        except BaseException as error:
            self.raise_translated(error, ref.file)
            raise

    return wrapper


class _ErrorTranslation:
    """Context that translates errors; see `CheckpointFiles.translate_errors`."""

    def __init__(self, files: CheckpointFiles, name: str) -> None:
        self._files, self._name = files, name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._files.raise_translated(error, self._name)


class CheckpointFiles(PackReader):
    """Files of a checkpoint. To open it reads the manifest and the index; data is read and checked on demand.

    Args:
        directory: directory of the checkpoint.
        lazy: read the index, whose size grows with the chunks of all ranks, only on first use.
        cached: the same checkpoint, opened before, whose index is reused if the manifest is unchanged.

    Raises:
        CheckpointNotFound, CorruptCheckpoint, UnsupportedFormat: see `Manifest.read` and `ContainerReader`.
    """

    def __init__(self, directory: Path, *, lazy: bool = False, cached: CheckpointFiles | None = None) -> None:
        super().__init__()
        self.directory = directory
        self._readers: dict[str, ContainerReader] = {}
        self._chunks: dict[str, dict[tuple[int, ...], tuple[list[int], int, int]]] = {}
        self._required: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()
        self._removal_deadline: float | None = None
        for attempt in range(_MAX_ATTEMPTS):
            self.manifest = Manifest.read(directory)
            self._sizes = {file.name: file for file in self.manifest.files}
            same = cached is not None and cached.manifest.checksum == self.manifest.checksum
            self._index: dict[str, Any] | None = cached._index if cached is not None and same else None
            try:
                if not lazy:
                    self._index = self.index
                return
            except DSQError as error:
                if attempt == _MAX_ATTEMPTS - 1 or self._read_current_checksum(error) == self.manifest.checksum:
                    raise

    def __enter__(self: _Files) -> _Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._kept.clear()

    @property
    def index(self) -> dict[str, Any]:
        """Parsed index.

        Raises:
            CorruptCheckpoint: the index is altered, or not as documented.
        """
        if self._index is None:
            self._index = self._read_index()
        return self._index

    def names_file(self, name: str) -> bool:
        return name in self._sizes

    @property
    def has_refinement(self) -> bool:
        return self.manifest.refinement == "kept"

    def iter_chunks(self) -> Iterator[tuple[ChunkKey, RecordRef]]:
        """Yield all chunks of all tensors."""
        for fqn, tensor in self.index["tensors"].items():
            for offsets, shape, file, record in tensor["chunks"]:
                yield ChunkKey(fqn, tuple(offsets), tuple(shape)), self._to_ref(file, record)

    def find_record(self, fqn: str, offsets: tuple[int, ...] | None) -> RecordRef:
        """Return the record of a chunk or, with offsets None, of an object.

        Raises:
            CheckpointNotFound: there is no such tensor or chunk.
            CorruptCheckpoint: the record does not match the index.
        """
        if offsets is None:
            entry = self.index["objects"].get(fqn)
        else:
            record = self._index_chunks(fqn).get(offsets)
            entry = None if record is None else record[1:]
        if entry is None:
            raise CheckpointNotFound(f"'{self.directory}' has no '{fqn}' at {offsets}")
        ref = self._to_ref(*entry)
        self.read_record(ref, fqn, offsets)
        return ref

    def find_chunk(self, key: ChunkKey, refs: Mapping[ChunkKey, RecordRef]) -> RecordRef | None:
        """Return the record of the chunk at the offsets of `key`, perhaps of another shape; None if there is none.

        Args:
            key: the chunk.
            refs: known records; for other chunks the index is read.
        """
        ref = refs.get(key)
        if ref is not None:
            record = self.read_record(ref)
            with self.translate_errors(ref.file):
                if (record["fqn"], tuple(record["offsets"]), tuple(record["shape"])) == key:
                    return ref
        try:
            return self.find_record(key.fqn, key.offsets)
        except CheckpointNotFound:
            return None

    def _index_chunks(self, fqn: str) -> dict[tuple[int, ...], tuple[list[int], int, int]]:
        """Return shape, file and record of chunks by offsets; of several with the same offsets, the non-empty one."""
        if fqn not in self._chunks:
            chunks = self.index["tensors"].get(fqn, {"chunks": []})["chunks"]
            self._chunks[fqn] = {
                tuple(offsets): (shape, file, record)
                for offsets, shape, file, record in sorted(chunks, key=lambda chunk: 0 not in chunk[1])
            }
        return self._chunks[fqn]

    @translate_record_errors
    def read_record(
        self, ref: RecordRef, fqn: str | None = None, offsets: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """Return a record of a data file's table of contents; with `fqn`, check that it matches the index."""
        records = self.open_reader(ref.file).contents["records"]
        if not 0 <= ref.record < len(records):
            raise CorruptCheckpoint(f"it has {len(records)} records, record {ref.record} is asked for")
        record: dict[str, Any] = records[ref.record]
        if fqn is not None:
            self._check_record(ref, record, fqn, offsets)
        return record

    def _check_record(self, ref: RecordRef, record: dict[str, Any], fqn: str, offsets: tuple[int, ...] | None) -> None:
        """Raise CorruptCheckpoint if a record does not match the index."""
        tied = self.index.get("tied") or {}
        expected: dict[str, Any] = {"fqn": fqn}
        if tied.get(fqn, fqn) == tied.get(record["fqn"], record["fqn"]):  # tied on this rank, perhaps not on another
            expected["fqn"] = record["fqn"]
        if offsets is not None:
            tensor, chunk = self.index["tensors"][fqn], self._index_chunks(fqn)[offsets]
            expected |= {"offsets": list(offsets), "shape": chunk[0], "dtype": tensor["dtype"]}
        actual = {key: record[key] for key in expected}
        if actual != expected or (record["type"] == "bytes") != (offsets is None):
            raise CorruptCheckpoint(
                f"record {ref.record} is {record['type']} {actual}, the index {self.manifest.index.name} "
                f"says {expected}"
            )

    def required_files(self, file: str) -> frozenset[str]:
        """Return the names of all files needed to decode a file, itself included."""
        if (cached := self._required.get(file)) is not None:
            return cached
        with self.translate_errors(file):
            names = self.open_reader(file).contents["requires"]
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise CorruptCheckpoint(f"it requires {str(names)[:200]}; expected a list of file names")
            self._required[file] = frozenset([file, *names])
            return self._required[file]

    @translate_record_errors
    def follow_chain(self, ref: RecordRef, key: str, types: tuple[str, ...]) -> list[RecordRef]:
        """Return a record and its ancestors by the field `key`, newest first.

        Raises:
            CorruptCheckpoint: the chain never ends, or a record has another shape or type.
        """
        chain: dict[RecordRef, None] = {}
        link: RecordRef | None = ref
        shape = self.read_record(ref).get("shape")
        while link is not None:
            if link in chain or len(chain) > _MAX_CHAIN:
                raise CorruptCheckpoint(f"'{self.directory / link.file}' record {link.record}: the chain never ends")
            record = self.read_record(link)
            if record["type"] not in types or record["shape"] != shape:
                raise CorruptCheckpoint(
                    f"'{self.directory / link.file}' record {link.record} does not fit its chain: {record['type']}"
                )
            chain[link] = None
            older = record.get(key)
            link = None if older is None else RecordRef(str(older[0]), int(older[1]))
        return list(chain)

    @translate_record_errors
    def read_object(self, ref: RecordRef) -> bytes:
        """Return the bytes of an object that DCP serialized."""
        return self._read_raw(ref.file, self.read_record(ref))

    def verify(self, names: Collection[str] | None = None) -> Iterator[tuple[str, int, str | None]]:
        """Check size and checksum of all files, or of `names`; yield (name, bytes, problem or None)."""
        for file in self.manifest.files:
            skipped = file.role in REFINEMENT_ROLES and not self.has_refinement
            if skipped or (names is not None and file.name not in names):
                continue
            problem = None
            try:
                size, checksum = checksum_file(file.path_in(self.directory))
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
            else:
                if size != file.size:
                    problem = f"has {size} bytes, expected {file.size}"
                elif checksum != file.checksum:
                    problem = f"has checksum {checksum}, expected {file.checksum}"
            yield file.name, file.size, problem

    def translate_errors(self, name: str = "") -> _ErrorTranslation:
        """Return a context that translates errors of reading a file of the checkpoint; see `raise_translated`."""
        return _ErrorTranslation(self, name)

    def raise_translated(self, error: BaseException, name: str) -> None:
        """Raise an error of reading as a DSQError that names a file of the checkpoint. Return for any other error.

        Contents that pass their checksums may still not be as documented. If the checkpoint was overwritten or removed
        meanwhile, its files are not corrupt, and the error asks to load it again.

        Raises:
            LoadFailed: the checkpoint was overwritten or removed, or there is not enough memory.
            CorruptCheckpoint: the contents are not as documented.
        """
        path = self.directory / name
        if isinstance(error, MemoryError):
            raise LoadFailed(f"'{path}': not enough memory for what it says it holds: {error}") from error
        if not isinstance(error, (DSQError, *_MALFORMED)):
            return
        unchanged = (None, self.manifest.checksum)
        if not isinstance(error, LoadFailed) and self._read_current_checksum(error) not in unchanged:
            raise LoadFailed(f"'{self.directory}' was overwritten or removed while it was read; load again") from error
        if isinstance(error, CodingError):
            raise CorruptCheckpoint(f"'{path}': {error}") from error
        if isinstance(error, DSQError):
            if str(self.directory) not in str(error):
                raise type(error)(f"'{path}': {error}") from error
            return
        raise CorruptCheckpoint(
            f"'{path}': the contents are not as documented ({error!r}); was it made by dsq_ckpt?"
        ) from error

    def _read_current_checksum(self, error: BaseException) -> str | None:
        """Return the checksum of the manifest now in the directory after an error; see `read_current_checksum`."""
        if not isinstance(error.__cause__, FileNotFoundError):
            return read_current_checksum(self.directory, self.manifest)
        # Wait once, since all methods that the error passes translate it.
        self._removal_deadline = self._removal_deadline or time.monotonic() + REMOVAL_TIMEOUT
        return read_current_checksum(self.directory, self.manifest, self._removal_deadline)

    def read_index_bytes(self) -> bytes:
        """Return the bytes of the index.

        Raises:
            CorruptCheckpoint: they do not have the size and checksum of the manifest.
        """
        info = self.manifest.index
        path = self.directory / info.name
        try:
            data = get_storage(path).read(path, info.size)
        except OSError as error:
            raise unreadable_error(path, error) from error
        if len(data) != info.size or xxhash.xxh3_64_hexdigest(data) != info.checksum:
            raise CorruptCheckpoint(f"'{path}' is not what was written: {len(data)} bytes, expected {info.size}")
        return data

    def _read_index(self) -> dict[str, Any]:
        path = self.directory / self.manifest.index.name
        index: dict[str, Any] = unpack_json(self.read_index_bytes(), f"'{path}'")
        check_index(index, f"'{path}'", {file.name for file in self.manifest.files if file.role == "own"})
        return {**index, "planner": index["planner"] or None}

    def _to_ref(self, file: int, record: int) -> RecordRef:
        return RecordRef(self.index["files"][file], record)

    def open_reader(self, name: str) -> ContainerReader:
        """Return the reader of a data file, opened on first use.

        Raises:
            CorruptCheckpoint: the manifest does not list the file, or the file does not match the manifest.
        """
        with self._lock:
            if name not in self._readers:
                if name not in self._sizes:
                    raise CorruptCheckpoint(f"'{self.directory}': a record needs '{name}', which no manifest names")
                reader = ContainerReader(self._sizes[name].path_in(self.directory), self._sizes[name].size)
                try:
                    self._check_reader(reader, self._sizes[name])
                except BaseException:
                    reader.close()
                    raise
                self._readers[name] = reader
            return self._readers[name]

    def _check_reader(self, reader: ContainerReader, file: ManifestFile) -> None:
        """Raise CorruptCheckpoint if a data file is not the one that the manifest lists under its name."""
        name, contents = _DATA_NAME.fullmatch(file.name), reader.contents
        if name is None:
            raise CorruptCheckpoint(f"'{reader.path}' does not have the name of a data file")
        expected: dict[str, Any] = {"save": name["save"], "rank": int(name["rank"])}
        if name["kind"] == "refinement":
            expected["base"] = f"{name['save']}-{name['rank']}.dsq"
        actual = {key: contents.get(key) for key in expected}
        if actual != expected:
            raise CorruptCheckpoint(f"'{reader.path}' is another file: it holds {actual}, expected {expected}")
        if (file.role not in ANCESTOR_ROLES) != (name["save"] == self.manifest.save_id):
            raise CorruptCheckpoint(f"'{reader.path}' is not of the save {self.manifest.save_id}, as its manifest says")
        if file.contents not in (None, reader.checksum):
            raise CorruptCheckpoint(
                f"'{reader.path}' is another file: its contents have checksum {reader.checksum}, expected "
                f"{file.contents}; restore it or load another checkpoint"
            )

    def _read_raw(self, file: str, record: dict[str, Any]) -> bytes:
        size, packs = record["size"], record["packs"]
        if type(size) is not int:
            raise CorruptCheckpoint(f"'{record['fqn']}' has {size!r} bytes")
        if "at" not in record:
            if (total := sum(self.pack_size(PackRef(file, number)) for number in packs)) != size:
                raise CorruptCheckpoint(f"'{record['fqn']}': {total} bytes stored, {size} promised")
            return b"".join(self.read_pack(PackRef(file, number)) for number in packs)
        start = record["at"]
        if type(start) is not int or len(packs) != 1 or start < 0 or size < 0:
            raise CorruptCheckpoint(f"'{record['fqn']}': {size} bytes at {start} of {len(packs)} packs")
        piece = self.read_pack(PackRef(file, packs[0]), keep=True)[start : start + size]
        if len(piece) != size:
            raise CorruptCheckpoint(f"'{record['fqn']}': bytes {start} to {start + size} are not in its pack")
        return piece

    def _read_unshuffled(self, file: str, block: Block, itemsize: int, size: int) -> bytes:
        with self.translate_errors(file):
            return shuffle_decompress(self.open_reader(file).read(block), itemsize, size)


_MALFORMED = (
    KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, ZeroDivisionError, RecursionError
)
"""Errors raised by contents that are not as documented."""
