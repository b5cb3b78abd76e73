"""What somebody who knows the format may forge in a checkpoint; checksums are right afterwards.

Each changes the checkpoint at a path, and says what it changed.
"""

from __future__ import annotations

import functools
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from campaigns import forging
from campaigns.forging import Container


@functools.cache
def zeros() -> bytes:
    """Return a frame of 900 MiB."""
    size = 900 << 20
    compressor = zstandard.ZstdCompressor().compressobj(size=size)
    return b"".join([compressor.compress(bytes(1 << 20)) for _ in range(size >> 20)]) + compressor.flush()


class _Runs:
    """Unpickled, it makes a directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def data_file(path: Path, rng: random.Random, suffix: str = ".dsq") -> Path:
    """Return one of the base (or refinement) files."""
    return rng.choice(sorted(file for file in path.iterdir() if file.suffix == suffix))


def manifest(path: Path, rng: random.Random) -> str:
    """Alter fields of the manifest."""
    tree = forging.manifest(path)
    what = forging.alter(tree, rng)
    forging.write_manifest(path, tree)
    return what


def index(path: Path, rng: random.Random) -> str:
    """Alter fields of the index."""
    name, tree = forging.index(path)
    what = forging.alter(tree, rng)
    forging.replace(path, name, forging.zstd(forging.dumps(tree)))
    return what


def contents(path: Path, rng: random.Random, suffix: str = ".dsq") -> str:
    """Alter fields of the contents of a base file, or of a file of another suffix."""
    file, container = _opened(path, rng, suffix)
    what = forging.alter(container.contents, rng)
    forging.replace(path, file.name, container.data())
    return f"{file.name}: {what}"


def refinement(path: Path, rng: random.Random) -> str:
    """Alter fields of a refinement file's contents."""
    return contents(path, rng, ".refinement" if list(path.glob("*.refinement")) else ".dsq")


def blocks(path: Path, rng: random.Random) -> str:
    """Alter bytes of a block: codes, models, packs, symbols."""
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
    """Alter names of files, of ancestors, of the run's other checkpoints, of tensors."""
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
    """Replace a file by one of another save of the same size; the manifest is unchanged."""
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
    """Insert small data that expands to much: frames of zeros, deep JSON, numbers of many digits."""
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
    """Remove, duplicate, move or reshape chunks of tensors, with records that agree."""
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
    """Replace an object by a pickle that executes code, or by one that is malformed."""
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
    """Alter sizes of packs, lengths within shuffled blocks, and what packs are coded given."""
    file, container = _opened(path, rng, ".dsq")
    if not container.contents["packs"]:
        return contents(path, rng)
    pack = rng.choice(container.contents["packs"])
    what = rng.choice(["size", "item", "lengths", "earlier"])
    if what == "earlier":
        names = [*container.contents["requires"], file.name, "../a.dsq", 7]
        number = rng.choice([0, len(container.contents["packs"]), -1, "0"])
        pack[3:] = [[rng.choice(names), number], rng.choice([1, -1])]
    elif what == "size":
        pack[2] = rng.choice([1 << 40, 1 << 62, pack[2] + pack[1], 0, -8])
    elif what == "item":
        pack[1] = rng.choice([0, -1, 3, 1 << 30, pack[1] * 2])
    else:
        start, size = pack[0][:2]
        length = struct.pack("<Q", rng.choice([1 << 63, 1 << 40, 0, size]))
        data = length + bytes(container.head[start + 8 : start + size])
        pack[0] = container.append(data)
        pack[1:3] = rng.choice([pack[1:3], [4, 1 << 40], [8, 1 << 33]])
    forging.replace(path, file.name, container.data())
    return f"{file.name}: {what}"


def units(path: Path, rng: random.Random) -> str:
    """Forge the roots of first moments, and the scales and levels of second moments that roots come from."""
    file, container = _opened(path, rng, ".dsq")
    records = [record for record in container.contents["records"] if record["type"] == "coded"]
    measured = [record for record in records if "root" in record]
    if not measured:
        return contents(path, rng)
    record = rng.choice(measured)
    what = rng.choice([
        "name", "name", "remove", "another has one", "residual", "levels", "group", "dtype", "scales", "scales",
        "number",
    ])
    if what == "name":
        names_of = [other["fqn"] for other in container.contents["records"]]
        record[rng.choice(["root", "root", "unit"])] = rng.choice([*names_of, *forging.NAMES, None, 3, [], {}])
    elif what == "remove":
        del record["root"]
    elif what == "another has one":
        rng.choice(records)[rng.choice(["root", "unit"])] = record["root"]
    elif what == "residual":
        record["residual"] = [file.name, rng.randrange(len(container.contents["records"]))]
    elif what == "dtype":
        record["dtype"] = rng.choice(["float64", "bfloat16", "float16", "int32"])
    else:
        (squares,) = (other for other in records if other["fqn"] == record["root"])
        if what == "scales":
            numbers = squares.setdefault("scales", [0, 0, 0])
            place = rng.randrange(3)
            numbers[place] = rng.choice([*forging.NUMBERS, numbers[place] + 1, -1, 0, None, "x", True])
            rng.choice([squares, record])["scales"] = rng.choice([numbers, numbers, numbers[:2], None, {}])
        elif what == "number":
            known = container.contents.get("scales", [0, 0])
            place = rng.randrange(2)
            known[place] = rng.choice([known[place] + 1, known[place] - 1, -1, 1 << 40, None, [0, 2, ""], True])
            container.contents["scales"] = rng.choice([known, known, None, [], known[:1]])
        elif what == "group":
            squares["group"], record["group"] = record["group"], squares["group"]
        else:
            book = container.contents["groups"][squares["group"]]["codebook"]
            place = rng.randrange(len(book["levels"]))
            level = rng.choice([0.0, -1.0, 1e300, 1e-320, 3.5e38, float("nan"), None, "x", 1e-40])
            for levels in (book["levels"], *book["cells"]):
                levels[place] = level
    forging.replace(path, file.name, container.data())
    return f"{file.name}: {what} of {record['fqn']}"


def layered(path: Path, rng: random.Random) -> str:
    """Alter blocks of refinement that are coded given the codes, and their tables."""
    if not list(path.glob("*.refinement")):
        return blocks(path, rng)
    file, container = _opened(path, rng, ".refinement")
    records = list(container.contents["records"].values())
    every = [place for record in records for place in record["blocks"]]
    coded = [place for place in every if container.head[place[0]] == 1]
    place = rng.choice(coded)
    start, size = place[:2]
    data = bytearray(container.head[start : start + size])
    (model,) = struct.unpack_from("<I", data, 1)
    what = rng.choice(["model", "codes", "size", "cut", "other", "of other codes", "bits", "longer", "packed"])
    if what == "model":
        data[5 + rng.randrange(model)] ^= 1 << rng.randrange(8)
    elif what == "codes":
        data[5 + model + rng.randrange(size - 5 - model)] ^= 1 << rng.randrange(8)
    elif what == "size":
        struct.pack_into("<I", data, 1, rng.choice([0, 1, model - 1, model + 1, size - 5, size, (1 << 32) - 1]))
    elif what == "cut":
        del data[rng.randrange(1, size) :]
    elif what == "other":
        other = rng.choice(every)
        data = bytearray(container.head[other[0] : other[0] + other[1]])
    elif what == "of other codes":
        other = rng.choice(coded)
        (length,) = struct.unpack_from("<I", container.head, other[0] + 1)
        table = container.head[other[0] + 5 : other[0] + 5 + length]
        data = bytearray(struct.pack("<BI", 1, length) + table + data[5 + model :])
    elif what == "bits":
        rng.choice(records)["bits"] = rng.choice([0, 1, 2, 3, 4, 8, 9, 255, -1, True, 2.0, None])
    elif what == "longer":
        data += rng.randbytes(rng.choice([1, 2, 100]))
    else:  # as many bytes as packed symbols take
        data = (data * 2)[:384]
    place[:] = container.append(bytes(data))
    forging.replace(path, file.name, container.data())
    return f"{file.name}: {what} of block at {start}"


def _opened(path: Path, rng: random.Random, suffix: str) -> tuple[Path, Container]:
    file = data_file(path, rng, suffix)
    return file, Container(file.read_bytes())


FORGERIES: tuple[Callable[[Path, random.Random], str], ...] = (
    manifest, index, index, contents, contents, refinement, blocks, blocks, names, other_save, bomb, chunks, chunks,
    objects, shuffled, units, units, layered, layered,
)
