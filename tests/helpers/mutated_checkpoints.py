"""Checkpoints with one thing changed, by accident or on purpose, and what must come of reading them.

An *accident* leaves checksums as they are. A *forgery* changes what a file says, and all checksums that belong to it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import xxhash
import zstandard
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.cli import app
from dsq_ckpt.coding import ChangesCoder, RansCoder
from dsq_ckpt.storage import shard
from tests.helpers import independent_reader as independent
from tests.helpers.edited_checkpoints import Tree
from tests.helpers.states import find_differences, make_blank

NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 255, 1 << 20, 150_000_000, 1 << 31, 1 << 40, (1 << 62) + 1, 1 << 70, 0.5, -2.5, 1e300, "",
    "x", "../x", "/dev/zero", "a\0b", "\x1b[31mred", "\ud800", "0" * 16, [], {}, [[]], [0], ["a"], {"a": 1},
    [1 << 40, 1 << 40], [-1, 5], "float32", "int64", "quint8", "bfloat16", "coded", "plain", "merged", "bytes",
)
"""Values to put in the place of others."""


DAMAGE = ("bit", "bit", "byte", "cut", "longer", "zeros", "noise", "gone", "fifo", "directory", "other", "device")
"""What happens to files."""


class Original(NamedTuple):
    """A whole checkpoint, what it is loaded into, and the values that are then there."""

    path: Path
    like: dict[str, Any]
    values: dict[str, Any]

    @classmethod
    def of(cls, path: Path, like: dict[str, Any]) -> Original:
        """Load it as it is."""
        return cls(path, like, load(path, like))


def load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint gives a state dict."""
    state = make_blank(like)
    dsq_ckpt.load(state, path, no_dist=True, history=dsq_ckpt.SaveHistory())
    return state


class Outcome(NamedTuple):
    """What came of reading a changed checkpoint.

    Attributes:
        kind: "same", "other" values, "refused", or "crashed": an error that is none of ours, or names no file.
        error: that was raised.
    """

    kind: str
    error: BaseException | None = None


def outcome(original: Original, path: Path) -> Outcome:
    """Load a changed copy of a checkpoint."""
    try:
        loaded = load(path, original.like)
    except dsq_ckpt.DSQError as error:
        # Of saving nothing can have failed; and the file is named by its path, or the directory where it is about all.
        named = str(path) in str(error) and not isinstance(error, dsq_ckpt.SaveFailed)
        return Outcome("refused" if named else "crashed", error)
    except Exception as error:
        return Outcome("crashed", error)
    return Outcome("other" if find_differences(loaded, original.values) else "same")


def commands(path: Path) -> Outcome:
    """What the commands say of a changed checkpoint: tables or one line, and nothing that steers a terminal."""
    for command in (["inspect"], ["inspect", "--json"], ["inspect", "--tensors"], ["verify"], ["verify", "--json"]):
        result = CliRunner().invoke(app, [*command, str(path)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return Outcome("crashed", result.exception)
        if characters := [letter for letter in result.output if letter < " " and letter != "\n"]:
            return Outcome("crashed", ValueError(f"{command} prints {characters[0]!r}: {result.output}"))
    return Outcome("same")


def accident(path: Path, rng: random.Random) -> str:
    """Damage one file of a checkpoint, as disks, copies and people do; what was done."""
    file = rng.choice(sorted(path.iterdir()))
    data = file.read_bytes()
    kind = rng.choice(DAMAGE)
    place = rng.randrange(len(data))
    file.unlink()  # it may be a link
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind == "device":
        file.symlink_to(rng.choice(["/dev/zero", "/dev/tty", "/nowhere", file.name]))
    elif kind == "other":
        file.write_bytes(rng.choice([entry for entry in sorted(path.iterdir())]).read_bytes())
    elif kind != "gone":
        changed = bytearray(data)
        if kind == "bit":
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            changed[place] = rng.randrange(256)
        elif kind == "cut":
            del changed[place:]
        elif kind == "longer":
            changed += rng.randbytes(rng.choice([1, 32, 1000]))
        else:
            length = rng.choice([1, 16, 4096])
            fresh = bytes(length) if kind == "zeros" else rng.randbytes(length)
            changed[place : place + length] = fresh[: len(changed[place : place + length])]
        file.write_bytes(changed)
    return f"{kind} {file.name} at {place} of {len(data)}"


def forgery(path: Path, rng: random.Random) -> str:
    """Change what one file of a checkpoint says, with the checksums that belong to it; what was done."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    entry = rng.choice([None, *manifest["files"]])
    if entry is None:
        told = mutate(manifest, rng, {"format", "version", "checksum"})
        reseal(path, manifest)
        return f"manifest.json {told}"
    if entry["role"] == "index":
        data = (path / entry["name"]).read_bytes()
        tree = independent.parse(independent.unzstd(data))
        told = mutate(tree, rng)
        data = frame(tree)
    else:
        container = independent.Container(path / entry["name"])
        blocks, tree = container.raw[: -32 - struct.unpack("<Q", container.raw[-24:-16])[0]], container.contents
        if rng.random() < 0.3:
            blocks, told = other_block(blocks, tree, rng)
        else:
            told = mutate(tree, rng)
        data = sealed(blocks, tree, entry)
    replace_file(path, manifest, entry, data)
    return f"{entry['name']} {told}"


def mutate(tree: Tree, rng: random.Random, spared: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """Change one value of a tree, in place; what was done."""
    nodes = [node for node in walk(tree) if str(node.key) not in spared]
    node = rng.choice(nodes)
    kind = rng.choice(["drop", "nasty", "nasty", "nasty", "move", "near", "twice", "deep"])
    if kind == "drop":
        del node.parent[node.key]
    elif kind == "move":
        node.parent[node.key] = copy.deepcopy(rng.choice(nodes).value)
    elif kind == "near" and isinstance(node.value, int | float):
        node.parent[node.key] = node.value + rng.choice([-1, 1, 7])
    elif kind == "twice" and isinstance(node.parent, list):
        node.parent.append(node.value)
    elif kind == "deep":
        node.parent[node.key] = nested(rng.choice([30, 500, 100_000]))
    else:
        node.parent[node.key] = copy.deepcopy(rng.choice(NASTY))
    return f"{kind} {node.path}"


class Node(NamedTuple):
    """A value of a tree, and where it is."""

    parent: Any
    key: Any
    value: Any
    path: str


def walk(tree: Any, path: str = "") -> Iterator[Node]:
    """All values of a tree."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield Node(tree, key, value, f"{path}/{key}")
        if isinstance(value, dict | list):
            yield from walk(value, f"{path}/{key}")


class nested(list):  # type: ignore[type-arg]
    """Stands for a list in a list in a list, which json.dumps could not write."""

    def __init__(self, depth: int) -> None:
        super().__init__([f"DEEP{depth}"])


def text_of(tree: Any) -> bytes:
    """JSON, with what `nested` stands for."""
    text = json.dumps(tree)
    for depth in (30, 500, 100_000):
        text = text.replace(f'["DEEP{depth}"]', "[" * depth + "]" * depth)
    return text.encode()


def frame(tree: Any) -> bytes:
    """A zstd frame of JSON."""
    return zstandard.ZstdCompressor().compress(text_of(tree))


def other_block(blocks: bytes, tree: Tree, rng: random.Random) -> tuple[bytes, str]:
    """Change bytes of one block, and its checksum; blocks of objects, which are pickles, are spared."""
    objects = {pack for record in tree["records"] if isinstance(record, dict) and record["type"] == "bytes"
               for pack in record["packs"]}
    spared = {tuple(tree["packs"][pack][0]) for pack in objects}
    places = [node.value for node in walk(tree) if isinstance(node.value, list) and len(node.value) == 3
              and isinstance(node.value[2], str) and len(node.value[2]) == 16 and tuple(node.value) not in spared]
    place = rng.choice([place for place in places if place[1]] or [[0, 1, ""]])
    changed = bytearray(blocks)
    start, size = place[0], place[1]
    for _ in range(rng.choice([1, 1, 8])):
        changed[start + rng.randrange(size)] = rng.randrange(256)
    place[2] = xxhash.xxh3_64_hexdigest(bytes(changed[start : start + size]))
    return bytes(changed), f"block {place}"


def sealed(blocks: bytes, tree: Tree, entry: Tree) -> bytes:
    """A data file of these blocks and contents; the manifest's entry learns of its contents."""
    data = frame(tree)
    if entry.get("contents"):
        entry["contents"] = xxhash.xxh3_64_hexdigest(data)
    trailer = struct.pack("<QQQ8s", len(blocks), len(data), xxhash.xxh3_64_intdigest(data), b"\0DSQEND\0")
    return blocks + data + trailer


def replace_file(path: Path, manifest: Tree, entry: Tree, data: bytes) -> None:
    """Put a file in place, and what the manifest says of it."""
    (path / entry["name"]).unlink()
    (path / entry["name"]).write_bytes(data)
    entry.update(size=len(data), checksum=xxhash.xxh3_64_hexdigest(data))
    reseal(path, manifest)


def reseal(path: Path, manifest: Tree) -> None:
    """Put a manifest in place, with its checksum."""
    text = text_of({**manifest, "checksum": "0" * 16})
    (path / "manifest.json").write_bytes(text.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(text).encode(), 1))


def changed(
    original: Original, into: Path, change: Callable[[Path, random.Random], str], rng: random.Random
) -> tuple[str, Path]:
    """A changed copy of a checkpoint, and what was done to it."""
    if into.exists():
        shutil.rmtree(into)
    shutil.copytree(original.path, into)
    return change(into, rng), into


def small_run(root: Path) -> Original:
    """Three checkpoints of a state with every kind of record but `merged`, the last of them with its refinement.

    The second one's codes are coded by lanes, those of the third are lists of changes.
    """
    generator = torch.Generator().manual_seed(7)
    tied = torch.randn(48, 40, generator=generator) * 0.02
    state: dict[str, Any] = {
        "model": {"w": torch.randn(40, 60, generator=generator), "tied": tied, "same": tied, "h": tied.bfloat16() * 3,
                  "layers": [torch.randn(30, 50, generator=generator), torch.zeros(3, dtype=torch.int64)],
                  "bias": torch.randn(11, generator=generator), "empty": torch.empty(3, 0), "flag": torch.tensor(True)},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(40, 60, generator=generator) * 1e-4}}},
        "about": {"step": 3, "name": "run"},
    }
    config = {"quantize": {"min_elements": 1000}, "storage": {"block_elements": 1 << 10, "fsync": False}}
    for number in range(3):
        with patch.object(shard, "fit_fastest", ChangesCoder.fit if number == 2 else RansCoder.fit):
            dsq_ckpt.save(state, root / str(number), config=config, no_dist=True)
        for tensor in (state["model"]["w"], tied, state["model"]["layers"][0]):
            tensor += torch.randn(tensor.shape, generator=generator) * 0.003
    return Original.of(root / "2", state)
