"""Runs under replicas whose training processes die, alone or with their checkpointing processes, and are continued:

    python replica_lives.py --trials 8 --seed 1 --kinds one trainers everything

Every fourth seed is that of a trial of one rank, the others have two.

Every state that is recovered must be that of an uninterrupted run after as many steps, bit for bit: from memory and no
older than a step where training processes died; from disk, and some step's, where all died. Processes are forks of this
one, which imports everything once and starts no thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.checkpointing_processes import Nursery, alive, listen
from tests.lowdiff.loops import Loop, digest
from tests.lowdiff.uninterrupted import CASE, forked, joined, uninterrupted
from tests.lowdiff.workers.replica import replica_of

STEPS = 600
PAUSE = 0.003


def live(run: Path, store: Path, rank: int, ranks: int, options: dict[str, Any], dies: int, writer: int) -> None:
    """Recover, say what, and train until killed, or until just before the end of an iteration, the `dies`th of it."""

    def say(**told: Any) -> None:
        os.write(writer, json.dumps(told).encode() + b"\n")

    signal.alarm(150)  # whoever waits for ever
    loop = Loop(CASE, seed=9 if run.exists() else 0)
    if ranks > 1:
        joined(loop, store, rank, ranks)
    recovery = loop.recover(run, timeout=90)
    say(recovered=None if recovery is None else [recovery.step, recovery.from_memory, digest(loop.state())])
    if dies == 0:
        return
    replica = replica_of(loop, run, resume=recovery, timeout=60.0, **options)
    say(process=replica._require_client().pid)
    first = replica.steps_done
    while replica.steps_done < STEPS:
        loop.step(replica.steps_done, rank)
        if replica.steps_done + 1 == first + dies:
            os.kill(os.getpid(), signal.SIGKILL)
        replica.step()
        say(done=replica.steps_done)
        time.sleep(PAUSE)


class Life:
    """Training processes of a run, and what they said."""

    def __init__(self, run: Path, number: int, ranks: int, options: dict[str, Any], dies: dict[int, int]) -> None:
        self.trainers: list[int] = []
        self.processes: dict[int, int] = {}
        self.recovered: dict[int, Any] = {}
        self.done: dict[int, int] = {}
        self._pipes: dict[int, int] = {}
        store = run.with_name(f"{run.name}-store-{number}")
        for rank in range(ranks):
            reader, writer = os.pipe()
            self.trainers.append(forked(
                lambda rank=rank, writer=writer: live(run, store, rank, ranks, options, dies.get(rank, -1), writer)
            ))
            os.close(writer)
            self._pipes[reader] = rank
        self._rest = dict.fromkeys(range(ranks), b"")

    def listen(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Take what is said, for some time, or until something is true or all are gone."""
        listen(self._pipes, self._rest, self._take, seconds, until)

    def _take(self, rank: int, line: bytes) -> None:
        for key, value in json.loads(line).items():
            {"done": self.done, "process": self.processes, "recovered": self.recovered}[key][rank] = value

    def kill(self, pids: list[int]) -> None:
        """SIGKILL to all that are there."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Nobody trains any more, and everything they said was heard."""
        self.kill(self.trainers)
        for pid in self.trainers:
            os.waitpid(pid, 0)
        self.listen(5)


def trial(seed: int, kinds: list[str], directory: Path) -> dict[str, Any]:
    """Several lives of one run, each kind in turn; what is wrong is under "problem"."""
    rng = random.Random(seed)
    several = set(kinds) - {"one"}
    ranks = 1 if seed % 4 == 3 and several else 2
    lives = rng.choices(sorted(several), k=3) if ranks == 1 else (rng.sample(kinds, len(kinds)) * 3)[:3]
    options = {"queue": rng.choice([2, 4]), "persist_every": rng.choice([1, 1, 5, 1000]), "keep": rng.choice([1, 2])}
    told: dict[str, Any] = {"seed": seed, "ranks": ranks, "lives": lives, "options": options}
    told |= {"recovered": [], "states": []}
    run, seen, last, done = directory / f"run-{seed}", [], 0, 0
    try:
        for number, kind in enumerate([*lives, "end"]):
            dies = {rng.randrange(ranks): rng.randint(2, 30)} if kind == "one" else {}
            if kind == "end":
                dies = dict.fromkeys(range(ranks), 0)
            life = Life(run, number, ranks, options, dies)
            try:
                life.listen(120, lambda: len(life.recovered) == ranks)  # noqa: B023
                if len(life.recovered) < ranks:
                    return {**told, "problem": f"life {number} did not recover"}
                if number:
                    states = list(life.recovered.values())
                    told["recovered"].append((lives[number - 1], done, *states[0][:2]))
                    if any(state != states[0] for state in states):
                        return {**told, "problem": f"ranks recovered different states: {states}"}
                    step, from_memory, state_digest = states[0]
                    told["states"].append((step, state_digest))
                    if from_memory != (lives[number - 1] != "everything"):
                        return {**told, "problem": f"from memory: {from_memory}"}
                    if step < (done - 1 if from_memory else last):
                        return {**told, "problem": f"step {step} is too old, {done} were done"}
                    last = step
                if kind != "end":
                    life.listen(120, lambda: len(life.done) == ranks or (len(life.done) == 1 and bool(dies)))  # noqa: B023
                    if not life.done:
                        return {**told, "problem": f"life {number} did not train"}
                    gone = list(life.trainers)
                    if kind == "one":
                        life.listen(120)  # the others end by themselves
                    else:
                        life.listen(rng.uniform(0, 0.6))
                        gone += list(life.processes.values()) if kind == "everything" else []
                        rng.shuffle(gone)
                        life.kill(gone)
            finally:
                life.end()
                seen += life.processes.values()
            done = max(life.done.values(), default=0)
        deadline = time.monotonic() + 60
        while any(map(alive, seen)):
            if time.monotonic() > deadline:
                return {**told, "problem": "a checkpointing process did not end"}
            time.sleep(0.02)
        left = [str(path) for pattern in ("*.lock", "*.tmp") for path in run.rglob(pattern)]
        if left and lives[-1] != "everything":
            return {**told, "problem": f"{left} are left"}
    finally:
        for pid in seen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return told


def wrong_states(results: list[dict[str, Any]], directory: Path) -> Iterator[str]:
    """States that were recovered and are not those of an uninterrupted run; of that, no more steps are made."""
    for ranks in (1, 2):
        states = [(told["seed"], *state) for told in results if told["ranks"] == ranks for state in told["states"]]
        if states:
            steps = max(step for _, step, _ in states)
            table = uninterrupted("none", ranks, directory / f"store-{ranks}", steps)
            yield from (
                f"seed {seed}: the state is not that after step {step}"
                for seed, step, state_digest in states if state_digest != table[step]
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--kinds", nargs="+", default=["one", "trainers", "everything"])
    parser.add_argument("--parallel", type=int, default=2)
    given = parser.parse_args()
    print("seed", given.seed, flush=True)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        Nursery()
        reader, writer = os.pipe()

        def lane(first: int) -> None:
            for number in range(first, given.trials, given.parallel):
                result = trial(given.seed + number, given.kinds, directory)
                os.write(writer, json.dumps(result).encode() + b"\n")

        lanes = [forked(lambda first=first: lane(first)) for first in range(given.parallel)]
        os.close(writer)
        results = []
        with open(reader, encoding="utf-8") as pipe:
            for line in pipe:
                results.append(json.loads(line))
                print(json.dumps({**results[-1], "states": None}), flush=True)
        for child in lanes:
            os.waitpid(child, 0)
        problems = [told["problem"] for told in results if "problem" in told] + [*wrong_states(results, directory)]
        print(*problems, sep="\n", flush=True)
    return 0 if len(results) == given.trials and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
