"""Container: the data file of one rank. It has checksummed blocks, a table of contents, a trailer (`docs/format.md`).

    header   8 B magic, u32 format version, u32 zero
    blocks   opaque bytes, back to back
    contents zstd of JSON: description and checksum of each block
    trailer  u64 offset, u64 size, u64 checksum of contents, 8 B magic
"""

from __future__ import annotations

import functools
import json
import os
import random
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard

from dsq_ckpt.core.regular_files import RegularFile, open_regular, unreadable_error
from dsq_ckpt.core.strict_json import parse_strict_json
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import Scratch
from dsq_ckpt.errors import CorruptCheckpoint, SaveFailed, UnsupportedFormat
from dsq_ckpt.storage.atomic_io import add_path_to_errors
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.write_speed import write_speed

if sys.byteorder != "little":
    raise ImportError("dsq_ckpt writes numbers as they lie in memory; big-endian machines are not supported")

FORMAT_VERSION = 9
_MAGIC, _END = b"DSQCKPT\0", b"\0DSQEND\0"
_HEADER = struct.Struct("<8sII")
_TRAILER = struct.Struct("<QQQ8s")
_MAX_CONTENTS = 1 << 30
_PIECE = 1 << 22
_CACHED_SMALL, _MAX_SMALL = 32, 1 << 14  # parsed contents, and compressed bytes of each
_CACHED_LARGE, _MAX_LARGE = 4, 1 << 16  # up to some 3,000 chunks each
_SMALL, _RATIO = 1 << 24, 1 << 10
"""Limit of contents in bytes, and its increase per byte of the frame: a small frame cannot claim much memory."""


class Block(NamedTuple):
    """Location of a block: byte offset, size, and xxh3-64 of its bytes as 16 hexadecimal digits."""

    offset: int
    size: int
    checksum: str


class FileInfo(NamedTuple):
    """Finished file of a checkpoint.

    Attributes:
        name: name in the checkpoint directory.
        size: size in bytes.
        checksum: xxh3-64 of its bytes as 16 hexadecimal digits.
        contents: for a container the checksum of its table of contents, which has the checksum of every block.
    """

    name: str
    size: int
    checksum: str
    contents: str | None = None


class ContainerWriter:
    """Writer of a container under a hidden name. `finish` publishes it; an error in its context removes it."""

    def __init__(self, directory: Path, name: str, fsync: bool) -> None:
        self.path = directory / name
        self._hash = xxhash.xxh3_64()
        self._offset = 0
        self._seconds = 0.0
        self._file = get_storage(self.path).create(self.path, fsync=fsync, buffering=1 << 20)
        self._append(_HEADER.pack(_MAGIC, FORMAT_VERSION, 0))

    def __enter__(self) -> ContainerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.discard()
        if error is not None:
            get_storage(self.path).remove(self.path)

    def add(self, data: bytes | memoryview) -> Block:
        """Append a block."""
        block = Block(self._offset, len(data), xxhash.xxh3_64_hexdigest(data))
        self._append(data)
        return block

    def finish(self, contents: dict[str, Any]) -> FileInfo:
        """Write contents and trailer, flush to the device, and publish the file."""
        block = self.add(pack_json({"version": FORMAT_VERSION, **contents}))  # the header has no checksum
        self._append(_TRAILER.pack(block.offset, block.size, int(block.checksum, 16), _END))
        with add_path_to_errors(self.path, f"before all {self._offset} bytes of it were written"):
            started = time.perf_counter()
            self._file.complete()
            if not is_remote(self.path):
                write_speed.add(self._offset, self._seconds + time.perf_counter() - started)
        self._file.publish()
        return FileInfo(self.path.name, self._offset, self._hash.hexdigest(), block.checksum)

    def _append(self, data: bytes | memoryview) -> None:
        with add_path_to_errors(self.path, f"while bytes up to {self._offset + len(data)} of it were written"):
            started = time.perf_counter()
            self._file.stream.write(data)
            self._seconds += time.perf_counter() - started
        self._hash.update(data)
        self._offset += len(data)


class ContainerReader:
    """Reader of a container, which verifies the checksum of every block; safe to use from several threads.

    Args:
        path: path of the file.
        expected: required size in bytes; None: any.

    Attributes:
        path: path of the file.
        size: size of the file in bytes.
        checksum: xxh3-64 of the table of contents, hexadecimal.
        contents: table of contents.

    Raises:
        CorruptCheckpoint: the file is missing, foreign, truncated or altered.
        UnsupportedFormat: it was written by a newer version.
        LoadFailed: it cannot be opened, for a reason outside of it.
    """

    def __init__(self, path: Path, expected: int | None = None) -> None:
        self.path = path
        try:
            self._file = get_storage(path).open(path, expected)
        except OSError as error:
            raise unreadable_error(path, error) from error
        try:
            self.size = self._file.size
            self.checksum, self.contents = self._read_contents()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, block: Block) -> bytes:
        """Return the bytes of a block.

        Raises:
            CorruptCheckpoint: the bytes do not have the checksum of the block.
        """
        data = self._read_at(block.offset, block.size)
        self._check(block, data)
        return data

    def borrow(self, block: Block, scratch: Scratch) -> bytes | memoryview:
        """Return the bytes of a block as `read` does, in memory of the thread that its next call reuses."""
        if not isinstance(self._file, RegularFile):
            return self.read(block)
        self._check_range(block.offset, block.size)
        data = scratch.array("bytes", block.size, np.uint8).data
        try:
            count = self._file.read_into(block.offset, data)
        except OSError as error:
            raise unreadable_error(self.path, error) from error
        self._check_complete(block.offset, count, block.size)
        self._check(block, data)
        return data

    def _check(self, block: Block, data: bytes | memoryview) -> None:
        digest = xxhash.xxh3_64_hexdigest(data)
        if digest != block.checksum:
            raise CorruptCheckpoint(
                f"'{self.path}': {block.size} bytes at {block.offset} have checksum {digest}, expected "
                f"{block.checksum}; the file was altered, restore it or load another checkpoint"
            )

    def _read_contents(self) -> tuple[str, dict[str, Any]]:
        if self.size < _HEADER.size + _TRAILER.size:
            raise CorruptCheckpoint(f"'{self.path}' has {self.size} bytes, too few for a dsq_ckpt file: truncated")
        magic, version, zero = _HEADER.unpack(self._read_at(0, _HEADER.size))
        if magic != _MAGIC or version < 1 or zero:
            raise CorruptCheckpoint(
                f"'{self.path}' is not a dsq_ckpt file: it begins with {magic!r}, version {version}"
            )
        if version > FORMAT_VERSION:
            raise UnsupportedFormat(
                f"'{self.path}' has format version {version}, this dsq_ckpt reads up to {FORMAT_VERSION}; upgrade it"
            )
        trailer = self._read_at(self.size - _TRAILER.size, _TRAILER.size)
        offset, size, checksum, end = _TRAILER.unpack(trailer)
        if end != _END or offset + size + _TRAILER.size != self.size or size > _MAX_CONTENTS:
            raise CorruptCheckpoint(f"'{self.path}' does not end as a dsq_ckpt file does: truncated or overwritten")
        block = Block(offset, size, f"{checksum:016x}")
        contents = unpack_json(self.read(block), f"'{self.path}'")
        if not isinstance(contents, dict):
            raise CorruptCheckpoint(f"'{self.path}': contents are a {type(contents).__name__}, expected an object")
        if contents.get("version", min(version, 2)) != version:  # the first two versions did not repeat it
            raise CorruptCheckpoint(
                f"'{self.path}' begins with format version {version}, and its contents are of {contents.get('version')}"
            )
        return block.checksum, contents

    def _read_at(self, offset: int, size: int) -> bytes:
        self._check_range(offset, size)
        try:
            data = self._file.read(offset, size)
        except OSError as error:
            raise unreadable_error(self.path, error) from error
        self._check_complete(offset, len(data), size)
        return data

    def _check_complete(self, offset: int, count: int, size: int) -> None:
        if count != size:
            raise CorruptCheckpoint(f"'{self.path}' ended at {offset + count} while it was being read")

    def _check_range(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise CorruptCheckpoint(
                f"'{self.path}': block of {size} bytes at {offset} lies outside the file of {self.size} bytes"
            )


def write_index(directory: Path, save_id: str, index: dict[str, Any], fsync: bool) -> FileInfo:
    """Write the index of a checkpoint, complete or not at all."""
    data = pack_json(index)
    name = f"{save_id}.index"
    with get_storage(directory).create(directory / name, fsync=fsync, mark=save_id[:8]) as file:
        file.stream.write(data)
        file.publish()
    return FileInfo(name, len(data), xxhash.xxh3_64_hexdigest(data))


def pack_json(tree: dict[str, Any]) -> bytes:
    """Return compact, compressed JSON for `unpack_json`.

    Raises:
        SaveFailed: it is larger than a reader accepts.
    """
    def frame(tree: dict[str, Any]) -> tuple[bytes, int]:
        text = json.dumps(tree, separators=(",", ":")).encode()
        if len(text) > _MAX_CONTENTS:
            raise SaveFailed(
                f"a table of contents has {len(text)} bytes, {_MAX_CONTENTS} are possible: save on more ranks, or "
                "fewer tensors and objects"
            )
        data = zstandard.ZstdCompressor(level=9).compress(text)
        return data, len(text) - _max_contents_size(len(data))

    data, separate = frame(tree)
    if separate > 0:  # pad contents whose compression ratio exceeds what readers accept
        data, _ = frame({**tree, "padding": random.Random(0).randbytes(separate // (_RATIO // 2) + 64).hex()})
    return data


def _max_contents_size(size: int) -> int:
    """Return the maximum number of bytes of contents for a frame of this size."""
    return min(_MAX_CONTENTS, _SMALL + _RATIO * size)


def unpack_json(data: bytes, location: str) -> Any:
    """Inverse of `pack_json`, within its limits of size. The result may be cached and shared: do not modify it.

    Raises:
        CorruptCheckpoint: the bytes do not decompress or parse.
    """
    try:
        size = len(data)
        return (_unpack_small if size <= _MAX_SMALL else _unpack_large if size <= _MAX_LARGE else _unpack)(data)
    except (zstandard.ZstdError, ValueError) as error:
        raise CorruptCheckpoint(f"{location}: contents do not parse: {error}") from error


def _unpack(data: bytes) -> Any:
    if not 0 <= zstandard.frame_content_size(data) <= _max_contents_size(len(data)):
        raise ValueError("they claim an impossible size")
    return parse_strict_json(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))


# A save reads the contents of its parent several times, and loads of one process those of the same chains.
_unpack_small = functools.lru_cache(_CACHED_SMALL)(_unpack)
_unpack_large = functools.lru_cache(_CACHED_LARGE)(_unpack)


def read_pieces(path: Path, expected: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces.

    Args:
        path: the file.
        expected: required size in bytes, for which a store then need not be asked; None: any.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    file = get_storage(path).open(path, expected)
    try:
        for start in range(0, file.size, _PIECE):
            yield file.read(start, _PIECE)
    finally:
        file.close()


def checksum_file(path: Path) -> tuple[int, str]:
    """Return size and xxh3-64 (hexadecimal) of a whole file.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    digest, size = xxhash.xxh3_64(), 0
    if is_remote(path):
        for piece in read_pieces(path):
            digest.update(piece)
            size += len(piece)
        return size, digest.hexdigest()
    with os.fdopen(open_regular(path), "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()
