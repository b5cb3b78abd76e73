"""Files and blocks of checkpoints as docs/format.md has them: containers, versions, compressed bytes, differences."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from tests.helpers.independent_coders import Rans, Refused, require

Tree = dict[str, Any]


class Unsupported(Exception):
    """The checkpoint is of a version that the page does not describe."""


def parse(text: bytes) -> Tree:
    """Strict JSON."""
    def refuse(constant: str) -> None:
        raise Refused(f"{constant} is not JSON")

    try:
        tree: Tree = json.loads(text.decode("utf-8"), parse_constant=refuse)
    except ValueError as error:
        raise Refused(str(error)) from error
    return tree


def xxh3(data: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def check_version(version: Any) -> None:
    require(type(version) is int and version >= 1, "version")
    if version > 9:
        raise Unsupported(f"version {version}")


def unzstd(frame: bytes, size: int | None = None) -> bytes:
    """The content of one frame: `size` bytes, or, of JSON, at most 2^30."""
    try:
        declared = zstandard.frame_content_size(frame)
        most = min(1 << 30, (1 << 24) + (len(frame) << 10))
        require(0 <= declared <= most if size is None else declared == size, "size of a zstd frame")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused(str(error)) from error


def scale_of(e: float) -> float:  # section 7
    n = math.floor(e)
    return float(round(2.0 ** (e - n + 15))) * 2.0 ** (n - 15)


def unshuffle(data: bytes, item: int, size: int) -> bytes:  # section 8
    require(item >= 1 and size >= 0 and size % item == 0, "whole items")
    if item == 1 or size < 4096:
        planes = unzstd(data, size)
    else:
        at = 8 * (item - 1)
        require(len(data) >= at, "table of lengths")
        lengths = [*struct.unpack(f"<{item - 1}Q", data[:at]), len(data)]  # a slice ends at the end at the latest
        planes = b""
        for length in lengths:
            planes += unzstd(data[at : at + length], size // item)
            at += length
    return np.frombuffer(planes, np.uint8).reshape(item, size // item).T.tobytes()


@functools.lru_cache(32)  # the oldest differences of a chain are in each of its checkpoints
def after(earlier: bytes, block: bytes, item: int) -> bytes:  # section 8, differences
    require(item in (1, 2, 4, 8) and len(block) >= 8 * item, "items of which there are differences")
    require(len(earlier) % item == 0, "whole items of earlier data")
    before, w = np.frombuffer(earlier, f"<u{item}"), 8 * item  # sums and shifts are modulo 2^w
    top, one = before.dtype.type(1 << (w - 1)), before.dtype.type(1)
    exponents, contexts = np.unique((before << one | before >> (w - one)) >> (w - 8), return_inverse=True)
    sizes, at = struct.unpack(f"<{2 * item}I", block[: 8 * item]), 8 * item
    require(at + sum(sizes) == len(block), "size of a block of differences")
    changes = np.empty((len(before), item), np.uint8)
    for plane in range(item):
        m, b = sizes[2 * plane : 2 * plane + 2]
        model, coded, at = block[at : at + m], block[at + m : at + m + b], at + m + b
        if m:
            coder = Rans(model)
            require(coder.version == 2, "version of a model")
            require(not coder.contexts or len(exponents) <= coder.contexts, "a table for each exponent")
            values: Any = coder.decode(coded, len(before), contexts.tolist() if coder.contexts else None)
        else:
            values = coded if b == len(before) else unzstd(coded, len(before))
        changes[:, plane] = values if isinstance(values, list) else np.frombuffer(values, np.uint8)
    z = changes.reshape(-1).view(before.dtype)
    ordered = np.where(before & top, ~before, before | top) + np.where(z & one, ~(z >> one), z >> one)
    return np.where(ordered & top, ordered ^ top, ~ordered).tobytes()


class Container:  # section 4
    def __init__(self, path: Path) -> None:
        self.raw = path.read_bytes()
        require(len(self.raw) >= 48, "a file has header and trailer")
        magic, version, zero = struct.unpack("<8sII", self.raw[:16])
        require(magic == b"DSQCKPT\0" and zero == 0, "header")
        check_version(version)
        start, size, checksum, end = struct.unpack("<QQQ8s", self.raw[-32:])
        self.checksum = f"{checksum:016x}"
        require(end == b"\0DSQEND\0" and start + size + 32 == len(self.raw), "trailer")
        self.contents = parse(unzstd(self.block([start, size, f"{checksum:016x}"])))
        require(self.contents.get("version", min(version, 2)) == version, "version of the contents")

    def block(self, place: Sequence[Any]) -> bytes:
        offset, size, checksum = place
        require(min(offset, size) >= 0 and offset + size <= len(self.raw), "blocks lie in the file")
        data = self.raw[offset : offset + size]
        require(xxh3(data) == checksum, "checksum of a block")
        return data

    def steps(self, places: Sequence[Sequence[Any] | None], n: int) -> Iterator[tuple[slice, bytes | None]]:
        """Blocks of codes or symbols, and which of the n elements they hold."""
        step = self.contents["block_elements"]
        require(0 < step <= 1 << 26 and len(places) == -(-n // step), "number of blocks")
        for start, place in zip(range(0, n, step), places, strict=True):
            yield slice(start, min(start + step, n)), None if place is None else self.block(place)
