"""Processes that save in a loop are killed at random moments, and what is left is read by new ones, which go on.

Every checkpoint that was reported is there and holds what was saved, the one that was being written is complete or
invisible, the next save works, and `dsq gc` leaves nothing of ours that is not part of a checkpoint.
"""

from __future__ import annotations

import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import dsq_ckpt
from campaigns import log_kills, subjects
from campaigns.harness import Campaign, Found
from campaigns.subjects import FINE_MOMENTS, State, state_at
from dsq_ckpt.storage import gc
from tests.helpers.checkpointing_processes import Nursery
from tests.helpers.forked_work import ask, forked
from tests.lowdiff.loops import digest
from tests.lowdiff.uninterrupted import uninterrupted

KINDS = ("save", "async", "overwrite", "2 ranks", "2 ranks, async", "DeepSpeed", "gradient log", "gradient log")
_CONFIG: State = {
    "quantize": {"min_elements": 256, **FINE_MOMENTS}, "storage": {"block_elements": 1024}, "delta": {"max_chain": 10},
}
_LIVES = 2
_PATIENCE = timedelta(seconds=20)
"""Of ranks with each other. Where one dies while a group is made, gloo ends this after five times as long."""
_POPEN = subprocess.Popen
"""As it is before the nursery of gradient logs takes its place."""


class Said(NamedTuple):
    """What a process reports: a step and a digest, before and after its save."""

    event: str
    step: int
    digest: str


class Kills(Campaign):
    """Processes killed by SIGKILL; a trial is a run with as many kills as `_LIVES` (logs: one or two)."""

    name = "kills"
    full = 320
    few = 7
    seconds = 600.0

    def load(self) -> None:
        """Load DeepSpeed, too."""
        super().load()
        import_deepspeed()

    def begin(self) -> None:
        """Compute nothing, so that the forks of a lane start clean."""
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        self.tables: dict[str, Any] = {}
        Nursery()

    def kind(self, number: int) -> str:
        """Return the kind of job that a trial kills."""
        return KINDS[number % len(KINDS)]

    def trial(self, number: int) -> Found:
        """Let a run die and go on."""
        kind, run, rng = self.kind(number), self.directory / f"run-{number}", self.rng(number)
        if kind == "gradient log":
            drawn = log_kills.Trial.of(self.seed * 10_000 + number)
            result = log_kills.outcome(drawn, self._table(drawn.spec, drawn.ranks), run)
            problem = result.get("problem")
        else:
            problem = self._lives(kind, run, rng)
        if problem is not None:
            return Found("hung" if problem.startswith("hung") else "wrong", problem)
        shutil.rmtree(run, ignore_errors=True)
        return Found("unchanged")

    def _table(self, spec: str, ranks: int) -> Any:
        """Return the states of an uninterrupted run with a log."""
        key = f"{spec}-{ranks}"
        if key not in self.tables:
            store = self.directory / f"store-{key}-{os.getpid()}"
            self.tables[key] = answer(lambda: uninterrupted(spec, ranks, store))
        return self.tables[key]

    def _lives(self, kind: str, run: Path, rng: random.Random) -> str | None:
        train, check = (engine_trains, engine_checks) if kind == "DeepSpeed" else (trains, checks)
        heard: list[Said] = []
        for life in range(1 if self.short else _LIVES):
            ranks = 2 if kind.startswith("2 ranks") else 1
            store = run.with_name(f"{run.name}-store-{life}")
            pipes, pids = {}, []
            for rank in range(ranks):
                reader, writer = os.pipe()
                pids.append(forked(partial(train, kind, run, store, rank, ranks, writer)))
                os.close(writer)
                pipes[reader] = b""
            listen(pipes, heard, 120, len(heard) + 1)
            listen(pipes, heard, 60, len(heard) + rng.choice([0, 1, 2, 6]))
            listen(pipes, heard, rng.uniform(0, 0.15))
            victims = list(pids) if rng.random() < 0.6 else [rng.choice(pids)]
            rng.shuffle(victims)
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            listen(pipes, heard, 8 * _PATIENCE.total_seconds())  # the others notice
            hung = bool(pipes)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                status = os.waitpid(pid, 0)[1]
                if pid == victims[0] and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
                    last = (told_in(run).read_text().strip().splitlines() or [""])[-1]
                    return f"in life {life} a process died by itself: status {status}: {last}"
            for pipe in pipes:
                os.close(pipe)
            if hung:
                return f"hung: in life {life} a rank waits for one that is gone"
            problem = answer(lambda: check(kind, run, list(heard)), told_in(run))
            if problem is not None:
                return f"after kill {life}: {problem}"
        return answer(lambda: finishes(kind, run), told_in(run)) if kind != "DeepSpeed" else None


def listen(pipes: dict[int, bytes], heard: list[Said], seconds: float, wanted: float = math.inf) -> None:
    """Take what is said, for some time, until so much was heard, or until all are gone."""
    deadline = time.monotonic() + seconds
    while pipes and len(heard) < wanted and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(pipes), [], [], min(left, 0.05))[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                os.close(pipe)
                del pipes[pipe]
                continue
            *lines, pipes[pipe] = (pipes[pipe] + data).split(b"\n")
            for line in lines:
                event, step, digest = line.decode().split()
                heard.append(Said(event, int(step), digest))


def answer(work: Callable[[], Any], log: Path | None = None) -> Any:
    """Return what a fork of this process found out, or that it failed, with the last lines of its log."""
    result, status = ask(work)
    if not status:
        return result
    last = log.read_text().strip().splitlines()[-12:] if log is not None and log.exists() else []
    return " | ".join([f"the check failed with status {status}", *last])


def joined(store: Path, rank: int, ranks: int) -> None:
    """Be one of several ranks."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_PATIENCE)


def quiet(run: Path) -> None:
    """Let this process say what it says, of peers that were killed and otherwise, to a file beside the run."""
    sys.stdout = sys.stderr = open(told_in(run), "a")  # noqa: SIM115


def told_in(run: Path) -> Path:
    """Return the file that processes of a run write messages to."""
    return run.with_name(f"{run.name}.log")


def trains(kind: str, run: Path, store: Path, rank: int, ranks: int, writer: int) -> None:
    """Go on from the newest checkpoint, and save without end."""
    quiet(run)
    joined(store, rank, ranks)
    newest = dsq_ckpt.latest(run)
    step = 0
    if newest is not None:
        state = state_at(0)
        dsq_ckpt.load(state, newest)
        step = state["meta"]["step"]
    before: Any = None
    while True:
        step += 1
        path = run / ("last" if kind == "overwrite" else f"step-{step:05d}")
        os.write(writer, b"saves %d -\n" % step)
        if "async" in kind:
            future = dsq_ckpt.async_save(state_at(step), path, config=_CONFIG)
            if before is not None:
                before.result()
                os.write(writer, b"saved %d -\n" % (step - 1))
            before = future
        else:
            dsq_ckpt.save(state_at(step), path, config=_CONFIG, overwrite=kind == "overwrite")
            os.write(writer, b"saved %d -\n" % step)


def checks(kind: str, run: Path, heard: list[Said]) -> str | None:
    """Return the problem with the remaining files; None if there is none."""
    torch.set_num_threads(1)
    reported = {said.step for said in heard if said.event == "saved"}
    begun = {said.step for said in heard}
    held: dict[int, Path] = {}
    for path in sorted(run.iterdir()) if run.exists() else ():
        if not (path / "manifest.json").exists():
            continue
        state = subjects.read_all(path)
        step = state["meta"]["step"]
        held[step] = path
        if step not in begun or path.name not in ("last", f"step-{step:05d}"):
            return f"{path.name} holds step {step}"
        if wrong := subjects.far(state, state_at(step), dsq_ckpt.describe(path)["refinement"] == "kept"):
            return f"{path.name}: {wrong}"
    if kind == "overwrite":
        if reported and max(held, default=0) < max(reported):
            return f"step {max(reported)} was reported, 'last' holds {list(held)}"
    elif lost := reported - set(held):
        return f"steps {sorted(lost)} were reported and are not there"
    newest = dsq_ckpt.latest(run) if held else None
    if held and newest != str(held[max(held)]):
        return f"latest is {newest}, the last of {sorted(held)} was expected"
    if held and subjects.command("verify", str(run))[0]:
        return "dsq verify finds something"
    return None


def finishes(kind: str, run: Path) -> str | None:
    """Continue, save once more, and clean up."""
    torch.set_num_threads(1)
    newest = dsq_ckpt.latest(run) if run.exists() else None
    state = state_at(0)
    if newest is not None:
        dsq_ckpt.load(state, newest)
    dsq_ckpt.save(state_at(99), run / "step-00099", config=_CONFIG)
    if wrong := subjects.far(subjects.read_all(run / "step-00099"), state_at(99)):
        return f"the next save: {wrong}"
    gc.collect_garbage(run, 0)
    for path in run.iterdir():
        names = {file.name for file in path.iterdir()}
        if not names:
            continue  # killed before its first file; an empty directory may be anybody's, so `gc` leaves it
        if not (path / "manifest.json").exists():
            return f"gc left {path.name}: {sorted(names)}"
        promised = {file.name for file in dsq_ckpt.storage.manifest.Manifest.read(path).files} | {"manifest.json"}
        if names != promised:
            return f"gc left {path.name}: {sorted(names ^ promised)}"
    return None


def import_deepspeed() -> Any:
    """Import the module with which the tests of DeepSpeed create engines."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "deepspeed" / "workers"))
    import common  # type: ignore[import-not-found]
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # which every engine imports: a second, for the compiler of torch

    # One rank needs no shared memory, and a process that is killed while it builds this leaves a lock for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return common


def deepspeed_workers() -> Any:
    """Import the same module in a process that is to have an engine."""
    subprocess.Popen = _POPEN  # type: ignore[misc]
    os.environ["LOCAL_RANK"] = "0"
    return import_deepspeed()


def engine_trains(kind: str, run: Path, store: Path, rank: int, ranks: int, writer: int) -> None:
    """Train an engine from its newest tag, and save one after every step."""
    torch.set_num_threads(1)
    quiet(run)
    common = deepspeed_workers()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    engine = common.engine_of(common.settings(2), common.EXACT)
    step = 0
    if (run / "latest").exists():
        step = engine.load_checkpoint(str(run))[1]["step"]
    while True:
        step += 1
        common.train(engine, step, step + 1)
        digest = digest_of(engine)
        os.write(writer, f"saves {step} {digest}\n".encode())
        engine.save_checkpoint(str(run), client_state={"step": step})
        os.write(writer, f"saved {step} {digest}\n".encode())


def engine_checks(kind: str, run: Path, heard: list[Said]) -> str | None:
    """Return the problem of the tag that an engine loads."""
    torch.set_num_threads(1)
    common = deepspeed_workers()
    reported = {said.step for said in heard if said.event == "saved"}
    if not (run / "latest").exists():
        return "no tag is there" if reported else None
    quiet(run)
    store = run.with_name(f"{run.name}-store-check-{os.getpid()}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    engine = common.engine_of(common.settings(2), common.EXACT, seed=3)
    path, client = engine.load_checkpoint(str(run))
    step = client["step"]
    digests = {said.digest for said in heard if said.step == step}
    if step < max(reported, default=0):
        return f"step {max(reported)} was reported, latest is {step}"
    if digest_of(engine) not in digests:
        return f"{path}: other values than were saved"
    if subjects.command("verify", str(run))[0]:
        return "dsq verify finds something"
    return None


def digest_of(engine: Any) -> str:
    """Return the checksum of masters and moments of an engine."""
    optimizer = engine.optimizer
    values = [flat.detach().clone() for flat in optimizer.single_partition_of_fp32_groups]
    states = [engine.basic_optimizer.state_dict()["state"]]
    return str(digest({"values": values, "states": states}))
