"""A reader of checkpoints written from docs/format.md alone: it shares no code with the package, and no speed."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.helpers.independent_coders import Bits, Changes, Huffman, Rans, Refused, require
from tests.helpers.independent_container import (
    Container,
    Unsupported,
    after,
    check_version,
    parse,
    scale_of,
    unshuffle,
    unzstd,
    xxh3,
)

__all__ = ["Container", "Rans", "Reader", "Refused", "Unsupported", "parse", "unshuffle", "unzstd", "value"]

Tree = dict[str, Any]
CODERS: dict[str, Any] = {"rans": Rans, "changes": Changes, "huffman": Huffman}


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


def value(book: Tree, code: int, scale: float, symbol: int | None, bits: int) -> np.float32:  # section 7
    level, low, high = book["levels"][code], book["cells"][0][code], book["cells"][1][code]
    linear, plain = book["domain"] == "linear", symbol is None or low == high
    u = level if symbol is None or plain else low + (symbol + 0.5) * ((high - low) / 2.0**bits)
    with np.errstate(over="ignore"):
        if linear and plain:
            v = np.float32(u * scale)
        elif linear:
            v = np.float32(low * scale + (symbol + 0.5) * (((high - low) * scale) / 2.0**bits))
        elif plain:
            v = np.float32(np.float32(u) * np.float32(scale))
        else:
            magnitude = np.uint32(min(max(round(u * 2.0**23), 0), (1 << 31) - 1)).view(np.float32)
            v = np.float32((-magnitude if level < 0 else magnitude) * np.float32(scale))
    return np.float32(np.copysign(np.finfo(np.float32).max, v)) if np.isinf(v) else v


@functools.lru_cache(256)
def coder_of(name: str, model: bytes) -> Any:
    return CODERS[name](model)


@functools.lru_cache(256)  # checkpoints of a chain have the same blocks, and each is read in several ways
def decoded(name: str, model: bytes, block: bytes, n: int, previous: bytes | None) -> bytes:
    return bytes(coder_of(name, model).decode(block, n, None if previous is None else list(previous)))


def refined_by_rans(data: bytes, codes: list[int] | None, bits: int, n: int) -> list[int]:  # section 6
    (size,) = struct.unpack("<I", data[1:5])
    require(size <= len(data) - 5, "a model in its block")
    model, block = data[5 : 5 + size], data[5 + size :]
    coder = coder_of("rans", model)
    require(coder.symbols == 1 << bits and max(codes or [-1]) < coder.contexts, "a model of these codes")
    return list(decoded("rans", model, block, n, None if codes is None else bytes(codes)))


def added(values: npt.NDArray[np.float32], more: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        total = values + more
    return np.where(np.isinf(total), np.copysign(np.finfo(np.float32).max, total), total)


def product(values: npt.NDArray[np.float32], factors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        products = values * factors
    return np.where(np.isinf(products), np.copysign(np.finfo(np.float32).max, products), products)


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
            held_by: Any = self.files[name].get("held_by")
            if held_by is not None:
                require(held_by not in ("", ".", "..") and not set(held_by) & set("/\\\0"), "name of a directory")
                require(self.files[name]["role"] == "ancestor" and name.endswith(".dsq"), "what another directory has")
        indices = [entry for entry in self.files.values() if entry["role"] == "index"]
        require(len(indices) == 1, "one index")
        index = indices[0]
        data = (directory / index["name"]).read_bytes()
        require([len(data), xxh3(data)] == [index["size"], index["checksum"]], "index")
        self.index = parse(unzstd(data))
        own = {name for name, entry in self.files.items() if entry["role"] == "own"}
        require(own >= set(self.index["files"]), "files of the index")
        paths, names = self.index["planner"], {*self.index["tensors"], *self.index["objects"]}
        require(not paths or (names <= set(paths) and all(paths.values())), "a path for each name")
        ends = [tuple(path) for path in (paths or {}).values()]
        require(len(set(ends)) == len(ends), "a path of its own for each name")
        self._containers: dict[str, Container] = {}
        self._pack = functools.cache(self._unpacked)
        self._own_codes = functools.cache(self._decoded)

    def container(self, name: str) -> Container:
        if name not in self._containers:
            require(name in self.files, f"the manifest names {name}")
            entry = self.files[name]
            held_by = entry.get("held_by")
            file = Container((self.directory if held_by is None else self.directory.parent / held_by) / name)
            require(len(file.raw) == entry["size"], "size of a file")
            require(entry.get("contents") in (None, file.checksum), "checksum of contents")
            save, rank, kind = re.split("[-.]", name)
            require([file.contents["save"], file.contents["rank"]] == [save, int(rank)], "a file of this name")
            require(kind == "dsq" or file.contents["base"] == f"{save}-{rank}.dsq", "base of a refinement file")
            is_older = entry["role"] in ("ancestor", "older_refinement")
            require(is_older == (save != self.manifest["save_id"]), "save of a file")
            self._containers[name] = file
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
        filled = np.zeros(tensor["shape"], np.uint8)
        for offsets, shape, number, place in tensor["chunks"]:
            name = self.index["files"][number]
            record = self.container(name).contents["records"][place]
            tied = self.index.get("tied", {})
            require(tied.get(record["fqn"], record["fqn"]) == tied.get(fqn, fqn), "a record of the tensor")
            expected = {"offsets": offsets, "shape": shape, "dtype": tensor["dtype"]}
            require({**record, **expected} == record, "as in the index")
            data = np.frombuffer(self._chunk(name, place, record, refined), np.uint8)
            box = tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))
            require(filled[box].shape == tuple(shape), "chunks in their tensor")
            whole[box] = data.reshape(*shape, item)
            filled[box] += 1
        require(bool((filled == 1).all()), "chunks that cover their tensor once")
        return whole.tobytes()

    def _exact(self, file: Container, record: Tree) -> bytes:
        data = b"".join(self._pack(file, number) for number in record["packs"])
        if "at" in record:
            data = data[record["at"] : record["at"] + record["size"]]
        require(len(data) == record["size"], "size of a record")
        return data

    def _unpacked(self, file: Container, number: int) -> bytes:  # section 8
        chain = [(file, file.contents["packs"][number])]
        while len(chain[-1][1]) == 5:
            name, number = chain[-1][1][3]
            file = self.container(name)
            chain.append((file, file.contents["packs"][number]))
            require(chain[-1][1][1:3] == chain[0][1][1:3] and len(chain) < 1000, "packs of a chain fit")
        oldest, (place, item, size) = chain.pop()
        data = unshuffle(oldest.block(place), item, size)
        for file, (place, *_) in reversed(chain):
            data = after(data, file.block(place), item)
        return data

    def _chunk(self, name: str, place: int, record: Tree, refined: bool) -> bytes:
        if record["type"] == "plain":
            data = self._exact(self.container(name), record)
            return data if "stored" not in record else converted(widened(data), record["dtype"])  # it is bfloat16 today
        return converted(self._sum(name, place, record["shape"], refined), record["dtype"])

    def _sum(self, name: str, place: int, shape: list[int], refined: bool) -> npt.NDArray[np.float32]:
        links = [(name, place)]
        while (older := self._record(*links[-1]).get("residual")) is not None:
            require(tuple(older) not in links, "a chain ends")
            links.append((older[0], older[1]))
        total = None
        for link in reversed(links):
            record = self._record(*link)
            require(record["type"] in ("coded", "merged", "plain"), "records with values")
            require(record["shape"] == shape and (total is not None or record["type"] != "merged"), "records that fit")
            if record["type"] == "merged":
                for own in self._steps(*link, record):
                    total = added(total, own)
                continue
            if record["type"] == "plain":
                dtype = record["dtype"]
                require(dtype in ("float64", "float32", "float16", "bfloat16"), "numbers to add to")
                data = self._chunk(*link, record, False)
                with np.errstate(over="ignore"):
                    own = widened(data) if dtype == "bfloat16" else np.frombuffer(data, dtype).astype(np.float32)
            else:
                own = self._elements(*link, record, refined and link == links[0])
            total = own if total is None else added(total, own)
        assert total is not None
        return total

    def _record(self, name: str, place: int) -> Tree:
        record: Tree = self.container(name).contents["records"][place]
        return record

    def _steps(self, name: str, place: int, record: Tree) -> Iterator[npt.NDArray[np.float32]]:
        steps, count = record["steps"], record.get("protected_count", 0)
        k = len(steps[0]) if steps else -1
        require(0 <= k <= 255 and all(len(step) == k for step in steps), "table of steps")
        single = np.zeros((len(steps), 0), "<f4")
        if count:
            raw = unshuffle(self.container(name).block(record["protected"]), 4, 4 * count * len(steps))
            single = np.frombuffer(raw, "<f4").reshape(len(steps), count)
        require(bool(np.isfinite(np.array(steps)).all() and np.isfinite(single).all()), "finite steps")
        require(all(number == float(np.float32(number)) for step in steps for number in step), "steps in fp32")
        codes = self._own_codes(name, place)
        require(max(codes, default=0) <= k and codes.count(k) == count, "codes of the table")
        for step, numbers in zip(steps, single, strict=True):
            rest = iter(numbers)
            yield np.array([step[code] if code < k else next(rest) for code in codes], np.float32)

    def _elements(self, name: str, place: int, record: Tree, refined: bool) -> npt.NDArray[np.float32]:
        file, n = self.container(name), int(np.prod(record["shape"], dtype=np.int64))
        codes = self._own_codes(name, place)
        count, bits, symbols = record.get("protected_count", 0), 0, list[int]()
        protected = widened(unshuffle(file.block(record["protected"]), 2, 2 * count)) if count else np.zeros(0, "<f4")
        beside = f"{name.removesuffix('.dsq')}.refinement"
        if refined and self.manifest["refinement"] == "kept" and beside in self.files:
            other = self.container(beside)
            entry = other.contents["records"].get(str(place), {"bits": 0})
            bits = entry["bits"]
            for where, data in other.steps(entry["blocks"], n) if bits else ():
                assert data is not None
                symbols += self._symbols(entry, where, data, codes[where], n)
            if bits and count:
                protected = np.frombuffer(unshuffle(other.block(entry["protected"]), 4, 4 * count), "<f4")
        book = file.contents["groups"][record["group"]]["codebook"]
        last, scale = len(book["levels"]), scale_of(record.get("exponent", 0) + record.get("shift", 0))
        check_book(book)
        require(codes.count(last) == count and max(codes, default=0) <= last, "codes of the codebook")
        pairs: list[tuple[int, int | None]] = list(zip(codes, symbols if bits else [None] * n, strict=True))
        known = {pair: value(book, pair[0], scale, pair[1], bits) for pair in set(pairs) if pair[0] < last}
        rest = iter(protected)
        values = np.array([known[p] if p in known else next(rest) for p in pairs], np.float32)
        require(len({"unit", "root", "scales", "residual"} & record.keys()) < 2, "one factor at most, and none in sums")
        if "scales" in record:
            values = product(values, self._scales(file, record))
        return values if {"unit", "root"}.isdisjoint(record) else self._times_roots(values, record)

    def _symbols(self, entry: Tree, where: slice, data: bytes, codes: list[int], n: int) -> list[int]:  # section 6
        bits, count = entry["bits"], where.stop - where.start
        whole = -(-count * bits // 8)
        if len(data) == whole or data[:1] not in (b"\1", b"\2"):
            stream = Bits(data if len(data) == whole else unshuffle(data, 1, whole))
            symbols = [stream.field(bits) for _ in range(count)]
            stream.finish()
            return symbols
        if data[:1] == b"\1":
            return refined_by_rans(data, codes, bits, count)
        name, place = entry["older"]
        older = self.container(f"{name.removesuffix('.dsq')}.refinement")
        before = older.contents["records"][str(place)]
        [block] = [block for place, block in older.steps(before["blocks"], n) if place == where]
        assert block is not None
        require(before["bits"] == bits and len(block) == whole, "packed symbols of as many bits")
        more = self._symbols(before, where, block, codes, n)
        return [(a + b) % (1 << bits) for a, b in zip(refined_by_rans(data, None, bits, count), more, strict=True)]

    def _scales(self, file: Container, record: Tree) -> npt.NDArray[np.float32]:
        place, count = file.contents["scales"]
        require(type(count) is int and count >= 0, "number of scales")
        if type(place) is int:
            require(place >= 0 and file.contents["packs"][place][1:3] == [2, 2 * count], "a pack of scales")
            numbers = np.frombuffer(self._pack(file, place), "<u2").astype(np.int64) - (1 << 14)
            require(bool((numbers < 1 << 14).all()), "items of scales")
        else:
            numbers = np.frombuffer(unshuffle(file.block(place), 2, 2 * count), "<i2").astype(np.int64)
        (first, r, c), shape = record["scales"], record["shape"] or [1]
        rows, columns = shape[0], int(np.prod(shape[1:], dtype=np.int64))
        require(type(first) is int and r in (0, rows) and c in (0, columns), "numbers of rows and columns")
        require(0 <= first <= count - r - c, "numbers that are there")
        total = np.full((rows, columns), 1016)
        total += numbers[first : first + r, None] if r else 0
        total += numbers[first + r : first + r + c] if c else 0
        return np.array([2.0 ** (n / 8 - 127) for n in np.clip(total, 8, 2039).reshape(-1)], np.float32)

    def _times_roots(self, values: npt.NDArray[np.float32], record: Tree) -> npt.NDArray[np.float32]:
        fqn, location = record["root" if "root" in record else "unit"], None
        for offsets, shape, number, place in self.index["tensors"][fqn]["chunks"]:
            if [offsets, shape] == [record["offsets"], record["shape"]]:
                location = self.index["files"][number], place
        require(location is not None, "a chunk that measures this one")
        assert location is not None
        other = self._record(*location)
        require({"unit", "root"}.isdisjoint(other), "units are not measured")
        squares = self._sum(*location, record["shape"], False)
        exponents = squares.view(np.uint32) >> 23 & 0xFF
        units = np.array([2.0 ** ((e - 126.5) / 2) for e in range(256)], np.float32)
        if "unit" in record:
            return product(values, units[exponents])
        return product(values, np.where(exponents, np.sqrt(np.abs(squares)), units[0]))

    def _decoded(self, name: str, place: int) -> list[int]:
        return self._codes(name, place, self._record(name, place)["shape"], ())

    def _codes(self, name: str, place: int, shape: list[int], seen: tuple[tuple[str, int], ...]) -> list[int]:
        require((name, place) not in seen, "a chain ends")
        file = self.container(name)
        record = file.contents["records"][place]
        merged = record["type"] == "merged" and not seen
        require((record["type"] == "coded" or merged) and record["shape"] == shape, "a record fits its chain")
        parent = None if merged else record.get("parent")
        previous = None if parent is None else self._codes(parent[0], parent[1], shape, (*seen, (name, place)))
        group = record if merged else file.contents["groups"][record["group"]]
        require(group["coder"] in CODERS, "coder")
        name, model = group["coder"], file.block(group["model"])
        coder = coder_of(name, model)
        require(not previous or max(previous) < coder.contexts, "previous codes below contexts")
        out: list[int] = []
        for where, block in file.steps(record["blocks"], int(np.prod(shape, dtype=np.int64))):
            if block is None:
                require(previous is not None, "previous codes to repeat")
                out += previous[where]
                continue
            before = None if previous is None else bytes(previous[where])
            out += decoded(name, model, block, where.stop - where.start, before)
        return out
