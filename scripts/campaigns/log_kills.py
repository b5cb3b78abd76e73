"""Training processes, checkpointing processes or both die by SIGKILL at random moments, and what is left is recovered.

Every recovered state must be that of an uninterrupted run after as many steps, bit for bit, and no older than what the
log had promised at the last step that was reported done. The seed of a trial makes it again, but for the moment.
`campaign.py kills` counts what goes wrong; `evaluate_lowdiff.py kills` measures what is lost.

A process imports everything once and starts no thread; what trains, and what recovers, are its forks. So are the
checkpointing processes, which would take three seconds each to start otherwise.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.checkpointing_processes import Nursery, listen
from tests.lowdiff.loops import Loop, digest
from tests.lowdiff.uninterrupted import CASE, STEPS, answer, forked, joined, uninterrupted

KINDS = ("trainer", "trainer", "process", "process, then trainer", "both", "both", "while it starts")
SPECS = ("topk:0.05", "none", "fp16")
PAUSE = 0.003


class Trial(NamedTuple):
    """Parameters of a run and of its kills.

    Attributes:
        seed: that all else was drawn with.
        kind: who dies.
        ranks: training processes, each with its checkpointing process.
        spec: the compressor.
        options: of the log.
        delay: seconds before the kill, from the first step on (or from the start).
        again: seconds of a second life, which goes on from what was recovered, before it is killed too; 0: none.
    """

    seed: int
    kind: str
    ranks: int
    spec: str
    options: dict[str, int]
    delay: float
    again: float

    @classmethod
    def of(cls, seed: int) -> Trial:
        """Draw a trial."""
        rng = random.Random(seed)
        ranks = 2 if rng.random() < 0.25 else 1
        kind = rng.choice(KINDS)
        spec = rng.choice(SPECS)
        options = {
            "batch": rng.choice([1, 3, 8]), "queue": rng.choice([1, 2, 4]), "keep": rng.choice([1, 2]),
            "snapshot_every": rng.choice([5, 20, 60]),
        }
        delay = rng.uniform(0, 0.5 if kind == "while it starts" else 1.0)
        # What error feedback holds back is not that of the uninterrupted run after a replay.
        again = rng.uniform(0.05, 0.8) if spec == "none" and ranks == 1 and rng.random() < 0.5 else 0.0
        return cls(seed, kind, ranks, spec, options, delay, again)


class Said(NamedTuple):
    """Report of a training process after a step.

    Attributes:
        done: steps done.
        promised: the oldest step that may be recovered now; -1: any.
        logged: whether steps were logged.
    """

    done: int
    promised: int
    logged: int


class Life:
    """Training processes of one run, and their reports.

    Attributes:
        trainers: their pids, until they were waited for.
        processes: pids of the checkpointing processes, as told last.
    """

    def __init__(self, trial: Trial, run: Path, resume: bool) -> None:
        self.trainers: list[int] = []
        self.processes: dict[int, int] = {}
        self.seen: set[int] = set()
        self.said: dict[int, Said] = {}
        self._pipes: dict[int, int] = {}
        self._rest = dict.fromkeys(range(trial.ranks), b"")
        store = run.with_name(f"{run.name}-store-{resume}")
        for rank in range(trial.ranks):
            reader, writer = os.pipe()
            self.trainers.append(forked(
                lambda rank=rank, writer=writer: train(trial, run, store, rank, resume, writer)
            ))
            os.close(writer)
            self._pipes[reader] = rank

    def listen(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Take reports, for some time, or until something is true or all are gone."""
        listen(self._pipes, self._rest, self._take, seconds, until)

    def _take(self, rank: int, line: bytes) -> None:
        kind, *numbers = line.split()
        if kind == b"process":
            self.processes[rank] = int(numbers[0])
            self.seen.add(int(numbers[0]))
        else:
            self.said[rank] = Said(*map(int, numbers))

    def kill(self, trainers: bool, processes: bool, rng: random.Random) -> None:
        """Kill each of them, in any order, and take the reports that they had sent."""
        victims = (self.trainers if trainers else []) + (list(self.processes.values()) if processes else [])
        rng.shuffle(victims)
        for pid in victims:
            with suppress(ProcessLookupError):  # it went by itself, for its peer was gone
                os.kill(pid, signal.SIGKILL)
        if trainers:
            for pid in self.trainers:
                os.waitpid(pid, 0)
            self.trainers = []
            self.listen(5)

    def end(self) -> None:
        """Kill all that is left, and close the pipes."""
        for pid in self.trainers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pid in self.seen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in self._pipes:
            os.close(pipe)

    @property
    def promised(self) -> int:
        """Oldest step that may be recovered."""
        return max((said.promised for said in self.said.values()), default=-1)

    @property
    def done(self) -> int:
        """Number of steps that all ranks did."""
        return min((said.done for said in self.said.values()), default=0)

    @property
    def logged(self) -> bool:
        """Whether all ranks logged their last step."""
        return bool(self.said) and all(said.logged for said in self.said.values())


def train(trial: Trial, run: Path, store: Path, rank: int, resume: bool, writer: int) -> None:
    """Train under a log until killed, and say how far it is."""
    loop = Loop(CASE, seed=0 if not resume else 9)
    recovered = loop.recover(run, timeout=60) if resume else None
    joined(loop, store, rank, trial.ranks)
    log = loop.log(run, compressor=trial.spec, resume=recovered, timeout=20.0, **trial.options)
    pid, based, promised = 0, True, -1
    while log.steps_done < STEPS:
        client = log._client
        if client is not None and client.pid != pid:
            pid = client.pid
            os.write(writer, b"process %d\n" % pid)
        loop.step(log.steps_done, rank)
        log.step()
        # After a failure the log begins again with a snapshot, and counts from when that is on disk.
        based = log.logging and (based or not log._require_client().saving)
        if based:
            promised = log.steps_done - log.bound
        os.write(writer, b"done %d %d %d\n" % (log.steps_done, promised, based))
        time.sleep(PAUSE)


def recovered(run: Path) -> dict[str, Any] | None:
    """Recover in one process, whatever the number of ranks that logged; return what came of it."""
    loop = Loop(CASE, seed=9)
    started = time.perf_counter()
    recovery = loop.recover(run, partial=True, timeout=60)
    seconds = time.perf_counter() - started
    if recovery is None:
        return {"step": None}
    assert recovery.exact
    return {
        "step": recovery.step, "replayed": recovery.replayed, "ended": recovery.ended, "seconds": seconds,
        "digest": digest(loop.state()),
    }


def outcome(trial: Trial, table: list[str], run: Path) -> dict[str, Any]:
    """Carry out a trial; return the recoveries, and what is wrong under "problem"."""
    rng = random.Random(trial.seed + 1)
    first, told = True, []
    for delay in filter(None, (trial.delay, trial.again)):
        life = Life(trial, run, not first)
        try:
            if first and trial.kind == "while it starts":
                life.listen(delay)
            else:
                life.listen(60, lambda: len(life.said) == trial.ranks)  # noqa: B023
                if not life.said:
                    return {"problem": "it did not start"}
                life.listen(delay)
            if trial.kind.startswith("process"):
                before = life.done
                life.kill(False, True, rng)
                if "then" in trial.kind:
                    life.listen(rng.uniform(0, 0.5))
                else:
                    life.listen(60, lambda: life.promised > before + 20)  # noqa: B023
                    if life.promised <= before + 20 and life.done < STEPS:
                        return {"problem": f"after step {before} it did not log again up to step {life.done}"}
            both = trial.kind == "both" or (trial.kind == "while it starts" and rng.random() < 0.5)
            life.kill(True, both, rng)
            record = answer(lambda: recovered(run))
        finally:
            life.end()
        if record is None:
            return {"problem": "recovery failed"}
        step = record["step"]
        # Where checkpointing processes live on, everything that was done is there.
        promised = life.done if trial.kind == "trainer" else life.promised
        told.append({"done": life.done, "promised": promised, "logged": life.logged, **record})
        if step is None:
            if promised >= 0:
                return {"problem": "nothing to recover", "lives": told}
            break
        if record["digest"] != table[step]:
            return {"problem": f"the state is not that after step {step}", "lives": told}
        if step < promised:
            return {"problem": f"step {step} is older than promised", "lives": told}
        first = False
    return {"lives": told}


def lane(numbers: range, seed: int, tables: dict[str, list[str]], directory: Path, writer: int) -> None:
    """Carry out some trials, and write the outcomes to a pipe."""
    for number in numbers:
        trial = Trial.of(seed + number)
        run = directory / f"run-{number}"
        started = time.monotonic()
        result = {**trial._asdict(), **outcome(trial, tables[f"{trial.spec} {trial.ranks}"], run)}
        result["seconds"] = time.monotonic() - started
        os.write(writer, json.dumps(result).encode() + b"\n")
        if "problem" not in result:
            shutil.rmtree(run, ignore_errors=True)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return figures of all trials."""
    lives = [life for result in results for life in result.get("lives", ()) if life["step"] is not None]
    lost = [max(life["done"] - life["step"], 0) for life in lives if life["logged"]]
    return {
        "trials": len(results), "problems": [result for result in results if "problem" in result],
        "by kind": dict(Counter(result["kind"] for result in results)),
        "of two ranks": sum(result["ranks"] == 2 for result in results),
        "recoveries": len(lives), "bit-identical": len(lives) - sum(
            "not that after" in result.get("problem", "") for result in results
        ),
        "nothing on disk yet": sum(life["step"] is None for result in results for life in result.get("lives", ())),
        "killed while logging": len(lost), "steps lost then, largest": max(lost, default=0),
        "steps lost then, mean": sum(lost) / max(len(lost), 1), "without loss then": sum(not n for n in lost),
        "said to end early": sum(life["ended"] is not None for life in lives),
        "seconds": sum(result["seconds"] for result in results),
    }


def measure(count: int, seed: int, parallel: int, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Make so many trials, some at a time; return what came of each, and figures of all.

    Call it in a process that has started no thread.

    Args:
        count: of trials.
        seed: of the first; each other one has the next.
        parallel: trials at a time.
        report: called with a line about every trial.
    """
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        needed = {(trial.spec, trial.ranks) for trial in map(Trial.of, range(seed, seed + count))}
        tables = {
            f"{spec} {ranks}": uninterrupted(spec, ranks, directory / f"store-{number}")
            for number, (spec, ranks) in enumerate(sorted(needed))
        }
        Nursery()
        reader, writer = os.pipe()
        lanes = [
            forked(partial(lane, range(first, count, parallel), seed, tables, directory, writer))
            for first in range(parallel)
        ]
        os.close(writer)
        with open(reader, encoding="utf-8") as pipe:
            for line in pipe:
                results.append(json.loads(line))
                report(f"{len(results)} {line.strip()}")
        for child in lanes:
            os.waitpid(child, 0)
    return {"seed": seed, "summary": summary(results), "trials": results}
