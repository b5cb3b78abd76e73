"""What checkpointing on one CPU takes from training on another: they share caches, memory and the disk.

In a job the checkpointing process is idle most of the time, and what it takes is lost in the noise. So its work is done
over and over, without a pause, and blocks of one training process take turns: with that work going on, and without.
What training is slowed by then is the share of that process's time which training loses: `contention` of
`dsq_ckpt.lowdiff.tuning.Costs`.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.lowdiff import segments, snapshots
from dsq_ckpt.lowdiff.encoding import encode_sparse
from evaluation.lowdiff.base import keep_to
from evaluation.lowdiff.process import Worker, processes
from evaluation.lowdiff.rounds import Plan, Report, block, quartile
from evaluation.lowdiff.systems import WITHOUT
from evaluation.lowdiff.training import NEVER, Bench
from evaluation.report import Column, Row, percent

STEPS, SNAPSHOTS = "logged steps", "snapshots"
_SESSION = "0" * 16


def contention(bench: Bench, logged: int) -> list[Row]:
    """Measure it for the two kinds of work that a log's process has.

    Args:
        bench: Where and on what; its setting compresses gradients.
        logged: Steps of the log that is written again and again.
    """
    job = bench.job("lowdiff", "-recorded", snapshot_every=NEVER, batch=1)
    with Worker(job) as worker:
        worker.call("train", logged)  # so that there are moments in the snapshot
        worker.call("prepare")
        worker.call("train", logged)
        worker.call("finish")
    with Worker(bench.job(WITHOUT)) as training:
        training.call("train", 0, bench.plan.warm_up)
        return [
            _measured(kind, training, _Busy(kind, job.directory, bench), bench.plan, bench.report)
            for kind in (STEPS, SNAPSHOTS)
        ]


def _measured(kind: str, training: Worker, busy: _Busy, plan: Plan, report: Report) -> Row:
    ratios, blocks = [], []
    with busy:
        before = statistics.fmean(block(training, plan).seconds)
        for number in range(plan.rounds):
            busy.begin()
            slowed = statistics.fmean(block(training, plan).seconds)
            busy.pause()
            after = statistics.fmean(block(training, plan).seconds)
            alone = (before + after) / 2
            ratios.append(slowed / alone - 1)
            blocks.append([alone, slowed])
            report(f"round {number + 1} of {plan.rounds}, {kind}: {1e3 * slowed:.1f} ms, {1e3 * alone:.1f} without")
            before = after
    return {
        "name": kind, "contention": statistics.median(ratios), "contention_low": quartile(ratios, 1),
        "contention_high": quartile(ratios, 3), "work": busy.seconds / busy.done, "done": busy.done,
        "rounds": plan.rounds, "blocks": blocks,
    }


class _Busy:
    """A process that does one kind of work without a pause.

    Attributes:
        done: How often it did it.
        seconds: That this took.
    """

    def __init__(self, kind: str, source: Path, bench: Bench) -> None:
        target = bench.directory / f"busy-{kind.replace(' ', '-')}"
        context = processes()
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(
            target=_work, args=(child_connection, kind, source, target, bench.cores.checkpointing), daemon=True
        )
        self.done, self.seconds = 0, 0.0

    def __enter__(self) -> _Busy:
        self._process.start()
        self._connection.recv()  # it is ready
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def begin(self) -> None:
        """Start working."""
        self._connection.send(True)

    def pause(self) -> None:
        """Stop working until `begin`."""
        self._connection.send(False)
        done, seconds = self._connection.recv()
        self.done += done
        self.seconds += seconds


def _work(connection: Connection, kind: str, source: Path, target: Path, core: int | None) -> None:
    keep_to(core)
    torch.set_num_threads(1)
    work = (_steps if kind == STEPS else _snapshots)(source, target)
    next(work)
    connection.send(None)
    while connection.recv():
        started, done = time.perf_counter(), 0
        while not connection.poll():
            next(work)
            done += 1
        connection.recv()
        connection.send((done, time.perf_counter() - started))


def _steps(source: Path, target: Path) -> Iterator[None]:
    """Encode and write steps of a log, each by itself, as often as it is asked for one."""
    (target / segments.LOG).mkdir(parents=True)
    opened = [segments.LogSegment(path) for _, path in segments.list_segments(source)]
    known = []
    for segment in opened:
        for number, about in segment.steps.items():
            sent, gradients = segment.sent_indices(number), segment.gradients(number)
            places, values, start = [], [], 0
            for entry in segment.entries:
                own = sent[entry.name]
                assert own is not None, "the log has all of a gradient; compress it"
                places.append(own + start)
                values.append(gradients[entry.name][own])
                start += entry.elements
            told = {key: value for key, value in about.items() if key not in ("step", "blocks")}
            known.append((segment.entries, told, torch.cat(places), torch.cat(values)))
    for number in count(1):
        entries, told, where, what = known[number % len(known)]
        blocks: list[bytes] = []

        def add(data: bytes, blocks: list[bytes] = blocks) -> int:
            blocks.append(data)
            return len(blocks) - 1

        told = {**told, "grads": [{**told["grads"][0], **encode_sparse(where, what, add)}]}
        step = segments.EncodedStep(number, told, blocks)
        segments.write_segment(target, _SESSION, 0, 1, entries, [step], fsync=True)
        for name, path in segments.list_segments(target):
            if name.last < number:
                path.unlink()
        yield


def _snapshots(source: Path, target: Path) -> Iterator[None]:
    """Save the snapshot of a log, as often as it is asked for."""
    (newest, _), *_ = snapshots.list_snapshots(source)
    with snapshots.Snapshot(newest) as snapshot:
        names = [name for name in snapshot.names() if name != ".".join(snapshots.META)]
        snapshot_tensors = [snapshots.SnapshotTensor((name,), snapshot.tensor(name)) for name in names]
        meta = snapshot.meta
    target.mkdir(parents=True)
    config = snapshots.snapshot_config("exact")
    for number in count(1):
        snapshots.save_snapshot(target, number, snapshot_tensors, meta, config, SingleProcess())
        shutil.rmtree(snapshots.snapshot_directory(target, number - 1), ignore_errors=True)
        yield


COLUMNS = (
    Column("<work", "name"), Column("ms each", "work", lambda value: f"{1e3 * value:.1f}"),
    Column("contention", "contention", percent), Column("quartiles", "contention_low", percent),
    Column("", "contention_high", percent), Column("rounds", "rounds"),
)
NOTES = """\
Contention: by how much training takes longer while the other CPU does nothing but this work; so the share of that
work's time which training loses."""
