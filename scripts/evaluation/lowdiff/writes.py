"""Experiments 6 and 7 of LowDiff: how long writing takes by batch size, and how much is stored."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsq_ckpt.lowdiff import segments
from evaluation.lowdiff.process import Worker
from evaluation.lowdiff.rounds import measure
from evaluation.lowdiff.training import NEVER, Bench, options_of
from evaluation.report import Column, Row, percent

FULL = ("torch.save", "dcp.async_save", "checkfreq", "gemini")
"""Systems whose checkpoints are all full ones."""


def batched_writes(bench: Bench, sizes: Sequence[int], steps: int, repeats: int) -> list[Row]:
    """Write the logged steps of a run in batches of several sizes (experiment 6).

    The same encoded steps are written to files again and again, the sizes in turns; and the log is run with each size.

    Args:
        bench: Where and on what; its setting compresses gradients.
        sizes: Steps that are written at once.
        steps: Of the run whose log is written; at least the largest size.
        repeats: Of the writing.
    """
    recorded = _recorded(bench, steps)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    written: dict[int, int] = {}
    for number in range(repeats):
        for size in sizes:
            directory = bench.directory / f"write-{number}-{size}"
            (directory / segments.LOG).mkdir(parents=True)
            started = time.perf_counter()
            written[size] = _write(directory, recorded, size)
            seconds[size].append((time.perf_counter() - started) / len(recorded.steps))
    jobs = {
        f"{size}": bench.job("lowdiff", f"-batch-{size}", snapshot_every=NEVER, batch=size) for size in sizes
    }
    costs = measure(jobs, bench.plan, bench.report)
    first = statistics.median(seconds[sizes[0]])
    return [
        {
            "name": f"batch {size}", "batch": size, "write": statistics.median(seconds[size]),
            "write_min": min(seconds[size]), "write_max": max(seconds[size]),
            "saved": 1 - statistics.median(seconds[size]) / first, "bytes": written[size] / len(recorded.steps),
            "repeats": repeats, **costs[f"{size}"].row(),
        }
        for size in sizes
    ]


class _Recorded:
    """Steps of a log, and what is needed to write them again."""

    def __init__(self, directory: Path) -> None:
        files = sorted((directory / segments.LOG).iterdir())
        opened = [segments.LogSegment(path) for path in files if segments.SegmentName.from_path(path) is not None]
        self.entries = opened[0].entries
        self.steps = [
            segments.EncodedStep(number, _log_metadata(segment.steps[number]), segment.blocks(number))
            for segment in opened for number in sorted(segment.steps)
        ]
        for segment in opened:
            segment.close()


def _log_metadata(told: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if key not in ("step", "blocks")}


def _recorded(bench: Bench, steps: int) -> _Recorded:
    job = bench.job("lowdiff", "-recorded", snapshot_every=NEVER, batch=1)
    with Worker(job) as worker:
        worker.call("prepare")
        worker.call("train", steps)
        worker.call("finish")
    return _Recorded(job.directory)


def _write(directory: Path, recorded: _Recorded, size: int) -> int:
    session, steps = "0" * 16, recorded.steps
    return sum(
        segments.write_segment(directory, session, 0, 1, recorded.entries, steps[at : at + size], fsync=True).size
        for at in range(0, len(steps), size)
    )


def storage(bench: Bench, compressors: Sequence[str], steps: int) -> list[Row]:
    """Measure bytes of a checkpoint (experiment 7): full, naive difference, and logged step by compression.

    Args:
        bench: Where and on what.
        compressors: Of gradients, for the log.
        steps: That are checkpointed, each.
    """
    rows = []
    for system in FULL:
        job = bench.job(system, **options_of(system))
        job = replace(job, options={**job.options, "persist_every": 1}) if system == "gemini" else job
        with Worker(job) as worker:
            worker.call("prepare")
            for _ in range(steps):
                worker.call("train", 1)
                worker.call("wait")
            sizes = worker.call("bytes")
            worker.call("finish")
        rows.append(_size(system, "full checkpoint", sizes["written"] / steps, sizes))
    jobs = [(bench.job("naive", full_every=NEVER), "difference")]
    for compressor in compressors:
        setting = replace(bench.setting, compressor=compressor)
        jobs.append((replace(bench, setting=setting).job(
            "lowdiff", f"-{compressor}", snapshot_every=NEVER, batch=1), f"step, {compressor}"))
    for job, what in jobs:
        with Worker(job) as worker:
            worker.call("prepare")
            before = worker.call("bytes")["stored"]
            worker.call("train", steps)
            worker.call("wait")
            sizes = worker.call("bytes")
            worker.call("finish")
        if job.system == "lowdiff" and job.setting.compressor == compressors[0]:
            rows.append(_size(job.system, "snapshot before the first step", before, sizes))
        rows.append(_size(job.system, what, (sizes["stored"] - before) / steps, sizes))
    return rows


def _size(system: str, what: str, size: float, sizes: dict[str, int]) -> Row:
    return {"name": system, "what": what, "bytes": size, "share": size / sizes["state"], "state": sizes["state"]}


WRITE_COLUMNS = (
    Column("<steps", "name"), Column("ms to write a step", "write", lambda value: f"{1e3 * value:.3f}"),
    Column("less by", "saved", percent), Column("kB / step", "bytes", lambda value: f"{value / 1e3:.1f}"),
    Column("overhead", "overhead", percent), Column("quartiles", "overhead_low", percent),
    Column("", "overhead_high", percent),
)
SIZE_COLUMNS = (
    Column("<system", "name"), Column("<of", "what"), Column("kB", "bytes", lambda value: f"{value / 1e3:.1f}"),
    Column("of the state", "share", percent),
)
