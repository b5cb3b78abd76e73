"""Readers and writers at once: what is read while saves, overwrites, retention and `dsq gc` go on is right.

A reader gets the values of one of the saves, whole, or an error of ours; never a mixture.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import dsq_ckpt
from campaigns import subjects
from campaigns.harness import BAD, Campaign, Found, told
from campaigns.subjects import FINE_MOMENTS, State, state_at
from dsq_ckpt.storage import gc
from tests.helpers.forked_work import forked

KINDS = ("saves", "overwrites", "deletions", "two writers")
_CONFIG: State = {
    "quantize": {"min_elements": 256, **FINE_MOMENTS}, "storage": {"block_elements": 1024, "fsync": False},
    "delta": {"max_chain": 6},
}


class Crowds(Campaign):
    """A writer (or two), two that read, one that verifies, and one that collects garbage."""

    name = "crowds"
    full = 40
    few = 4
    seconds = 600.0

    def kind(self, number: int) -> str:
        """Return what writers do."""
        return KINDS[number % len(KINDS)]

    def trial(self, number: int) -> Found:
        """Let them all go, and hear what readers saw."""
        kind, run = self.kind(number), self.directory / f"run-{number}"
        run.mkdir()
        saves, end = 4 if self.short else 25, self.directory / f"end-{number}"
        jobs: list[Callable[[], Iterator[Found]]] = [lambda: writes(kind, run, 0, saves)]
        if kind == "two writers":
            jobs.append(lambda: writes(kind, run, 1, saves))
        writers = len(jobs)
        jobs += [
            lambda: reads(run, end, "auto"), lambda: reads(run, end, False), lambda: verifies(run, end),
            lambda: collects(run, end),
        ]
        heard: list[Found] = []
        for place, (pid, pipe) in enumerate([_started(job) for job in jobs]):
            if place == writers:
                end.touch()
            with open(pipe, "rb") as stream:
                heard += [Found(*json.loads(line)) for line in stream]
            if os.waitpid(pid, 0)[1]:
                heard.append(Found("crashed", "a process of it failed"))
        counts = Counter(verdict.outcome for verdict in heard)
        for verdict in heard:
            if verdict.outcome in BAD:
                return verdict
        shutil.rmtree(run)
        return Found("detected" if counts["detected"] else "unchanged", json.dumps(counts))


def _started(job: Callable[[], Iterator[Found]]) -> tuple[int, int]:
    reader, writer = os.pipe()

    def work() -> None:
        torch.set_num_threads(1)
        for verdict in job():
            os.write(writer, json.dumps(verdict).encode() + b"\n")

    pid = forked(work)
    os.close(writer)
    return pid, reader


def writes(kind: str, run: Path, writer: int, saves: int) -> Iterator[Found]:
    """Save again and again; where several write one path, one of them may lose."""
    for step in range(1, saves + 1):
        several = kind == "two writers"
        name = "last" if kind == "overwrites" or (several and step % 3 == 0) else f"w{writer}-{step:05d}"
        try:
            dsq_ckpt.save(state_at(step), run / name, config=_CONFIG, overwrite=name == "last", no_dist=True)
        except dsq_ckpt.DSQError as error:
            if not several:
                yield Found("wrong", f"a save failed: {told(error)}")
        if kind == "deletions":
            for old in sorted(run.glob("w*"))[:-3]:
                shutil.rmtree(old)


def reads(run: Path, end: Path, refinement: Any) -> Iterator[Found]:
    """Load the newest until writers are done, and once more."""
    last = False
    while not last:
        last = end.exists()
        try:
            newest = dsq_ckpt.latest(run)
            if newest is None:
                continue
            state = subjects.read_all(Path(newest), refinement=refinement)
        except dsq_ckpt.DSQError as error:
            if not any(word in str(error) for word in ("again", "meanwhile", "replaced", "does not exist", "holds no")):
                yield Found("wrong", f"the error does not say to load again: {told(error)}")
            yield Found("detected")
            continue
        wrong = subjects.far(state, state_at(state["meta"]["step"]), refined=False)
        yield Found("wrong", f"{newest}: {wrong}") if wrong else Found("unchanged")


def verifies(run: Path, end: Path) -> Iterator[Found]:
    """Run `dsq verify` and `dsq log` repeatedly; neither may end with a traceback."""
    while not end.exists():
        status = subjects.command("verify", str(run))[0] or subjects.command("log", str(run))[0]
        yield Found("detected" if status else "unchanged")


def collects(run: Path, end: Path) -> Iterator[Found]:
    """Collect garbage repeatedly, except files younger than the duration of a save."""
    while not end.exists():
        with suppress(FileNotFoundError):
            gc.collect_garbage(run, 60)
        time.sleep(0.01)
    yield Found("unchanged")
