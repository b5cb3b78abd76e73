"""A reader of checkpoints written from docs/format.md alone: it shares no code with the package, and no speed."""

from __future__ import annotations

import json
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

M = 1 << 15
Tree = dict[str, Any]


class Refused(Exception):
    """The checkpoint breaks a rule of the format."""


class Unsupported(Exception):
    """The checkpoint is of a version that the page does not describe."""


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise Refused(rule)


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
    if version > 1:
        raise Unsupported(f"version {version}")


def unzstd(frame: bytes, size: int | None = None) -> bytes:
    """The content of one frame: `size` bytes, or, of JSON, at most 2^30."""
    try:
        declared = zstandard.frame_content_size(frame)
        require(0 <= declared <= 1 << 30 if size is None else declared == size, "size of a zstd frame")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused(str(error)) from error


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


class Container:  # section 4
    def __init__(self, path: Path) -> None:
        self.raw = path.read_bytes()
        require(len(self.raw) >= 48, "a file has header and trailer")
        magic, version, zero = struct.unpack("<8sII", self.raw[:16])
        require(magic == b"DSQCKPT\0" and zero == 0, "header")
        check_version(version)
        start, size, checksum, end = struct.unpack("<QQQ8s", self.raw[-32:])
        require(end == b"\0DSQEND\0" and start + size + 32 == len(self.raw), "trailer")
        self.contents = parse(unzstd(self.block([start, size, f"{checksum:016x}"])))

    def block(self, place: Sequence[Any]) -> bytes:
        offset, size, checksum = place
        require(min(offset, size) >= 0 and offset + size <= len(self.raw), "blocks lie in the file")
        data = self.raw[offset : offset + size]
        require(xxh3(data) == checksum, "checksum of a block")
        return data

    def steps(self, places: Sequence[Sequence[Any]], n: int) -> Iterator[tuple[slice, bytes]]:
        """Blocks of codes or symbols, and which of the n elements they hold."""
        step = self.contents["block_elements"]
        require(step > 0 and len(places) == -(-n // step), "number of blocks")
        for start, place in zip(range(0, n, step), places, strict=True):
            yield slice(start, min(start + step, n)), self.block(place)


class Bits:  # a bit stream, section 9
    def __init__(self, data: bytes) -> None:
        self.value, self.size, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def field(self, width: int) -> int:
        require(self.at + width <= self.size, "bits end early")
        self.at += width
        return (self.value >> (self.at - width)) & ((1 << width) - 1)

    def number(self) -> int:
        zeros = 0
        while self.field(1) == 0:
            zeros += 1
            require(zeros <= 15, "length of a number")
        return (1 << zeros) - 1 + self.field(zeros)

    def ascending(self, count: int, limit: int) -> Iterator[int]:
        last = -1
        for _ in range(count):
            last += self.number() + 1
            require(last < limit, "a set within its limit")
            yield last

    def finish(self) -> None:
        require(self.size - self.at < 8 and self.value >> self.at == 0, "bits left over")


Row = tuple[list[int], list[tuple[int, int]], list[int]]  # starts, (symbol or -1 for the escape, frequency), escaped


def frequency(v: int) -> int:
    require(1 <= v <= 103, "frequency")
    return v if v < 16 else (8 + v % 8) << (v // 8 - 1)


class Rans:  # section 10
    def __init__(self, model: bytes) -> None:
        require(len(model) >= 5, "model")
        version, self.contexts, self.symbols = struct.unpack("<BHH", model[:5])
        require(version == 1 and self.contexts <= 256 and 1 <= self.symbols <= 256, "model")
        bits = Bits(model[5:])
        self.rows = [self._row(bits) for _ in range(self.contexts + 1)]
        bits.finish()

    def _row(self, bits: Bits) -> Row:
        firsts, escaped, others, count = list[int](), list[int](), list[tuple[int, int]](), bits.number()
        for symbol in bits.ascending(count, self.symbols):
            v = bits.field(7)
            if v in (0, 127):
                (firsts if v else escaped).append(symbol)
            else:
                others.append((symbol, frequency(v)))
        require(len(escaped) != 1 and len(firsts) == (count > 0), "first and escaped symbols")
        if escaped:
            others.append((-1, frequency(bits.field(7))))
        rest = M - sum(f for _, f in others)
        require(rest >= 1, "frequency of the first symbol")
        ranges = [(first, rest) for first in firsts] + others
        return [sum(f for _, f in ranges[:i]) for i in range(len(ranges))], ranges, escaped

    def decode(self, block: bytes, n: int, previous: Sequence[int] | None) -> list[int]:
        lanes = 1 if n < 4096 else 4 if n < 65536 else 8
        require(not block or (n > 0 and len(block) >= 4 * lanes and len(block) % 2 == 0), "size of a block")
        states = list(struct.unpack(f"<{lanes}I", block[: 4 * lanes])) if block else [65536] * lanes
        require(min(states) >= 65536, "states at the start")
        words, out = np.frombuffer(block[4 * lanes :], "<u2").tolist()[::-1], list[int]()
        def refilled(x: int) -> int:
            require(x >= 65536 or bool(words), "words end early")
            return x if x >= 65536 else 65536 * x + words.pop()
        for i in range(n):
            starts, ranges, escaped = self.rows[self.contexts if previous is None else previous[i]]
            require(bool(starts), "no code in an empty row")
            x = states[i % lanes]
            place = bisect_right(starts, x % M) - 1
            symbol, f = ranges[place]
            x = refilled(f * (x // M) + x % M - starts[place])
            if symbol < 0:
                share = M // len(escaped)
                require((j := x % M // share) < len(escaped), "escaped symbol")
                symbol, x = escaped[j], refilled(share * (x // M) + x % M - j * share)
            out.append(symbol)
            states[i % lanes] = x
        require(not words and set(states) == {65536}, "end of a block")
        return out


class Huffman:  # section 11
    def __init__(self, model: bytes) -> None:
        require(len(model) >= 6, "model")
        version, flags, self.contexts, self.symbols = struct.unpack("<BBHH", model[:6])
        require(version == 1 and flags <= 3 and self.contexts <= 256 and 1 <= self.symbols <= 256, "model")
        self.rearrange, bits = bool(flags & 1), Bits(model[6:])
        for _ in range(self.contexts + 1):
            list(bits.ascending(bits.number(), self.symbols))
        bits.finish()

    def decode(self, block: bytes, n: int, previous: Sequence[int] | None) -> list[int]:
        bits, out = Bits(block), [0] * n
        base = self.symbols if previous is None else max(self.contexts, self.symbols)
        groups: dict[int, list[int]] = {}
        for i in range(n):
            groups.setdefault(previous[i] if previous is not None and self.rearrange else 0, []).append(i)
        for _, members in sorted(groups.items()):
            for i, value in zip(members, self._group(bits, len(members), base), strict=True):
                out[i] = value if previous is None else (previous[i] - value) % base
        bits.finish()
        require(max(out, default=0) < self.symbols, "codes below symbols")
        return out

    @staticmethod
    def _group(bits: Bits, n: int, base: int) -> list[int]:
        used = bits.number() + 1
        lengths = [(bits.field(4) if used > 1 else 0, token) for token in bits.ascending(used, base + 288)]
        if used == 1 and lengths[0][1] < base:
            return [lengths[0][1]] * n
        require(min(lengths)[0] > 0 and sum(M >> length for length, _ in lengths) == M, "lengths")
        tokens, code, before = dict[tuple[int, int], int](), 0, 0
        for length, token in sorted(lengths):
            code <<= length - before
            tokens[length, code] = token
            code, before = code + 1, length
        values, fresh = list[int](), False
        while len(values) < n:
            length = code = 0
            while (length, code) not in tokens:
                length, code = length + 1, code << 1 | bits.field(1)
            token = tokens[length, code]
            run = 1 if token < base else (token - base + 1 if token < base + 256 else 1 << (token - base - 247)) - fresh
            fresh = token < base
            require((fresh or bool(values)) and len(values) + run <= n, "a run in its group")
            values += ([token] if fresh else values[-1:]) * run
        return values


def converted(values: npt.NDArray[Any], dtype: str) -> bytes:  # section 7, the end
    if dtype in ("float16", "bfloat16"):
        largest = {"float16": 65504.0, "bfloat16": 255 * 2.0**120}[dtype]
        values = np.clip(values, -np.float32(largest), np.float32(largest))
    if dtype != "bfloat16":
        return values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype("<u2").tobytes()


def widened(bf16: bytes) -> npt.NDArray[np.float32]:
    return (np.frombuffer(bf16, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def value(book: Tree, code: int, scale: np.float32, symbol: int | None, bits: int) -> np.float32:  # section 7
    level, low, high = book["levels"][code], book["cells"][0][code], book["cells"][1][code]
    linear, plain = book["domain"] == "linear", symbol is None or low == high
    u = level if symbol is None or plain else low + (symbol + 0.5) * ((high - low) / 2.0**bits)
    with np.errstate(over="ignore"):
        if linear:
            v = np.float32(u * np.float64(scale))
        elif plain:
            v = np.float32(np.float32(u) * scale)
        else:
            magnitude = np.uint32(min(max(round(u * 2.0**23), 0), (1 << 31) - 1)).view(np.float32)
            v = np.float32((-magnitude if level < 0 else magnitude) * scale)
    return np.float32(np.copysign(np.finfo(np.float32).max, v)) if np.isinf(v) else v


def check_book(book: Tree) -> None:
    levels, (low, high) = book["levels"], book["cells"]
    require(1 <= len(levels) <= 255 and len(low) == len(high) == len(levels), "length of a codebook")
    require(bool(np.isfinite([levels, low, high]).all()) and levels[0] == 0, "numbers of a codebook")
    require(all(a <= b for a, b in zip(low, high, strict=True)), "bounds of cells")
    require(book["domain"] in ("linear", "log"), "domain")


class Reader:  # a checkpoint directory
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        data = (directory / "manifest.json").read_bytes()
        self.manifest = parse(data)
        require(self.manifest["format"] == "dsq_ckpt", "format")
        check_version(self.manifest["version"])
        digits: Any = self.manifest.get("checksum")
        require(isinstance(digits, str) and bool(re.fullmatch("[0-9a-f]{16}", digits)), "digits of a checksum")
        require(xxh3(data.replace(digits.encode(), b"0" * 16, 1)) == digits, "checksum of the manifest")
        self.files: dict[str, Tree] = {entry["name"]: entry for entry in self.manifest["files"]}
        require(len(self.files) == len(self.manifest["files"]), "names of files differ")
        for name in self.files:
            require(name != "" and name[0] != "." and not set(name) & set("/\\\0"), "name of a file")
        indices = [entry for entry in self.files.values() if entry["role"] == "index"]
        require(len(indices) == 1, "one index")
        index = indices[0]
        data = (directory / index["name"]).read_bytes()
        require([len(data), xxh3(data)] == [index["size"], index["checksum"]], "index")
        self.index = parse(unzstd(data))
        self._containers: dict[str, Container] = {}

    def container(self, name: str) -> Container:
        if name not in self._containers:
            require(name in self.files, f"the manifest names {name}")
            self._containers[name] = Container(self.directory / name)
            require(len(self._containers[name].raw) == self.files[name]["size"], "size of a file")
        return self._containers[name]

    def object(self, fqn: str) -> bytes:
        number, place = self.index["objects"][fqn]
        file = self.container(self.index["files"][number])
        record = file.contents["records"][place]
        require(record["type"] == "bytes" and record["fqn"] == fqn, "an object's record")
        return self._exact(file, record)

    def tensor(self, fqn: str, refined: bool = True) -> bytes:
        """All elements of a tensor in row-major order."""
        tensor = self.index["tensors"][fqn]
        item = np.dtype(tensor["dtype"].replace("bfloat16", "int16")).itemsize
        whole = np.zeros((*tensor["shape"], item), np.uint8)
        for offsets, shape, number, place in tensor["chunks"]:
            name = self.index["files"][number]
            record = self.container(name).contents["records"][place]
            expected = {"fqn": fqn, "offsets": offsets, "shape": shape, "dtype": tensor["dtype"]}
            require({**record, **expected} == record, "as in the index")
            data = np.frombuffer(self._chunk(name, place, record, refined), np.uint8)
            box = tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))
            whole[box] = data.reshape(*shape, item)
        return whole.tobytes()

    def _exact(self, file: Container, record: Tree) -> bytes:
        packs = [file.contents["packs"][number] for number in record["packs"]]
        data = b"".join(unshuffle(file.block(place), item, size) for place, item, size in packs)
        if "at" in record:
            data = data[record["at"] : record["at"] + record["size"]]
        require(len(data) == record["size"], "size of a record")
        return data

    def _chunk(self, name: str, place: int, record: Tree, refined: bool) -> bytes:
        file, dtype, n = self.container(name), record["dtype"], int(np.prod(record["shape"], dtype=np.int64))
        if record["type"] == "plain":
            data = self._exact(file, record)
            return data if "stored" not in record else converted(widened(data), dtype)  # it is bfloat16 today
        codes = self._codes(name, place, record["shape"], ())
        count, bits, symbols = record.get("protected_count", 0), 0, list[int]()
        protected = widened(unshuffle(file.block(record["protected"]), 2, 2 * count)) if count else np.zeros(0, "<f4")
        beside = f"{name.removesuffix('.dsq')}.refinement"
        if refined and self.manifest["refinement"] == "kept" and beside in self.files:
            other = self.container(beside)
            entry = other.contents["records"].get(str(place), {"bits": 0})
            bits = entry["bits"]
            for where, data in other.steps(entry["blocks"], n) if bits else ():
                stream = Bits(data)
                symbols += [stream.field(bits) for _ in range(where.stop - where.start)]
                stream.finish()
            if bits and count:
                protected = np.frombuffer(unshuffle(other.block(entry["protected"]), 4, 4 * count), "<f4")
        book = file.contents["groups"][record["group"]]["codebook"]
        last, scale = len(book["levels"]), np.float32(2.0 ** record.get("exponent", 0))
        check_book(book)
        require(codes.count(last) == count and max(codes, default=0) <= last, "codes of the codebook")
        pairs: list[tuple[int, int | None]] = list(zip(codes, symbols if bits else [None] * n, strict=True))
        known = {pair: value(book, pair[0], scale, pair[1], bits) for pair in set(pairs) if pair[0] < last}
        rest = iter(protected)
        return converted(np.array([known[p] if p in known else next(rest) for p in pairs], np.float32), dtype)

    def _codes(self, name: str, place: int, shape: list[int], seen: tuple[tuple[str, int], ...]) -> list[int]:
        require((name, place) not in seen, "a chain ends")
        file = self.container(name)
        record = file.contents["records"][place]
        require(record["type"] == "coded" and record["shape"] == shape, "a record fits its chain")
        parent = record.get("parent")
        previous = None if parent is None else self._codes(parent[0], parent[1], shape, (*seen, (name, place)))
        group = file.contents["groups"][record["group"]]
        require(group["coder"] in ("rans", "huffman"), "coder")
        coder = (Rans if group["coder"] == "rans" else Huffman)(file.block(group["model"]))
        require(not previous or max(previous) < coder.contexts, "previous codes below contexts")
        out: list[int] = []
        for where, block in file.steps(record["blocks"], int(np.prod(shape, dtype=np.int64))):
            out += coder.decode(block, where.stop - where.start, None if previous is None else previous[where])
        return out
