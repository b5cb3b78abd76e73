"""Experiment 5 of LowDiff: how long it takes to be back where a failure was, against training the same steps again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from evaluation.lowdiff.process import Job, Worker
from evaluation.lowdiff.training import NEVER, Bench
from evaluation.report import Column, Row, digits, ratio

SYSTEMS = ("torch.save", "dcp.async_save", "checkfreq", "gemini", "naive", "lowdiff", "lowdiff+")
FULL = ("torch.save", "dcp.async_save", "checkfreq")
"""Systems that have nothing but full checkpoints, on disk."""
_FROM_THE_FIRST: dict[str, dict[str, Any]] = {
    "gemini": {"every": 1}, "naive": {"full_every": NEVER}, "lowdiff": {"snapshot_every": NEVER}, "lowdiff+": {},
}
"""Options with which the only full checkpoint on disk is the one before the first step."""
IN_MEMORY = ("gemini", "lowdiff+")
"""Systems that recover from the memory of a process which survives: the training process is killed."""


def recovery_times(
    bench: Bench, systems: Sequence[str], intervals: Sequence[int], repeats: int, again: bool = True
) -> list[Row]:
    """Recover after so many steps since the last full checkpoint, and train the steps again that are lost.

    Each repetition is a process of its own that has read nothing yet. Times are measured with the files in the page
    cache, as after the death of a process, and with them dropped from it, as after that of a machine.

    Args:
        bench: Where and on what; its rounds do not count.
        systems: To be compared.
        intervals: Steps from the full checkpoint to the failure.
        repeats: Of each recovery.
        again: Train the same steps again, too, in the process that recovered.
    """
    rows = []
    for interval in intervals:
        for system in systems:
            row = _recovery(bench, system, interval, repeats, again)
            trained = f", {row['again']:.2f} s to train them again" if again else ""
            bench.report(f"{system}, {interval} steps: {row['cold']:.3f} s{trained}")
            rows.append(row)
    return rows


def persisted_times(bench: Bench, systems: Sequence[str], repeats: int) -> list[Row]:
    """Measure recovery from disk of systems that are `IN_MEMORY`, after a loss of their memory."""
    return [_recovery(bench, system, 1, repeats, again=True, from_disk=True) for system in systems]


def _recovery(
    bench: Bench, system: str, interval: int, repeats: int, again: bool, from_disk: bool = False
) -> Row:
    """Train, fail, and recover again and again."""
    until = interval + 1 if system in FULL else 0  # the step of the full checkpoint
    options = {"every": until} if system in FULL else dict(_FROM_THE_FIRST[system])
    job = replace(bench.job(system, f"-{interval}{'-disk' if from_disk else ''}"), options=options)
    redone = interval if again else 0
    warm, cold = list[_Sample](), list[_Sample]()
    if system in IN_MEMORY and not from_disk:
        for number in range(repeats):
            # A recovery may take the memory with it, so each has a training that is killed.
            own = replace(job, directory=job.directory / str(number))
            known = _train(own, until, interval, kill=True)
            cold.append(_recover(own, known, redone, dropped=False, last=True))
        warm = cold
    else:
        known = _train(job, until, interval, kill=False)
        for _ in range(repeats):
            warm.append(_recover(job, known, redone, dropped=False))
            cold.append(_recover(job, known, redone, dropped=True))
    retraining = statistics.median(sample.again for sample in (*warm, *cold))
    seconds, last = statistics.median(sample.seconds for sample in cold), cold[-1]
    total = seconds + retraining * last.lost_steps / interval
    return {
        "name": f"{system}, from disk" if from_disk else system, "interval": interval,
        "warm": statistics.median(sample.seconds for sample in warm), "cold": seconds,
        "cold_min": min(sample.seconds for sample in cold), "cold_max": max(sample.seconds for sample in cold),
        "lost_steps": last.lost_steps, "again": retraining, "total": total, "speedup": retraining / total,
        "exact": last.exact, "error": last.error, "repeats": repeats,
    }


class _Known(NamedTuple):
    """A state that was reached: its step, its checksum, and all of it by name."""

    step: int
    digest: str
    tensors: dict[str, Any]


class _Sample(NamedTuple):
    """A recovery: its seconds, those of training the steps again, steps it did not reach, and how near it came."""

    seconds: float
    again: float
    lost_steps: int
    exact: bool | None
    error: float | None


def _train(job: Job, until: int, interval: int, kill: bool) -> _Known:
    """Train up to the failure."""
    with Worker(job) as worker:
        worker.call("prepare")
        worker.call("train", until + interval)
        known = _Known(until + interval, worker.call("digest"), worker.call("tensors"))
        worker.call("wait")
        if kill:
            worker.kill()
        else:
            worker.call("finish")
    return known


def _recover(job: Job, known: _Known, again: int, dropped: bool, last: bool = False) -> _Sample:
    """Recover in a new process, and train so many steps; after the `last` recovery no process of the system is left."""
    with Worker(job) as worker:
        step, seconds = worker.call("recover", dropped)
        exact = error = None
        if step == known.step:
            exact, error = worker.call("digest") == known.digest, _error(worker.call("tensors"), known.tensors)
        sample = _Sample(seconds, worker.call("retrain", again), known.step - step, exact, error)
    if last:
        with Worker(job) as worker:
            worker.call("recover")
            worker.call("prepare")
            worker.call("finish")
    return sample


def _error(recovered: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the relative difference of all weights, by the Euclidean norm."""
    names = [name for name in expected if name.startswith("model.")]
    difference = sum(float(np.sum(np.square(recovered[name] - expected[name], dtype=np.float64))) for name in names)
    return float(np.sqrt(difference / sum(float(np.sum(np.square(expected[n], dtype=np.float64))) for n in names)))


COLUMNS = (
    Column("<system", "name"), Column("steps", "interval"), Column("recovery, s", "cold", digits(3)),
    Column("in page cache", "warm", digits(3)), Column("lost steps", "lost_steps"),
    Column("s with those", "total", digits(3)), Column("training again, s", "again", digits(2)),
    Column("faster", "speedup", ratio), Column("bit for bit", "exact"), Column("error", "error", lambda v: f"{v:.1e}"),
)
NOTES = """\
Recovery: from the disk, or from memory where a system has the state there; lost steps are trained again. Error: of the
weights, relative, after a recovery that reached the last step."""
