"""Files of checkpoints written by somebody who knows the format: all checksums are right, what they cover is not.

What is read from a forged checkpoint is refused, or is what its files state: the values that the reader of
`tests/format` finds, which was written from `docs/format.md` alone, and the same twice, whatever lay in memory before.
"""

from __future__ import annotations

import functools
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zstandard

import dsq_ckpt
from campaigns import forging, subjects
from campaigns.accidents import LOOKS, Accidents
from campaigns.forging import Container
from campaigns.harness import Found
from campaigns.subjects import State, command, refuses, same
from tests.format import independent_reader as independent
from tests.states import bits


@functools.cache
def zeros() -> bytes:
    """A frame of 900 MiB."""
    size = 900 << 20
    made = zstandard.ZstdCompressor().compressobj(size=size)
    return b"".join([made.compress(bytes(1 << 20)) for _ in range(size >> 20)]) + made.flush()


class _Runs:
    """Unpickled, it makes a directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def data_file(path: Path, rng: random.Random, suffix: str = ".dsq") -> Path:
    """One of the base (or refinement) files."""
    return rng.choice(sorted(file for file in path.iterdir() if file.suffix == suffix))


def manifest(path: Path, rng: random.Random) -> str:
    """Fields of the manifest."""
    tree = forging.manifest(path)
    what = forging.alter(tree, rng)
    forging.write_manifest(path, tree)
    return what


def index(path: Path, rng: random.Random) -> str:
    """Fields of the index."""
    name, tree = forging.index(path)
    what = forging.alter(tree, rng)
    forging.replace(path, name, forging.zstd(forging.dumps(tree)))
    return what


def contents(path: Path, rng: random.Random) -> str:
    """Fields of a base file's contents."""
    file, container = _opened(path, rng, ".dsq")
    what = forging.alter(container.contents, rng)
    forging.replace(path, file.name, container.data())
    return f"{file.name}: {what}"


def refinement(path: Path, rng: random.Random) -> str:
    """Fields of a refinement file's contents."""
    if not list(path.glob("*.refinement")):
        return contents(path, rng)
    file, container = _opened(path, rng, ".refinement")
    what = forging.alter(container.contents, rng)
    forging.replace(path, file.name, container.data())
    return f"{file.name}: {what}"


def blocks(path: Path, rng: random.Random) -> str:
    """Bytes of a block: codes, models, packs, symbols."""
    suffixes = {file.suffix for file in path.iterdir()} & {".dsq", ".refinement"}
    file, container = _opened(path, rng, rng.choice(sorted(suffixes)))
    place = rng.choice([place for place in forging.places(container.contents) if place[1]])
    start, size = place[:2]
    data = bytearray(container.head[start : start + size])
    change = rng.choice(["flip", "cut", "longer", "noise", "empty"])
    if change == "flip":
        data[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif change == "cut":
        del data[rng.randrange(size) :]
    elif change == "longer":
        data += rng.randbytes(rng.choice([1, 2, 100]))
    elif change == "noise":
        at = rng.randrange(size)
        data[at:] = rng.randbytes(size - at)
    else:
        data.clear()
    place[:] = container.append(bytes(data))
    forging.replace(path, file.name, container.data())
    return f"{file.name}: {change} block at {start}"


def names(path: Path, rng: random.Random) -> str:
    """Names of files, of ancestors, of the run's other checkpoints, of tensors."""
    tree = forging.manifest(path)
    name = rng.choice(forging.NAMES)
    key = rng.choice(["previous_name", "parent_name", "files", "tensor", "group", "save_id"])
    if key == "files":
        entry = rng.choice(tree["files"])
        if "/" not in name and name.strip(".") and "\0" not in name and len(name) < 256 and rng.random() < 0.5:
            (path / entry["name"]).rename(path / name)
        entry["name"] = name
    elif key == "group":
        tree["groups"][name] = next(iter(tree["groups"].values()), {})
    elif key == "tensor":
        tree["nonfinite"] = [name]
        forging.write_manifest(path, tree)
        index_name, place = forging.index(path)
        fqn = rng.choice(sorted(place["tensors"]))
        place["tensors"][name] = place["tensors"].pop(fqn)
        if rng.random() < 0.5 and place["planner"]:
            place["planner"][name] = place["planner"].pop(fqn)
        forging.replace(path, index_name, forging.zstd(forging.dumps(place)))
        return f"tensor {fqn} -> {name!r}"
    elif key == "previous_name":
        victim = path.parent.parent / f"{path.parent.name}-victim" / "step-3"
        tree[key] = rng.choice([f"../{victim.parent.name}/step-3", str(victim), name])
        tree["previous"] = forging.manifest(victim)["save_id"]
    else:
        tree[key] = name
    forging.write_manifest(path, tree)
    return f"{key}: {name!r}"


def other_save(path: Path, rng: random.Random) -> str:
    """A file of another save of the same size, in the place of one; the manifest is as it was."""
    target = data_file(path, rng)
    others = sorted((path.parent.parent / f"{path.parent.name}-other").glob(f"*/*{target.suffix}"))
    others += sorted(path.glob(f"*{target.suffix}"))
    source = Container(rng.choice(others).read_bytes())
    size = target.stat().st_size
    if rng.random() < 0.5:
        source.contents |= {"save": target.name[:16], "rank": int(target.stem[17:])}
    whole = source.data()
    if len(whole) > size:
        return "nothing"
    target.unlink()
    target.write_bytes(source.data(bytes(size - len(whole))))
    return f"{target.name} is another save's"


def bomb(path: Path, rng: random.Random) -> str:
    """Little data that stands for much: frames of zeros, deep JSON, numbers of many digits."""
    what = rng.choice(["index", "contents", "block", "manifest", "deep index", "deep contents", "digits"])
    deep = forging.zstd(b"[" * 1_000_000)
    if what in ("index", "deep index"):
        forging.replace(path, forging.index(path)[0], zeros() if what == "index" else deep)
    elif what in ("manifest", "digits"):
        tree = forging.manifest(path)
        tree["config"] = forging.Deep() if what == "manifest" else [0] * 1_000_000
        tree["created"] = 10**4000 if what == "digits" else tree["created"]
        forging.write_manifest(path, tree)
    else:
        file, container = _opened(path, rng, ".dsq")
        if what == "block":
            rng.choice([place for place in forging.places(container.contents)])[:] = container.append(zeros())
            data = container.data()
        else:
            data = container.data(frame=zeros() if what == "contents" else deep)
        forging.replace(path, file.name, data)
    return what


def chunks(path: Path, rng: random.Random) -> str:
    """Tensors of which pieces are missing, doubled, moved or of another shape, and records that agree with that."""
    name, tree = forging.index(path)
    fqn = rng.choice(sorted(tree["tensors"]))
    tensor = tree["tensors"][fqn]
    what = rng.choice(["none", "double", "smaller", "larger", "shape", "dtype", "record", "planner", "objects"])
    if what == "none":
        tensor["chunks"] = []
    elif what == "double":
        tensor["chunks"] *= 2
    elif what == "shape":
        tensor["shape"] = rng.choice([tensor["shape"][::-1], [1 << 40], [0], [], [*tensor["shape"], 1], [-1]])
    elif what == "dtype":
        tensor["dtype"] = rng.choice(["float64", "int8", "bool", "complex64", "float8_e4m3fn", "float", "Tensor"])
    elif what == "planner" and tree["planner"]:
        fqn = rng.choice(sorted(tree["planner"]))
        if rng.random() < 0.5:
            del tree["planner"][fqn]
        else:
            tree["planner"][fqn] = rng.choice([
                [], ["meta"], ["meta", 150_000_000], ["meta", "history", 150_000_000], ["a"] * 2000,
                [0], ["__class__", "__dict__"], tree["planner"][rng.choice(sorted(tree["planner"]))],
            ])
    elif what == "objects" and tree["objects"]:
        first, second = (rng.choice(sorted(tree["objects"])) for _ in range(2))
        tree["objects"][first] = tree["objects"][second]
    elif tensor["chunks"]:
        _, _, number, place = tensor["chunks"][0]
        file = path / tree["files"][number]
        container = Container(file.read_bytes())
        record = container.contents["records"][place]
        if what == "record":
            tensor["chunks"][0][3] = rng.randrange(len(container.contents["records"]))
        elif record["shape"]:
            by = 1 if what == "larger" else -1
            for shape in (tensor["chunks"][0][1], record["shape"], *([tensor["shape"]] if rng.random() < 0.3 else [])):
                shape[0] += by
        forging.replace(path, file.name, container.data())
    forging.replace(path, name, forging.zstd(forging.dumps(tree)))
    return f"{what} of {fqn}"


def objects(path: Path, rng: random.Random) -> str:
    """Pickles that do something, in the place of objects."""
    _, tree = forging.index(path)
    fqn = rng.choice(sorted(tree["objects"]))
    number, place = tree["objects"][fqn]
    file = path / tree["files"][number]
    container = Container(file.read_bytes())
    data = rng.choice([pickle.dumps(_Runs(), protocol) for protocol in (0, 2, 4)] + [b"", b"\x80\x04.", b"PK\3\4x"])
    record, packs = container.contents["records"][place], container.contents["packs"]
    record.pop("at", None)
    record.update(size=len(data), packs=[len(packs)])
    packs.append([container.append(forging.zstd(data)), 1, len(data)])
    forging.replace(path, file.name, container.data())
    return f"{fqn} = {data[:20]!r}"


def shuffled(path: Path, rng: random.Random) -> str:
    """Sizes of packs, and lengths within shuffled blocks."""
    file, container = _opened(path, rng, ".dsq")
    if not container.contents["packs"]:
        return contents(path, rng)
    pack = rng.choice(container.contents["packs"])
    what = rng.choice(["size", "item", "lengths"])
    if what == "size":
        pack[2] = rng.choice([1 << 40, 1 << 62, pack[2] + pack[1], 0, -8])
    elif what == "item":
        pack[1] = rng.choice([0, -1, 3, 1 << 30, pack[1] * 2])
    else:
        start, size = pack[0][:2]
        length = struct.pack("<Q", rng.choice([1 << 63, 1 << 40, 0, size]))
        data = length + bytes(container.head[start + 8 : start + size])
        pack[0] = container.append(data)
        pack[1:] = rng.choice([pack[1:], [4, 1 << 40], [8, 1 << 33]])
    forging.replace(path, file.name, container.data())
    return f"{file.name}: {what}"


def _opened(path: Path, rng: random.Random, suffix: str) -> tuple[Path, Container]:
    file = data_file(path, rng, suffix)
    return file, Container(file.read_bytes())


FORGERIES: tuple[Callable[[Path, random.Random], str], ...] = (
    manifest, index, index, contents, contents, refinement, blocks, blocks, names, other_save, bomb, chunks, chunks,
    objects, shuffled,
)


class Forged(Accidents):
    """Files forged with right checksums."""

    honest = False
    name = "forged"
    full = 8000

    def kind(self, number: int) -> str:
        """What is forged."""
        return self._forgery(number)[3].__name__.replace("_", " ")

    def _forgery(self, number: int) -> tuple[random.Random, str, str, Callable[[Path, random.Random], str]]:
        rng, name, way, _ = self.drawn(number)
        return rng, name, way, rng.choice(FORGERIES)

    def trial(self, number: int) -> Found:
        """Forge something in a copy, and read that."""
        rng, name, way, forge = self._forgery(number)
        shutil.rmtree(self.work, ignore_errors=True)
        for run in (name, f"{name}-other", f"{name}-victim"):
            shutil.copytree(self.base / run, self.work / run)
        os.chdir(self.work)
        path, victim = self.work / name / "step-3", self.work / f"{name}-victim"
        what = forge(path, rng)
        with subjects.watched(self.work) as seen:
            found = self.judge(name, way, path)
        if (self.work / "executed").exists():
            seen.append("a pickle was executed")
        if _listing(victim) != _listing(self.base / victim.name):
            seen.append("files of another run were changed")
        if seen:
            return Found("wrong", f"{name}, {way}, {what}: {seen[:3]}")
        return Found(found.outcome, found.what and f"{name}, {way}, {what}: {found.what}")

    def judge(self, name: str, way: str, path: Path, altered: bool = False) -> Found:
        """Read a checkpoint in one way."""
        if way in ("verify", *LOOKS):
            dsq_ckpt.forget()
            words = LOOKS[way](path) if way in LOOKS else (str(path),)
            return Found("detected" if command(way, *words)[0] else "unchanged")
        if way not in ("load", "load all"):
            return super().judge(name, way, path)
        dsq_ckpt.forget()
        values: list[State] = []
        read, kind = (subjects.read_like, "like") if way == "load" else (subjects.read_all, "all")
        refused = refuses(lambda: values.extend(read(path, poison) for poison in (85, 170)), path)
        if refused is not None:
            return refused
        if not same(*values):
            return Found("wrong", "two loads give different values: memory that nobody wrote to")
        if same(values[0], self.expected[name][kind]):
            return Found("unchanged")
        problem = stated(path, values[0])
        return Found("wrong", problem) if problem else Found("unchanged")


def stated(path: Path, state: State) -> str | None:
    """What in a state is not as the files at `path` state; None: all is."""
    try:
        reader = independent.Reader(path)
        for fqn, keys in reader.index["planner"].items():
            value: Any = state
            try:
                for key in keys:
                    value = value[key]
            except (KeyError, IndexError):
                if keys[0] in state:
                    return f"'{fqn}' was not loaded"
                continue
            if fqn in reader.index["tensors"]:
                tensor = reader.index["tensors"][fqn]
                found = (str(value.dtype).removeprefix("torch."), list(value.shape))
                if found != (tensor["dtype"], tensor["shape"]) or not _equal(value, fqn, reader):
                    return f"'{fqn}' is not as the file states"
        missing = [fqn for fqn in (*reader.index["tensors"], *reader.index["objects"])
                   if fqn not in reader.index["planner"]]
        if missing:
            return f"{missing} not loaded, no error"
    except Exception as error:
        return f"loaded, although docs/format.md refuses it: {type(error).__name__}: {error}"
    return None


def _equal(value: torch.Tensor, fqn: str, reader: independent.Reader) -> bool:
    """Whether a tensor is what the reader finds, but for the bits of NaNs; what has no elements has nothing to find."""
    if not value.numel():
        return True
    other = torch.frombuffer(bytearray(reader.tensor(fqn)), dtype=value.dtype).view(value.shape)
    return torch.equal(value.isnan(), other.isnan()) and bits(value.nan_to_num()) == bits(other.nan_to_num())


def _listing(run: Path) -> list[str]:
    return sorted(str(file.relative_to(run)) for file in run.rglob("*"))
