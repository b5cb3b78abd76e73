"""Files of a checkpoint changed by hand, with the checksums that belong to them, by the rules of `docs/format.md`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from tests.helpers import independent_reader as independent

Tree = dict[str, Any]


def rewrite(path: Path, manifest: Tree) -> None:
    """Put a manifest in place, with its checksum, by the rules of section 2."""
    text = json.dumps({**manifest, "checksum": "0" * 16}).encode()
    (path / "manifest.json").write_bytes(text.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(text).encode(), 1))


def replace_file(path: Path, name: str, data: bytes) -> None:
    """Replace a file, and what the manifest says of it."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_bytes())
    (entry,) = (entry for entry in manifest["files"] if entry["name"] == name)
    entry.update(size=len(data), checksum=xxhash.xxh3_64_hexdigest(data))
    if entry.get("contents"):
        entry["contents"] = f"{struct.unpack('<Q', data[-16:-8])[0]:016x}"
    rewrite(path, manifest)


def zstd(tree: Any) -> bytes:
    return zstandard.ZstdCompressor().compress(json.dumps(tree).encode())


def edit_contents(path: Path, change: Callable[[Tree], Any], after: bytes = b"", suffix: str = "dsq") -> None:
    save = json.loads((path / "manifest.json").read_bytes())["save_id"]
    (name,) = (file.name for file in path.glob(f"{save}-*.{suffix}"))
    file = independent.Container(path / name)
    (start,) = struct.unpack("<Q", file.raw[-32:-24])
    change(file.contents)
    data = zstd(file.contents) + after
    trailer = struct.pack("<QQQ8s", start, len(data), xxhash.xxh3_64_intdigest(data), file.raw[-8:])
    replace_file(path, name, file.raw[:start] + data + trailer)


def edit_index(path: Path, change: Callable[[Tree], Any], after: bytes = b"") -> None:
    reader = independent.Reader(path)
    (name,) = (name for name, entry in reader.files.items() if entry["role"] == "index")
    change(reader.index)
    replace_file(path, name, zstd(reader.index) + after)
