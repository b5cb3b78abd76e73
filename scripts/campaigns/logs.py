"""Gradient logs and their snapshots, damaged and forged, and what `recover` makes of them.

It gives the state after the last step, bit for bit; or that after an earlier one, and says why; or it fails with an
error of ours and changes nothing but, where the log is to blame, to the state of the snapshot.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim import lr_scheduler

import dsq_ckpt
from campaigns import forging, subjects
from campaigns.accidents import ALTERATIONS, other_file
from campaigns.forging import Container
from campaigns.harness import Campaign, Found, told
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.packs import PackRef
from tests.helpers.checkpointing_processes import Nursery
from tests.lowdiff.loops import Case, Loop, digest, recorded

STEPS = 22
_CASES = {
    "topk:0.05": {"compressor": "topk:0.05"}, "fp16": {"compressor": "fp16"}, "none": {"compressor": "none"},
}


def _case(spec: str) -> Case:
    return Case(
        lambda model: torch.optim.Adam(model.parameters(), 0.01),
        schedule=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
        log={"batch": 2, "snapshot_every": 8, "keep": 3, **_CASES[spec]},
    )


def segment(run: Path, rng: random.Random) -> str:
    """Alter fields of a segment's contents."""
    path = _segment(run, rng)
    container = Container(path.read_bytes())
    what = forging.alter(container.contents, rng)
    path.write_bytes(container.data())
    return f"{path.name}: {what}"


def block(run: Path, rng: random.Random) -> str:
    """Alter bytes of a segment's block."""
    path = _segment(run, rng)
    container = Container(path.read_bytes())
    place = rng.choice([place for place in forging.places(container.contents) if place[1]])
    data = bytearray(container.head[place[0] : place[0] + place[1]])
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    place[:] = container.append(bytes(data))
    path.write_bytes(container.data())
    return path.name


def renamed(run: Path, rng: random.Random) -> str:
    """Rename a segment to another step, rank or session, or duplicate a step."""
    path = _segment(run, rng)
    session, first, last, rank = path.stem.split("-")
    by = rng.choice([-2, -1, 1, 2])
    name = rng.choice([
        f"{session}-{int(first) + by:09d}-{int(last) + by:09d}-{rank}",
        f"{session}-{first}-{int(last) + by:09d}-{rank}", f"{session}-{first}-{last}-00001",
        f"{'0' * 16}-{first}-{last}-{rank}", f"{session}-{first}-{'9' * 99}-{rank}",
    ])
    target = path.with_name(f"{name}.grads")
    if rng.random() < 0.5:
        path.rename(target)
    else:
        shutil.copyfile(path, target)
    return f"{path.name} -> {target.name}"


def snapshot(run: Path, rng: random.Random) -> str:
    """Alter a snapshot's description of the log, JSON in a tensor."""
    path = sorted(run.glob("step-*"))[-1]
    name, index = forging.index(path)
    tensor = index["tensors"]["lowdiff.meta"]
    ((_, shape, number, place),) = tensor["chunks"]
    file = path / index["files"][number]
    container = Container(file.read_bytes())
    record, packs = container.contents["records"][place], container.contents["packs"]
    start, size = record["at"], record["size"]
    with Checkpoint(path) as checkpoint:
        old = checkpoint.read_pack(PackRef(file.name, record["packs"][0]))
    tree = json.loads(old[start : start + size])
    what = forging.alter(tree, rng)
    data = forging.dumps(tree)
    record.pop("at")
    record.update(size=len(data), packs=[len(packs)])
    tensor["shape"][0] = shape[0] = record["shape"][0] = len(data)
    packs.append([container.append(forging.zstd(data)), 1, len(data)])
    forging.replace(path, file.name, container.data())
    forging.replace(path, name, forging.zstd(forging.dumps(index)))
    return what


def _segment(run: Path, rng: random.Random) -> Path:
    every = sorted((run / "log").glob("*.grads"))
    return rng.choice(every if rng.random() < 0.2 else every[-3:])  # the last ones are those that are replayed


FORGERIES: tuple[Callable[[Path, random.Random], str], ...] = (segment, segment, snapshot, block, renamed)


class Logs(Campaign):
    """Gradient logs, altered."""

    name = "logs"
    full = 1500
    few = 16
    memory = 1 << 30

    def prepare(self) -> None:
        """Record a run with each compressor."""
        Nursery()
        for spec in _CASES:
            run = self.directory / "base" / spec.replace(":", "-") / "run"
            table = recorded(_case(spec), run, STEPS)
            (run.parent / "table.json").write_text(json.dumps([digest(state) for state in table]))
            (run / "log" / ".lock").unlink(missing_ok=True)

    def begin(self) -> None:
        """Recover each once."""
        torch.set_num_threads(1)
        self.work = self.directory / f"lane-{os.getpid()}"
        self.tables = {}
        for spec in _CASES:
            base = self.directory / "base" / spec.replace(":", "-")
            self.tables[spec] = json.loads((base / "table.json").read_text())
            shutil.rmtree(self.work, ignore_errors=True)
            shutil.copytree(base, self.work)
            verdict = self._judge(spec, forged=False)
            assert verdict.outcome == "unchanged", verdict

    def _drawn(self, number: int) -> tuple[random.Random, str, bool]:
        rng = self.rng(number)
        return rng, rng.choice(sorted(_CASES)), rng.random() < 0.5

    def kind(self, number: int) -> str:
        """Return whether checksums are right."""
        return "forged" if self._drawn(number)[2] else "damaged"

    def trial(self, number: int) -> Found:
        """Alter one file, and recover."""
        rng, spec, forged = self._drawn(number)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.directory / "base" / spec.replace(":", "-"), self.work)
        run = self.work / "run"
        if forged:
            what = rng.choice(FORGERIES)(run, rng)
        else:
            alter = rng.choice([alter for alter in ALTERATIONS if alter != other_file])
            file = rng.choice(sorted(file for file in run.rglob("*") if file.is_file() and file.stat().st_size))
            what = f"{alter.__name__} {file.relative_to(run)}"
            alter(file, rng)
        with subjects.watched(self.work) as seen:
            verdict = self._judge(spec, forged)
        if seen:
            return Found("wrong", f"{what}: {seen[:3]}")
        return Found(verdict.outcome, verdict.what and f"{spec}, {what}: {verdict.what}")

    def _judge(self, spec: str, forged: bool) -> Found:
        table, loop = self.tables[spec], Loop(_case(spec), seed=9)
        before = digest(loop.state())
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                recovery = loop.recover(self.work / "run", timeout=5)
            except dsq_ckpt.DSQError as error:
                if str(self.work) not in str(error):
                    return Found("wrong", f"the error names no file: {told(error)}")
                if digest(loop.state()) not in (before, *table):
                    return Found("wrong", f"model and optimizer were left changed by {told(error)}")
                return Found("detected")
        if recovery is None:
            return Found("wrong", "nothing was recovered, no error")
        now = digest(loop.state())
        if now != table[recovery.step] if recovery.step < len(table) else True:
            if not forged:
                return Found("wrong", f"the state is not that after step {recovery.step}")
            again = Loop(_case(spec), seed=9)
            again.recover(self.work / "run", timeout=5)
            return Found("accepted") if digest(again.state()) == now else Found("wrong", "two recoveries differ")
        if recovery.step == STEPS:
            return Found("unchanged")
        if recovery.ended is None and not heard:
            return Found("wrong", f"recovered to step {recovery.step} of {STEPS}, nothing was said")
        return Found("detected")
