"""Files of checkpoints changed without their checksums, as disks, copies and people do it.

What is read is what was saved, or the damage is reported, with the name of a file.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

import dsq_ckpt
from campaigns import subjects
from campaigns.harness import Campaign, Found, told
from campaigns.subjects import SUBJECTS, command, refuses, same


def flip(file: Path, rng: random.Random) -> None:
    """Flip 1 to 8 bits."""
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    """Cut it anywhere, also at its beginning."""
    data = file.read_bytes()
    file.write_bytes(data[: rng.choice([0, 1, len(data) - 1, rng.randrange(len(data))])])


def extend(file: Path, rng: random.Random) -> None:
    """Append zeros, noise or itself."""
    data = file.read_bytes()
    file.write_bytes(data + rng.choice([b"\0", bytes(4096), rng.randbytes(100), data]))


def zeros(file: Path, rng: random.Random) -> None:
    """Overwrite a range with zeros, as a file system leaves where data was not flushed."""
    data = bytearray(file.read_bytes())
    start = rng.choice([0, rng.randrange(len(data))])
    size = rng.choice([1, 16, 512, len(data)])
    data[start : start + size] = bytes(len(data[start : start + size]))
    file.write_bytes(data)


def noise(file: Path, rng: random.Random) -> None:
    """Overwrite a range with noise."""
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data))
    size = min(rng.choice([1, 16, 512]), len(data) - start)
    data[start : start + size] = rng.randbytes(size)
    file.write_bytes(data)


def move_within(file: Path, rng: random.Random) -> None:
    """Move a piece of the file to the place of another, or take it out."""
    data = bytearray(file.read_bytes())
    start, target, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.randrange(1, 256)
    piece = data[start : start + size]
    if rng.random() < 0.5:
        data[target : target + len(piece)] = piece
    else:
        del data[start : start + size]
    file.write_bytes(data)


def foreign(file: Path, rng: random.Random) -> None:
    """Replace the content by content of another kind."""
    size = file.stat().st_size
    file.write_bytes(rng.choice([
        b"{}", b"[]", b"null", b'"', b"\x80\x04.", b"PK\3\4" + bytes(100), rng.randbytes(size), bytes(size),
        b"[" * 200_000, b'{"format":"dsq_ckpt","version":' + b"9" * 5000 + b"}",
    ]))


def other_file(file: Path, rng: random.Random) -> None:
    """Put in the content of a neighbour, or of a file of another save with the same role."""
    runs = [run for run in file.parent.parent.parent.iterdir() if run.is_dir()]
    neighbours = [other for run in runs for step in run.iterdir() for other in step.iterdir()
                  if other.suffix == file.suffix or step == file.parent]
    source = rng.choice([other for other in neighbours if other.name != file.name and other.is_file()])
    file.write_bytes(source.read_bytes())


def swap(file: Path, rng: random.Random) -> None:
    """Exchange the contents of two files of the directory."""
    other = rng.choice([entry for entry in file.parent.iterdir() if entry != file])
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)


def remove(file: Path, rng: random.Random) -> None:
    """Remove the file, or give it another name."""
    if rng.random() < 0.5:
        file.unlink()
    else:
        file.rename(file.with_name(f"{file.name}.bak"))


def special(file: Path, rng: random.Random) -> None:
    """Put a directory, a FIFO, or a link to a device, itself, nowhere or a directory in the file's place."""
    size = file.stat().st_size
    file.unlink()
    kind = rng.randrange(8)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        file.mkdir()
        (file / "x").write_bytes(bytes(size))
    else:
        file.symlink_to(["/dev/zero", "/dev/urandom", file.name, "nowhere", "/proc/self"][kind - 3])


ALTERATIONS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip, flip, cut, extend, zeros, noise, move_within, foreign, other_file, swap, remove, special,
)
LOOKS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "log": lambda path: (str(path.parent),), "inspect": lambda path: (str(path),),
    "gc": lambda path: ("--dry-run", str(path.parent)),
}
WAYS = ("load", "load all", "export", "verify", "describe", "continue", *LOOKS)
WEIGHTS = (5, 4, 2, 2, 1, 2, 1, 1, 1)


class Accidents(Campaign):
    """Files changed with wrong checksums."""

    honest = True
    """Values of a parent are what was saved, so that the differences to them are small."""
    name = "accidents"
    full = 6000
    few = 24
    memory = 1 << 30

    def prepare(self) -> None:
        """Make the subjects."""
        subjects.make(self.directory / "base")

    def begin(self) -> None:
        """Read everything once, so that all that is kept for ever is in memory."""
        torch.set_num_threads(1)
        self.base = self.directory / "base"
        self.expected = torch.load(self.base / "expected.pt", weights_only=False)
        self.work = self.directory / f"lane-{os.getpid()}"
        for name in SUBJECTS:
            for way in WAYS:
                shutil.copytree(self.base / name, self.work / "run")
                verdict = self.judge(name, way, self.work / "run" / "step-3")
                assert verdict.outcome in ("unchanged", "accepted"), (name, way, verdict)
                shutil.rmtree(self.work)

    def drawn(self, number: int) -> tuple[random.Random, str, str, Callable[[Path, random.Random], None]]:
        """Draw the subject and the alteration of a trial."""
        rng = self.rng(number)
        return rng, rng.choice(SUBJECTS), rng.choices(WAYS, WEIGHTS)[0], rng.choice(ALTERATIONS)

    def kind(self, number: int) -> str:
        """Return the alteration."""
        return self.drawn(number)[3].__name__.replace("_", " ")

    def trial(self, number: int) -> Found:
        """Alter one file of a copy, and read that."""
        rng, name, way, alter = self.drawn(number)
        shutil.rmtree(self.work, ignore_errors=True)
        for run in (name, f"{name}-other"):
            shutil.copytree(self.base / run, self.work / run)
        path = self.work / name / "step-3"
        file = rng.choice(sorted(path.iterdir()))
        before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
        alter(file, rng)
        altered = {
            entry.name: entry.read_bytes() if entry.is_file() else None for entry in path.iterdir()
        } != before
        with subjects.watched(self.work) as seen:
            verdict = self.judge(name, way, path, altered)
        if seen:
            return Found("wrong", f"{way}, {file.name}: {seen[:3]}")
        return Found(verdict.outcome, verdict.what and f"{name}, {way}, {file.name}: {verdict.what}")

    def judge(self, name: str, way: str, path: Path, altered: bool = False) -> Found:
        """Read a checkpoint in one way."""
        if way in ("load", "load all", "export"):
            result = self.read(way, path)
            if isinstance(result, Found):
                return result
            expected = self.expected[name]["like" if way == "load" else "all"]
            return Found("unchanged") if same(result, expected) else self.other(path, result)
        if way == "verify":
            status, output = command("verify", str(path))
            if status:
                return Found("detected")
            return Found("wrong", f"dsq verify is content: {output}") if altered else Found("unchanged")
        if way in LOOKS:
            return Found("detected" if command(way, *LOOKS[way](path))[0] else "unchanged")
        if way == "describe":
            refused = refuses(lambda: (dsq_ckpt.describe(path), dsq_ckpt.latest(path.parent)), path)
            return refused or Found("unchanged")
        return self.go_on(name, path)

    def read(self, way: str, path: Path) -> subjects.State | Found:
        """Load or export, and return the outcome, or that it was refused."""
        if way == "export":
            target = path.parent.parent / "out.pt"
            status, output = command("export", str(path), str(target))
            if status or "left out" in output:
                return Found("detected")
            return dict(torch.load(target, weights_only=True))
        values: list[subjects.State] = []
        read = subjects.read_like if way == "load" else subjects.read_all
        return refuses(lambda: values.append(read(path)), path) or values[0]

    def other(self, path: Path, state: subjects.State) -> Found:
        """Return the outcome for values other than those saved."""
        return Found("wrong", "other values, no error")

    def go_on(self, name: str, path: Path) -> Found:
        """Save the next checkpoint against it; that one is right, or the save is refused."""
        target = path.parent / "step-4"
        truth = subjects.state_at(4)
        refused = refuses(lambda: dsq_ckpt.save(
            truth, target, parent=path, config=subjects.config_of(name), no_dist=True, history=dsq_ckpt.SaveHistory()
        ), path)
        if refused is not None:
            if (target / "manifest.json").exists():
                return Found("wrong", "the save failed, and there is a checkpoint")
            return refused
        shutil.rmtree(path, ignore_errors=True)
        try:
            state = subjects.read_all(target)
        except dsq_ckpt.DSQError as error:
            return Found("wrong", f"the next save does not load: {told(error)}")
        problem = subjects.far(state, truth, self.honest)
        return Found("wrong", f"the next save holds other values: {problem}") if problem else Found("unchanged")
