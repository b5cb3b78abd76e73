"""Which peers there are, what each is given, and rows side by side at equal degradation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evaluation.peers.bitsnap import BitSnap
from evaluation.peers.environment import Worker, install
from evaluation.peers.excp import FIXED, MEAN_KNOBS, PUBLISHED, ExCP, Knob
from evaluation.peers.packaged import Exact, Lossless, NNCodec, ZipNN, Zstd
from evaluation.peers.walk import Continuation, Peer, walk, walk_ours
from evaluation.recording import load_recording
from evaluation.report import Column, Row, digits, percent, ratio, show

OURS = "dsq"
TOLERANCE = 0.001
"""Degradations that differ by less count as equal: relative rise of the held-out loss."""


class Job(NamedTuple):
    """One peer on one part of the state.

    Attributes:
        make: Makes the peer; called with what starts the process of packages that need one.
        part: Of the state.
        bounded: It is run at every bound, else once.
        lossless: What comes back must be the same bit for bit.
    """

    make: Callable[[Callable[[], Worker]], Peer]
    part: str
    bounded: bool = False
    lossless: bool = True


WEIGHTS, STATE, BF16 = "weights", "weights + moments", "weights in bf16"


def _coder(name: str, xor: bool, coder: Callable[[Callable[[], Worker]], Zstd | ZipNN]) -> Any:
    return lambda worker: Lossless(f"{name}, XOR" if xor else name, coder(worker), xor)


def _exact(deltas: bool) -> Any:
    return lambda worker: Exact("dsq, exact, deltas" if deltas else "dsq, exact", deltas)


def _excp(knob: Knob) -> Any:
    return lambda worker: ExCP(f"excp, {knob.alpha:g}, {knob.bits} bits", (knob,))


def _nncodec(worker: Callable[[], Worker]) -> Peer:
    return NNCodec(worker())


def _zstd(worker: Callable[[], Worker]) -> Zstd:
    return Zstd()


def _zipnn(worker: Callable[[], Worker]) -> ZipNN:
    return ZipNN(worker())


JOBS: dict[str, list[Job]] = {
    "excp": [
        Job(lambda worker: ExCP(), STATE, bounded=True, lossless=False),
        Job(lambda worker: ExCP("excp, mean", MEAN_KNOBS), STATE, bounded=True, lossless=False),
        *(Job(_excp(knob), STATE, lossless=False) for knob in FIXED),
        # As its authors run it, whatever the degradation here.
        Job(lambda worker: ExCP("excp, published", (PUBLISHED,)), STATE, lossless=False),
    ],
    "nncodec": [Job(_nncodec, WEIGHTS, bounded=True, lossless=False)],
    "bitsnap": [Job(lambda worker: BitSnap(), BF16)],
    "zstd": [Job(_coder("zstd", xor, _zstd), part) for part in (STATE, BF16) for xor in (False, True)],
    "zipnn": [Job(_coder("zipnn", xor, _zipnn), part) for part in (STATE, BF16) for xor in (False, True)],
    "exact": [Job(_exact(deltas), part) for part in (STATE, BF16) for deltas in (False, True)],
    OURS: [],
}
"""By the name that `--peers` takes; `exact` is `dsq` without loss, `dsq` itself is replayed at its bounds."""

COLUMNS = (
    Column("<state", "part"), Column("<peer", "name"), Column("bound", "epsilon", percent),
    Column("ratio", "ratio", ratio), Column("after the first", "ratio_later", ratio),
    Column("degradation, mean", "degradation_mean", percent),
    Column("final", "degradation_final", percent), Column("max", "degradation_max", percent),
    Column("missed", "missed"), Column("continued", "continued", percent),
    Column("compress, MB/s", "compress", digits(2)), Column("decompress, MB/s", "decompress", digits(2)),
)
NOTES = """\
ratio: bytes of the tensors over those written, all checkpoints together; after the first: without the first one, which
is a keyframe of dsq, and of others a difference to the state at step 0; degradation: relative rise of the held-out loss
with what was read back; continued: the same after 20 more steps; missed: checkpoints beyond the bound
speeds: medians"""
VERSUS = (
    Column("<state", "part"), Column("<peer", "name"), Column("bound", "epsilon", percent),
    Column("ratio", "theirs", ratio), Column("sensitivity of dsq", "sensitivity"),
    Column("dsq at no more degradation", "ours", ratio), Column("its bound", "at", percent),
    Column("times the ratio", "times", digits(2)), Column("after the first", "times_later", digits(2)),
    Column("times the speed", "faster", digits(1)),
    Column("of decompression", "faster_back", digits(1)),
)


def compare(
    directory: Path, peers: Sequence[str], epsilons: Sequence[float], ours: Sequence[float],
    sensitivities: Sequence[float], report: Callable[[str], None],
) -> Iterator[Row]:
    """Compress a recorded run with every peer at every bound, and with `dsq` at more of them.

    Args:
        directory: Of the recording.
        peers: Of `JOBS`.
        epsilons: Bounds of every lossy peer, and of `dsq`.
        ours: Further bounds of `dsq`.
        sensitivities: Further strengths of the gradients in the steps of `dsq`, at all of its bounds.
        report: Called with progress, line by line.

    Yields:
        One row per peer, part of the state and bound.
    """
    recorded = load_recording(directory).info["settings"]
    run: Row = {"run": f"{recorded['workload']}, seed {recorded['seed']}", "workload": recorded["workload"]}
    continuation = Continuation(directory)
    with ExitStack() as stack:
        started: list[Worker] = []

        def worker() -> Worker:
            if not started:
                started.append(Worker(install(report)))
                stack.callback(started[0].close)
            return started[0]

        for name in peers:
            for job in JOBS[name]:
                peer = job.make(worker)
                for epsilon in epsilons if job.bounded else [None]:
                    report(f"{run['run']}: {peer.name}, {job.part}, bound {epsilon}")
                    row = walk(
                        directory, peer, epsilon, moments=job.part == STATE, lossless=job.lossless,
                        dtype=torch.bfloat16 if job.part == BF16 else torch.float32, continuation=continuation,
                        report=report,
                    )
                    yield run | {
                        "peer": name, "name": peer.name, "part": job.part, "epsilon": epsilon, "lossless": job.lossless,
                    } | row
            if name != OURS:
                continue
            bounds = sorted({*epsilons, *ours}, reverse=True)
            for part, sensitivity, epsilon in itertools.product((WEIGHTS, STATE), (None, *sensitivities), bounds):
                strength = "by default" if sensitivity is None else sensitivity
                report(f"{run['run']}: dsq, {part}, bound {epsilon}, sensitivity {strength}")
                for row in walk_ours(
                    directory, epsilon, moments=part == STATE, sensitivity=sensitivity, continuation=continuation,
                    report=report,
                ):
                    yield run | {"peer": name, "part": part, "epsilon": epsilon, "lossless": False} | row


def versus(rows: Sequence[Row]) -> list[Row]:
    """Return, per row of a lossy peer, the highest ratio of `dsq` at no greater mean and final degradation.

    There is one for each strength of the gradients in the steps of `dsq`.
    """
    comparisons = []
    lossy = [row for row in rows if not row["lossless"]]
    strengths = dict.fromkeys(row.get("sensitivity") for row in lossy if row["peer"] == OURS)
    for sensitivity, other in itertools.product(strengths or [None], lossy):
        if other["peer"] == OURS:
            continue
        acceptable = [
            row for row in lossy
            if row["peer"] == OURS and row.get("sensitivity") == sensitivity
            and all(row[key] == other[key] for key in ("run", "part"))
            and all(
                row[f"degradation_{which}"] <= max(other[f"degradation_{which}"], 0.0) + TOLERANCE
                for which in ("mean", "final")
            )
        ]
        comparison: dict[str, Any] = {key: other[key] for key in ("run", "part", "name", "epsilon")}
        comparison["sensitivity"] = sensitivity
        comparison["theirs"] = other["ratio"]
        if acceptable:
            best = max(acceptable, key=lambda row: row["ratio"])
            comparison |= {
                "ours": best["ratio"], "at": best["epsilon"], "layers": best["name"],
                "times": best["ratio"] / other["ratio"],
                "times_later": (best["ratio_later"] or 0.0) / (other["ratio_later"] or math.inf),
                "faster": best["compress"] / other["compress"],
                "faster_back": best["decompress"] / other["decompress"],
            }
        comparisons.append(comparison)
    return comparisons


def print_comparison(rows: Sequence[Row], against: Sequence[Row]) -> None:
    """Print the tables of every run."""
    for run in dict.fromkeys(row["run"] for row in rows):
        show(f"{run}: size, degradation and speed", COLUMNS, [row for row in rows if row["run"] == run], NOTES)
        beside = [row for row in against if row["run"] == run]
        show(f"{run}: dsq at no greater mean and final degradation", VERSUS, beside)
