"""The files of a checkpoint directory: which record lies where, and its bytes, checked; no codes, no values."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import xxhash

from dsq_ckpt.chunk import ChunkKey
from dsq_ckpt.coding import shuffle_decompress
from dsq_ckpt.container import Block, ContainerReader, file_checksum, unpack_json
from dsq_ckpt.errors import CheckpointNotFound, CodingError, CorruptCheckpoint
from dsq_ckpt.manifest import Manifest
from dsq_ckpt.shard import RecordRef

_LONGEST = 100_000  # records of a chain
_Files = TypeVar("_Files", bound="CheckpointFiles")


class CheckpointFiles:
    """A checkpoint directory. Opening reads manifest and index; data is read, and checked, on demand.

    Raises:
        CheckpointNotFound, CorruptCheckpoint, UnsupportedFormat: see `Manifest.read` and `ContainerReader`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = Manifest.read(directory)
        self._sizes = {file.name: file for file in self.manifest.files}
        self._readers: dict[str, ContainerReader] = {}
        self._packs: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()
        self.index = self._read_index()

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
        self._packs.clear()

    @property
    def has_refinement(self) -> bool:
        return self.manifest.refinement == "kept"

    def chunks(self) -> Iterator[tuple[ChunkKey, RecordRef]]:
        """Every stored chunk of every tensor."""
        for fqn, tensor in self.index["tensors"].items():
            for offsets, shape, file, record in tensor["chunks"]:
                yield ChunkKey(fqn, tuple(offsets), tuple(shape)), self._ref(file, record)

    def find(self, fqn: str, offsets: tuple[int, ...] | None) -> RecordRef:
        """Where a chunk (or, with offsets None, an object) lies.

        Raises:
            CheckpointNotFound: there is no such tensor or chunk.
            CorruptCheckpoint: its record is not the one the index speaks of.
        """
        if offsets is None:
            places = [self.index["objects"].get(fqn)]
        else:
            chunks = self.index["tensors"].get(fqn, {"chunks": []})["chunks"]
            places = [chunk[2:] for chunk in chunks if tuple(chunk[0]) == offsets]
        if not places or places[0] is None:
            raise CheckpointNotFound(f"'{self.directory}' has no '{fqn}' at {offsets}")
        ref = self._ref(*places[0])
        self.record(ref, fqn, offsets)
        return ref

    def record(
        self, ref: RecordRef, fqn: str | None = None, offsets: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """A record of a data file, as its table of contents says; with `fqn`, checked to be the one the index means."""
        records = self.reader(ref.file).contents["records"]
        if not 0 <= ref.record < len(records):
            raise CorruptCheckpoint(f"'{ref.file}' has {len(records)} records, record {ref.record} is asked for")
        record: dict[str, Any] = records[ref.record]
        fqn = None if fqn is None else self.index.get("tied", {}).get(fqn, fqn)
        found = (record["fqn"], None if record["type"] == "bytes" else tuple(record["offsets"]))
        if fqn is not None and found != (fqn, offsets):
            raise CorruptCheckpoint(f"'{ref.file}' record {ref.record} is {found}, the index says {(fqn, offsets)}")
        return record

    def requires(self, file: str) -> frozenset[str]:
        """All files that decoding a file needs, itself included."""
        return frozenset([file, *self.reader(file).contents["requires"]])

    def chain(self, ref: RecordRef, key: str, types: tuple[str, ...]) -> list[RecordRef]:
        """A record and those that `key` leads to from it, newest first.

        Raises:
            CorruptCheckpoint: they never end, or one is of another shape or type.
        """
        chain: dict[RecordRef, None] = {}
        link: RecordRef | None = ref
        shape = self.record(ref).get("shape")
        while link is not None:
            if link in chain or len(chain) > _LONGEST:
                raise CorruptCheckpoint(f"'{link.file}' record {link.record}: the chain never ends")
            record = self.record(link)
            if record["type"] not in types or record["shape"] != shape:
                raise CorruptCheckpoint(f"'{link.file}' record {link.record} does not fit its chain: {record['type']}")
            chain[link] = None
            older = record.get(key)
            link = None if older is None else RecordRef(str(older[0]), int(older[1]))
        return list(chain)

    def object_bytes(self, ref: RecordRef) -> bytes:
        """An object as DCP serialised it."""
        return self._raw(ref.file, self.record(ref))

    def verify(self, names: Collection[str] | None = None) -> Iterator[tuple[str, int, str | None]]:
        """Check size and checksum of every file, or of these; yields (name, bytes, problem or None)."""
        for file in self.manifest.files:
            if names is not None and file.name not in names:
                continue
            if file.role == "refinement" and not self.has_refinement:
                continue
            try:
                size, checksum = file_checksum(self.directory / file.name)
            except OSError as error:
                yield file.name, file.size, f"cannot be read: {error.strerror}"
                continue
            problem = None
            if size != file.size:
                problem = f"has {size} bytes, expected {file.size}"
            elif checksum != file.checksum:
                problem = f"has checksum {checksum}, expected {file.checksum}"
            yield file.name, file.size, problem

    def _read_index(self) -> dict[str, Any]:
        info = self.manifest.index
        path = self.directory / info.name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CorruptCheckpoint(
                f"'{path}' cannot be read ({error.strerror}) although the manifest names it"
            ) from error
        if len(data) != info.size or xxhash.xxh3_64_hexdigest(data) != info.checksum:
            raise CorruptCheckpoint(f"'{path}' is not what was written: {len(data)} bytes, expected {info.size}")
        index: dict[str, Any] = unpack_json(data, f"'{path}'")
        return index

    def _ref(self, file: int, record: int) -> RecordRef:
        return RecordRef(self.index["files"][file], record)

    def reader(self, name: str) -> ContainerReader:
        """A data file of the directory, opened.

        Raises:
            CorruptCheckpoint: the manifest does not name it, or it is not as that says.
        """
        with self._lock:
            if name not in self._readers:
                if name not in self._sizes:
                    raise CorruptCheckpoint(f"'{self.directory}': a record needs '{name}', which no manifest names")
                reader = ContainerReader(self.directory / name)
                if reader.size != self._sizes[name].size:
                    reader.close()
                    raise CorruptCheckpoint(
                        f"'{reader.path}' has {reader.size} bytes, expected {self._sizes[name].size}"
                    )
                self._readers[name] = reader
            return self._readers[name]

    def _raw(self, file: str, record: dict[str, Any]) -> bytes:
        size, packs = int(record["size"]), record["packs"]
        if "at" not in record:
            data = b"".join(self._pack(file, place, keep=False) for place in packs)
            if len(data) != size:
                raise CorruptCheckpoint(f"{record['fqn']}: {len(data)} bytes stored, {size} promised")
            return data
        start = int(record["at"])
        piece = self._pack(file, packs[0], keep=True)[start : start + size]
        if len(piece) != size:
            raise CorruptCheckpoint(f"{record['fqn']}: bytes {start} to {start + size} are not in its pack")
        return piece

    def _pack(self, file: str, place: int, keep: bool) -> bytes:
        if (file, place) in self._packs:
            return self._packs[file, place]
        block, itemsize, size = self.reader(file).contents["packs"][place]
        data = self._unshuffled(file, Block(*block), itemsize, size)
        if keep:
            self._packs[file, place] = data
        return data

    def _unshuffled(self, file: str, block: Block, itemsize: int, size: int) -> bytes:
        reader = self.reader(file)
        try:
            return shuffle_decompress(reader.read(block), itemsize, size)
        except CodingError as error:
            raise CorruptCheckpoint(f"'{reader.path}': {error}") from error
