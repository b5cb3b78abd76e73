"""Files of checkpoints written anew with the checksums that belong to them, by the rules of `docs/format.md`."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
import zstandard

Tree = dict[str, Any]
_TRAILER = struct.Struct("<QQQ8s")
_DEPTH = 100_000


class Deep:
    """Arrays in arrays, deeper than parsers by recursion go."""


def dumps(tree: Any) -> bytes:
    """Return JSON, with `Deep` values and duplicate keys (`Twice`) written out."""
    text = json.dumps(tree, default=lambda value: f"\0{type(value).__name__}\0")
    return text.replace('"\\u0000Deep\\u0000"', "[" * _DEPTH + "]" * _DEPTH).encode()


def checksum(data: bytes) -> str:
    """Return the checksum of a file or block."""
    return xxhash.xxh3_64_hexdigest(data)


def write_manifest(directory: Path, tree: Tree) -> None:
    """Write a manifest with the checksum of its own bytes."""
    first = {"format": tree.get("format"), "version": tree.get("version"), "checksum": "0" * 16}
    rest = {key: value for key, value in tree.items() if key not in first}
    head = {key: value for key, value in first.items() if key == "checksum" or key in tree}
    data = dumps({**head, **rest})
    (directory / "manifest.json").write_bytes(data.replace(b"0" * 16, checksum(data).encode(), 1))


def manifest(directory: Path) -> Tree:
    """Return the manifest, unchecked."""
    tree: Tree = json.loads((directory / "manifest.json").read_bytes())
    return tree


def replace(directory: Path, name: str, data: bytes) -> None:
    """Replace a file, and what the manifest says of it."""
    (directory / name).unlink()  # it may be linked elsewhere
    (directory / name).write_bytes(data)
    tree = manifest(directory)
    for entry in tree["files"]:
        if entry["name"] == name:
            entry.update(size=len(data), checksum=checksum(data))
            seal(entry, data)
    write_manifest(directory, tree)


def seal(entry: Tree, data: bytes) -> None:
    """Update all else that an entry of the manifest says of a container's contents."""
    if entry.get("contents") is not None:
        entry["contents"] = f"{_TRAILER.unpack(data[-32:])[2]:016x}"


def index(directory: Path) -> tuple[str, Tree]:
    """Return the name and content of the index."""
    (name,) = (entry["name"] for entry in manifest(directory)["files"] if entry["role"] == "index")
    tree: Tree = json.loads(zstandard.ZstdDecompressor().decompress((directory / name).read_bytes()))
    return name, tree


class Container:
    """A base or refinement file, or a segment, taken apart."""

    def __init__(self, data: bytes) -> None:
        start, size, _, self.end = _TRAILER.unpack(data[-_TRAILER.size :])
        self.head = bytearray(data[:start])
        self.contents: Tree = json.loads(zstandard.ZstdDecompressor().decompress(data[start : start + size]))

    def data(self, padding: bytes = b"", frame: bytes | None = None) -> bytes:
        """Return the file, with right checksums."""
        head = bytes(self.head) + padding
        packed = zstd(dumps(self.contents)) if frame is None else frame
        return head + packed + _TRAILER.pack(
            len(head), len(packed), xxhash.xxh3_64_intdigest(packed), self.end
        )

    def append(self, data: bytes) -> list[Any]:
        """Return the place of a new block."""
        place = [len(self.head), len(data), checksum(data)]
        self.head += data
        return place


def zstd(data: bytes) -> bytes:
    """Return one frame."""
    return zstandard.ZstdCompressor().compress(data)


def places(tree: Any) -> Iterator[list[Any]]:
    """Yield every [offset, size, checksum] in contents."""
    if isinstance(tree, list) and len(tree) == 3 and isinstance(tree[2], str) and len(tree[2]) == 16:
        yield tree
    elif isinstance(tree, (list, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from places(value)


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Yield every (container, key) below a tree."""
    locations = []
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        locations.append((tree, key))
        if isinstance(tree[key], (dict, list)):
            locations += nodes(tree[key])
    return locations


NAMES = (
    "", ".", "..", "../victim/x", "/etc/passwd", "a/b", "a\\b", "\0", "x" * 300, "manifest.json", ".hidden.tmp",
    "\x1b[31mred\x1b]0;title\x07", "x\ny", "\u202e", "ü", "CON", "%s%n", "-rf", "~", "$HOME", "file:///x",
)
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 255, 256, 1 << 15, 1 << 31, 150_000_000, (1 << 40), 1 << 62, 1 << 63, (1 << 64) - 1, 10**30, 10**400,
    0.5, -0.0, 1e308, 1e-320, True, False,
)
OTHERS: tuple[Any, ...] = (
    None, [], {}, [[]], [0], ["x"], {"x": 1}, [None, None], [0, 0, "0" * 16], [-1, 10, "0" * 16], [[1 << 40]], Deep(),
    float("nan"), float("inf"), "float32", "float8_e4m3fn", "coded", "plain", "own", "0" * 16,
)


def value(rng: random.Random, tree: Any) -> Any:
    """Return a replacement of a value."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(NAMES)
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return copy.deepcopy(rng.choice(OTHERS))
    holder, key = rng.choice(nodes(tree))
    if kind == 3:
        return copy.deepcopy(holder[key])
    old = holder[key]
    return old + rng.choice([-1, 1, 2, -old, old]) if isinstance(old, (int, float)) else copy.deepcopy(old)


def alter(tree: Any, rng: random.Random) -> str:
    """Make one or two changes anywhere in a tree; return their descriptions."""
    return "; ".join(_alter(tree, rng) for _ in range(rng.choice([1, 1, 1, 2])))


def _alter(tree: Any, rng: random.Random) -> str:
    every = nodes(tree)
    # All places alike would be numbers of long arrays nearly always.
    holder, key = min(rng.sample(every, min(4, len(every))), key=lambda node: isinstance(node[0], list))
    old = holder[key]
    change = rng.choice(["set", "set", "set", "near", "remove", "rename", "double", "swap", "wrap"])
    if change == "near" and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = rng.choice([old + 1, old - 1, -old, old * 2, old + 0.5, str(old), [old], rng.choice(NUMBERS)])
    elif change == "remove":
        del holder[key]
    elif change == "rename" and isinstance(holder, dict):
        holder[rng.choice([*NAMES, f"{key}x", key.upper()])] = holder.pop(key)
    elif change == "double":
        if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
        else:
            holder[f"{key}2"] = copy.deepcopy(old)
    elif change == "swap":
        other, place = rng.choice(every)
        try:
            holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(old)
        except (KeyError, IndexError):
            return "nothing"
    elif change == "wrap":
        holder[key] = [old]
    else:
        holder[key] = value(rng, tree)
    return f"{change} {key!r}: {str(old)[:60]} -> {str(holder[key])[:60] if _has(holder, key) else 'gone'}"


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)
