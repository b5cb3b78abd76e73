"""Trials in forks with a limit of time and memory, what came of each, and the table and JSON of a campaign."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dsq_ckpt.engine import warmup
from tests.helpers.forked_work import forked

OUTCOMES = ("detected", "unchanged", "accepted", "wrong", "crashed", "hung")
BAD = frozenset({"wrong", "crashed", "hung"})
_BEGINS = 600.0  # seconds more, in which a lane may compile
_KEPT = 40  # failures that are told in full


class Found(NamedTuple):
    """What came of a trial.

    Attributes:
        outcome: "detected": a clear error of ours, or a report of the damage; "unchanged": the values that were saved;
            "accepted": of files with right checksums, other values, which are those that the files state (nothing tells
            such a file from one that was saved); "wrong": anything else that ended; "crashed": an exception that is
            not ours, or a signal; "hung": killed after the time limit.
        what: of a failure, what was found and what was expected; otherwise what was measured, if anything.
    """

    outcome: str
    what: str = ""


class Campaign(ABC):
    """One idea of what may go wrong, tried again and again.

    The process that runs a campaign starts no thread, and does nothing but `load`: `prepare` runs in a fork of its own,
    trials in forks (lanes) that do many of them one after the other, and are replaced when one crashes or hangs.

    Attributes:
        name: of the campaign and of its JSON.
        full: trials of a full run.
        few: trials of a short run, some of each kind.
        seconds: limit for one trial, far above what it takes on a busy machine.
        memory: bytes of address space that a lane may add to what it has after `begin`; None: no limit.
        preload: it runs under the shim of `calls`.
    """

    name: str
    full: int
    few: int
    seconds: float = 60.0
    memory: int | None = None
    preload: bool = False

    def __init__(self, seed: int, directory: Path, short: bool = False) -> None:
        """Make a campaign.

        Args:
            seed: of all random numbers.
            directory: to work in.
            short: each trial is as small as it can be, for tests.
        """
        self.seed, self.directory, self.short = seed, directory, short

    def rng(self, number: int) -> random.Random:
        """Return the random generator of one trial, the same for the same seed."""
        return random.Random(f"{self.name} {self.seed} {number}")

    def load(self) -> None:
        """Load modules and compiled kernels, once for all forks."""
        for group in warmup.ALL:
            warmup.compile_group(group)

    def prepare(self) -> None:  # noqa: B027
        """Make what all trials start from, in files below `directory`."""

    def begin(self) -> None:  # noqa: B027
        """Make a lane ready, before its memory is limited."""

    @abstractmethod
    def kind(self, number: int) -> str:
        """Return the row of the table that a trial belongs to."""

    @abstractmethod
    def trial(self, number: int) -> Found:
        """Do one trial, from nothing but the seed and its number."""


@dataclass
class Tally:
    """What came of the trials so far."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    measured: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, number: int, verdict: Found) -> None:
        """Count a trial."""
        self.rows.setdefault(kind, Counter())[verdict.outcome] += 1
        if verdict.what and verdict.outcome not in BAD:
            self.measured[kind] = verdict.what
        if verdict.outcome in BAD:
            self.failures.append({"number": number, "kind": kind, "outcome": verdict.outcome, "what": verdict.what})

    @property
    def total(self) -> Counter[str]:
        return sum(self.rows.values(), Counter())

    @property
    def good(self) -> bool:
        return not any(self.total[outcome] for outcome in BAD)

    def table(self, title: str) -> str:
        """Return readable lines."""
        width = max(map(len, [*self.rows, title, "all"]))
        lines = [f"{title:{width}}  {'tried':>9}" + "".join(f"{outcome:>11}" for outcome in OUTCOMES)]
        for kind, counts in [*sorted(self.rows.items()), ("all", self.total)]:
            figures = "".join(f"{counts[outcome]:11}" for outcome in OUTCOMES)
            lines.append(f"{kind:{width}}  {counts.total():9}{figures}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return all figures, and the first failures of each kind."""
        def figures(counts: Counter[str]) -> dict[str, int]:
            return {"tried": counts.total(), **{outcome: counts[outcome] for outcome in OUTCOMES}}

        return {
            "all": figures(self.total), "rows": {kind: figures(row) for kind, row in sorted(self.rows.items())},
            **({"measured": self.measured} if self.measured else {}), "failures": self.failures[:_KEPT],
        }


class _Lane:
    """A fork that does trials, and says before and after each."""

    def __init__(self, campaign: Campaign, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.reader, writer = os.pipe()
        self.pid = forked(lambda: _work(campaign, self.numbers, writer))
        os.close(writer)
        self.rest = b""
        self.current: int | None = None
        self.since = time.monotonic()

    def read(self) -> list[dict[str, Any]] | None:
        """Return the text that was written since the last call; None at the end."""
        data = os.read(self.reader, 1 << 16)
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.since = time.monotonic()
        return [json.loads(line) for line in lines]

    def end(self) -> int:
        """Kill all processes of the group that are left; return the status of `waitpid`."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.reader)
        return os.waitpid(self.pid, 0)[1]


def _work(campaign: Campaign, numbers: Sequence[int], writer: int) -> None:
    def say(**tree: Any) -> None:
        os.write(writer, json.dumps(tree).encode() + b"\n")

    campaign.begin()
    if campaign.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + campaign.memory, hard))
    for number in numbers:
        say(begins=number)
        try:
            verdict = campaign.trial(number)
        except BaseException as error:
            verdict = Found("crashed", told(error))
        say(ended=number, found=[verdict.outcome, verdict.what[:2000]])


def told(error: BaseException) -> str:
    """Return an error in one line, with the innermost lines of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {error} [{where}]"


def run(campaign: Campaign, numbers: Sequence[int], lanes: int, say: Callable[[str], None] = print) -> Tally:
    """Prepare a campaign and do these trials.

    Args:
        numbers: of the trials.
        lanes: processes at once.
        say: called with each failure as it is found.
    """
    campaign.load()
    status = os.waitpid(forked(campaign.prepare), 0)[1]
    if status:
        raise RuntimeError(f"the preparation of campaign '{campaign.name}' failed")
    tally = Tally()
    parts = [list(numbers)[start::lanes] for start in range(lanes)]
    running = [_Lane(campaign, part) for part in parts if part]

    def count(number: int, verdict: Found) -> None:
        kind = campaign.kind(number)
        tally.add(kind, number, verdict)
        if verdict.outcome in BAD:
            again = f"{campaign.name} --seed {campaign.seed} --only {number}"
            say(f"{verdict.outcome.upper()} {again} ({kind}): {verdict.what}")

    try:
        while running:
            ready = select.select([lane.reader for lane in running], [], [], 1.0)[0]
            for lane in list(running):
                ended = None
                if lane.reader in ready:
                    lines = lane.read()
                    if lines is None:
                        ended = "crashed"
                    for line in lines or ():
                        if "begins" in line:
                            lane.current = line["begins"]
                        else:
                            lane.numbers.remove(line["ended"])
                            lane.current = None
                            count(line["ended"], Found(*line["found"]))
                elif time.monotonic() - lane.since > campaign.seconds + (_BEGINS if lane.current is None else 0):
                    ended = "hung"
                if ended is None:
                    continue
                running.remove(lane)
                status = lane.end()
                if lane.current is not None:
                    lane.numbers.remove(lane.current)
                    why = f"the process ended with status {status}"
                    count(lane.current, Found(ended, why if ended == "crashed" else f"after {campaign.seconds:.0f} s"))
                elif lane.numbers:
                    raise RuntimeError(f"a lane of campaign '{campaign.name}' {ended} before its first trial: {status}")
                if lane.numbers:
                    running.append(_Lane(campaign, lane.numbers))
    finally:
        for lane in running:
            lane.end()
    return tally
