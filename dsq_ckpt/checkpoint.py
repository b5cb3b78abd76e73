"""A complete checkpoint opened for reading: index, records, codes along the chain, tensors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dsq_ckpt import kernels
from dsq_ckpt.chunk import ChunkKey, Dequantizer
from dsq_ckpt.codebook import Codebook
from dsq_ckpt.coding import coder_class, shuffle_decompress
from dsq_ckpt.coding.base import Coder
from dsq_ckpt.compress import ParentModel
from dsq_ckpt.container import Block, ContainerReader, file_checksum, unpack_json
from dsq_ckpt.errors import CheckpointNotFound, CodingError, CorruptCheckpoint
from dsq_ckpt.manifest import Manifest
from dsq_ckpt.shard import RecordRef
from dsq_ckpt.workers import Workers

Codes = npt.NDArray[np.uint8]


class Checkpoint:
    """A checkpoint directory. Opening reads manifest and index; data is read, and checked, on demand.

    Raises:
        CheckpointNotFound, CorruptCheckpoint, UnsupportedFormat: see `Manifest.read` and `ContainerReader`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = Manifest.read(directory)
        self._sizes = {file.name: file for file in self.manifest.files}
        self._readers: dict[str, ContainerReader] = {}
        self._models: dict[tuple[str, str], tuple[Codebook, Coder]] = {}
        self._packs: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()
        self.index = self._read_index()

    def __enter__(self) -> Checkpoint:
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
        records = self._reader(ref.file).contents["records"]
        if not 0 <= ref.record < len(records):
            raise CorruptCheckpoint(f"'{ref.file}' has {len(records)} records, record {ref.record} is asked for")
        record: dict[str, Any] = records[ref.record]
        found = (record["fqn"], None if record["type"] == "bytes" else tuple(record["offsets"]))
        if fqn is not None and found != (fqn, offsets):
            raise CorruptCheckpoint(f"'{ref.file}' record {ref.record} is {found}, the index says {(fqn, offsets)}")
        return record

    def model(self) -> ParentModel:
        """What a child needs of this checkpoint as its parent."""
        books = {name: Codebook.from_json(tree) for name, tree in self.index["codebooks"].items()}
        return ParentModel(books, dict(self.index["exponents"]))

    def requires(self, file: str) -> frozenset[str]:
        """All files that decoding a file needs, itself included."""
        return frozenset([file, *self._reader(file).contents["requires"]])

    def codebook(self, ref: RecordRef) -> Codebook:
        """The codebook a coded record was coded with."""
        return self._model(ref.file, self.record(ref)["group"])[0]

    def codes(self, ref: RecordRef, workers: Workers) -> Codes:
        """The codes of a chunk, decoded from its keyframe on; uint8, flat.

        Raises:
            CorruptCheckpoint: any record of the chain is missing, altered or does not fit.
        """
        chain: list[RecordRef] = []
        link: RecordRef | None = ref
        shape = self.record(ref).get("shape")
        while link is not None:
            if link in chain or len(chain) > 100_000:
                raise CorruptCheckpoint(f"'{link.file}' record {link.record}: the chain never ends")
            record = self.record(link)
            if record["type"] != "coded" or record["shape"] != shape:
                raise CorruptCheckpoint(f"'{link.file}' record {link.record} does not fit its chain: {record['type']}")
            chain.append(link)
            parent = record.get("parent")
            link = None if parent is None else RecordRef(str(parent[0]), int(parent[1]))
        codes: Codes | None = None
        for link in reversed(chain):
            codes = self._decode_codes(link, codes, workers)
        assert codes is not None
        return codes

    def tensor(
        self, ref: RecordRef, refined: bool, workers: Workers, codes: Codes | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A chunk in the dtype it was saved in, of its own shape.

        Args:
            ref: its record.
            refined: use the refinement layer.
            codes: its codes, where they were decoded already.
            into: where the chunk is wanted; it is decoded there, and returned, if shape, dtype and layout allow.
        """
        record = self.record(ref)
        shape, dtype = record["shape"], dtype_of(record["dtype"])
        if record["type"] == "plain":
            stored = dtype_of(record.get("stored", record["dtype"]))
            raw = bytearray(self._raw(ref.file, record))
            flat = torch.frombuffer(raw, dtype=stored) if raw else torch.empty(0, dtype=stored)
            expected = int(np.prod(shape, dtype=np.int64))
            if flat.numel() != expected:
                raise CorruptCheckpoint(f"{record['fqn']}: {flat.numel()} elements stored, shape {shape} promised")
            return flat.view(shape).to(dtype)
        if record["type"] != "coded":
            raise CorruptCheckpoint(f"'{ref.file}' record {ref.record} is of type {record['type']!r}, not a tensor")
        codes = self.codes(ref, workers) if codes is None else codes
        direct = into is not None and dtype == torch.float32 == into.dtype and into.device.type == "cpu"
        if direct and into is not None and into.is_contiguous() and list(into.shape) == shape:
            self._values(ref, record, codes, refined, workers, into.view(-1).numpy())
            return into
        values = np.empty(len(codes), np.float32)
        self._values(ref, record, codes, refined, workers, values)
        return within(torch.from_numpy(values), dtype).view(shape)

    def _values(
        self, ref: RecordRef, record: dict[str, Any], codes: Codes, refined: bool, workers: Workers,
        out: npt.NDArray[np.float32],
    ) -> None:
        """Dequantize a record into `out`, float32 flat, its blocks in parallel."""
        book, protected = self.codebook(ref), self._protected(ref.file, record)
        name = f"{Path(ref.file).stem}.refinement"
        entry = self._reader(name).contents["records"].get(str(ref.record)) if refined and name in self._sizes else None
        bits = 0 if entry is None else int(entry["bits"])
        if entry is not None and len(protected):
            raw = self._unshuffled(name, Block(*entry["protected"]), 4, 4 * len(protected))
            protected = np.frombuffer(raw, np.uint32)
        source = self._reader(ref.file if entry is None else name)
        step = _block_elements(source)
        starts = range(0, len(codes), step)
        if entry is not None and len(entry["blocks"]) != len(starts):
            raise CorruptCheckpoint(f"'{source.path}': {len(entry['blocks'])} blocks for {len(starts)} of codes")
        before = [0]
        for start in starts:
            count = int(np.count_nonzero(codes[start : start + step] == book.protected)) if len(protected) else 0
            before.append(before[-1] + count)
        if before[-1] != len(protected):
            raise CorruptCheckpoint(
                f"{record['fqn']}: {before[-1]} codes are protected but {len(protected)} protected values are stored"
            )
        dequantizer = Dequantizer(book, int(record.get("exponent", 0)), bits)

        def work(place: int) -> None:
            where = slice(place * step, (place + 1) * step)
            symbols = None
            try:
                if entry is not None:
                    symbols = np.empty(len(codes[where]), np.uint8)
                    packed = source.read(Block(*entry["blocks"][place]))
                    kernels.unpack(np.frombuffer(packed, np.uint8), bits, symbols)
                dequantizer.block(codes[where], protected[before[place] : before[place + 1]], symbols, out[where])
            except ValueError as error:
                raise CorruptCheckpoint(f"'{source.path}', {record['fqn']}: {error}") from error

        for _ in workers.map(work, range(len(starts))):
            pass

    def object_bytes(self, ref: RecordRef) -> bytes:
        """An object as DCP serialised it."""
        return self._raw(ref.file, self.record(ref))

    def verify(self) -> Iterator[tuple[str, int, str | None]]:
        """Check size and checksum of every file; yields (name, bytes, problem or None)."""
        for file in self.manifest.files:
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

    def _reader(self, name: str) -> ContainerReader:
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

    def _model(self, file: str, group: str) -> tuple[Codebook, Coder]:
        key = (file, group)
        if key not in self._models:
            reader = self._reader(file)
            tree = reader.contents["groups"][group]
            try:
                coder = coder_class(tree["coder"]).from_bytes(reader.read(Block(*tree["model"])))
            except CodingError as error:
                raise CorruptCheckpoint(f"'{reader.path}', group {group}: {error}") from error
            self._models[key] = (Codebook.from_json(tree["codebook"]), coder)
        return self._models[key]

    def _decode_codes(self, ref: RecordRef, parent: Codes | None, workers: Workers) -> Codes:
        """Codes of one record given those of its parent, all blocks in parallel."""
        record, reader = self.record(ref), self._reader(ref.file)
        _, coder = self._model(ref.file, record["group"])
        count = int(np.prod(record["shape"], dtype=np.int64))
        step = _block_elements(reader)
        blocks = [Block(*block) for block in record["blocks"]]
        if len(blocks) != -(-count // step):
            raise CorruptCheckpoint(f"'{reader.path}': {len(blocks)} blocks of {step} codes for {count} elements")
        out = np.empty(count, np.uint8)

        def work(place: int) -> None:
            where = slice(place * step, (place + 1) * step)
            try:
                coder.decode(reader.read(blocks[place]), None if parent is None else parent[where], out[where])
            except (CodingError, ValueError) as error:
                raise CorruptCheckpoint(f"'{reader.path}' block {place}: {error}") from error

        for _ in workers.map(work, range(len(blocks))):
            pass
        return out

    def _protected(self, file: str, record: dict[str, Any]) -> npt.NDArray[np.uint32]:
        count = int(record.get("protected_count", 0))
        if not count:
            return np.empty(0, np.uint32)
        raw = self._unshuffled(file, Block(*record["protected"]), 2, 2 * count)
        return np.frombuffer(raw, np.uint16).astype(np.uint32) << np.uint32(16)

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
        block, itemsize, size = self._reader(file).contents["packs"][place]
        data = self._unshuffled(file, Block(*block), itemsize, size)
        if keep:
            self._packs[file, place] = data
        return data

    def _unshuffled(self, file: str, block: Block, itemsize: int, size: int) -> bytes:
        reader = self._reader(file)
        try:
            return shuffle_decompress(reader.read(block), itemsize, size)
        except CodingError as error:
            raise CorruptCheckpoint(f"'{reader.path}': {error}") from error


def _block_elements(reader: ContainerReader) -> int:
    step = int(reader.contents["block_elements"])
    if step <= 0:
        raise CorruptCheckpoint(f"'{reader.path}': blocks of {step} elements")
    return step


def within(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Finite float32 values in another dtype; what rounding would make infinite becomes the largest number."""
    if dtype in (torch.float32, torch.float64):
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def dtype_of(name: str) -> torch.dtype:
    """A torch dtype by its name.

    Raises:
        CorruptCheckpoint: there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(f"unknown dtype {json.dumps(name)}: written by a newer torch?")
    return dtype
