"""Every system on recorded runs: size, degradation and cost, each with the configuration that it searched for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import dsq_ckpt
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.errors import DSQError
from evaluation.recording import load_recording
from evaluation.replay import MOMENTS, Replay, Replayed, replay
from evaluation.report import Column, Row, digits, percent, ratio, show

OURS = "dsq"
TARGETS = {"resnet": 1.8, "gpt": 2.2}
"""By workload: what our ratio of weights over that of `inshrinkerator` is to be at no greater degradation."""
RIVAL = "inshrinkerator"

SIZES = (
    Column("<system", "name"), Column("weights", "ratio_weights", ratio),
    Column("deltas alone", "ratio_weights_deltas", ratio), Column("best delta", "best_delta", ratio),
    Column("moments", "ratio_moments", ratio), Column("everything", "ratio_files", ratio),
    Column("degradation, mean", "degradation_mean", percent), Column("final", "degradation_final", percent),
    Column("max", "degradation_max", percent), Column("refined", "refined_mean", percent),
    Column("missed", "unsatisfied"), Column("<skipped", "skipped"),
)
SIZES_LEGEND = """\
weights, moments: times smaller, base layers over the whole run with its keyframe; everything: files but refinements
degradation: relative rise of the held-out loss with the weights that were read back, of the base layer
refined: its mean with refinement layers
missed: checkpoints that no configuration kept within the bound"""
COSTS = (
    Column("<system", "name"), Column("evaluations", "evaluations", digits(1)),
    Column("search, s", "seconds_search", digits(2)), Column("save, s", "seconds_save", digits(2)),
    Column("encode, M/s", "encode", digits(1)), Column("decode, M/s", "decode", digits(1)),
    Column("bits", "bits_stored", digits(3)), Column("codes", "bits_codes", digits(3)),
    Column("entropy", "bits_entropy", digits(3)),
)
COSTS_LEGEND = """\
evaluations, search and save (search included): per checkpoint
encode: elements of the state per second of a save without its search; decode: of a load of the last checkpoint
bits: per quantized weight in the file; codes: of their codes alone; entropy: of these codes given the previous ones"""
VERSUS = (
    Column("<against", "name"), Column("dsq at epsilon", "epsilon"), Column("dsq weights", "ours", ratio),
    Column("theirs", "theirs", ratio), Column("times", "times_weights", digits(2)),
    Column("times, everything", "times_files", digits(2)), Column("aim", "target"), Column("reached", "reached"),
)


def system_config(system: str, epsilon: float, sensitivity: float | None = None) -> dsq_ckpt.DSQConfig:
    """Return the configuration of a system with the papers' bound, on one thread: figures are per core.

    `sensitivity` is the strength of the gradients in the steps of weights, where it is not the system's.

    Raises:
        ConfigError: it cannot be configured so.
    """
    return dsq_ckpt.DSQConfig.create({
        "system": system, "search": {"bound": "relative", "epsilon": epsilon}, "storage": {"threads": 1},
    } | ({} if sensitivity is None else {"quantize": {"weights": {"codebook": {"sensitivity": sensitivity}}}}))


def compare(
    directories: Sequence[Path], epsilon: float, ours: Sequence[float], systems: Sequence[str],
    report: Callable[[str], None],
) -> Iterator[Row]:
    """Replay all systems on all recordings, one after the other.

    Args:
        directories: of recordings.
        epsilon: bound of every system.
        ours: further bounds for `dsq`.
        systems: names in `SYSTEMS`.
        report: called with progress, line by line.

    Yields:
        One row per recording, system and bound.
    """
    jobs = [(system, bound) for system in systems for bound in (epsilon, *(ours if system == OURS else ()))]
    for directory in directories:
        recorded = load_recording(directory).info["settings"]
        run = {"run": f"{recorded['workload']}, seed {recorded['seed']}", "workload": recorded["workload"]}
        for system, bound in jobs:
            report(f"{run['run']}: {system}, epsilon {bound:g}")
            row: Row = run | {"system": system, "epsilon": bound, "name": _name(system, bound, epsilon)}
            try:
                result = replay(directory, system_config(system, bound), report=report)
            except DSQError as error:
                report(f"  skipped: {error}")
                yield row | {"skipped": " ".join(str(error).split())}
                continue
            yield row | {"skipped": None} | summary(result)


def summary(result: Replay) -> Row:
    """Return the figures of a replay, for a table and for JSON."""
    points, degradations, refined = result.measured, result.degradations(), result.refined_degradations()
    elements = sum(point.codes.elements for point in result.checkpoints)
    bits = {
        name: sum(getattr(point.codes, name) for point in result.checkpoints) / elements if elements else math.nan
        for name in ("stored", "codes", "entropy")
    }
    deltas = [point.ratio() for point in result.checkpoints if not point.keyframe]
    return {
        "ratio_weights": result.ratio(), "ratio_weights_deltas": _known(result.ratio(deltas_only=True)),
        "ratio_moments": result.ratio(MOMENTS), "ratio_files": result.ratio_files,
        "best_delta": max(deltas, default=None),
        "degradation_mean": statistics.mean(degradations), "degradation_final": degradations[-1],
        "degradation_max": max(degradations),
        "refined_mean": statistics.mean(refined), "refined_max": max(refined),
        "unsatisfied": sum(not (point.quality or {}).get("satisfied", True) for point in points),
        "evaluations": statistics.mean(point.evaluations for point in points),
        "seconds_search": statistics.mean(point.seconds_search for point in points),
        "seconds_save": statistics.mean(point.seconds_save for point in points),
        # Medians: compiled kernels are loaded in the first save, and machines have slow moments.
        "encode": result.elements / 1e6 / statistics.median(p.seconds_save - p.seconds_search for p in points),
        "decode": result.elements / 1e6 / points[-1].seconds_load,
        **{f"bits_{name}": _known(value) for name, value in bits.items()},
        "elements": result.elements, "checkpoints": [_point(result, point) for point in result.checkpoints],
        "warnings": result.warnings,
    }


def _point(result: Replay, point: Replayed) -> Row:
    quality = point.quality or {}
    degradation = point.base_loss / point.loss - 1
    return {
        "step": point.step, "keyframe": point.keyframe, "ratio_weights": _known(point.ratio()),
        "degradation": degradation,
        "searched_degradation": quality.get("degradation"), "chosen": quality.get("chosen"), "lattice": point.lattice,
        "loss": point.loss, "base_loss": point.base_loss, "refined_loss": point.refined_loss,
        "evaluations": point.evaluations, "seconds_search": point.seconds_search, "seconds_save": point.seconds_save,
        "seconds_load": point.seconds_load, "files": point.files,
        "bytes": {kind: vars(part) for kind, part in sorted(point.kinds.items())},
    }


def versus(rows: Sequence[Row]) -> list[Row]:
    """Return, per recording, our ratio over that of each lossy system, at the largest bound with no more degradation.

    No more degradation: neither the mean nor the final degradation is greater than that of the other system.
    """
    comparisons = []
    for run in dict.fromkeys(row["run"] for row in rows):
        usable = [row for row in rows if row["run"] == run and row["skipped"] is None]
        own = sorted((row for row in usable if row["system"] == OURS), key=lambda row: -row["epsilon"])
        lossy = [row for row in usable if row["system"] != OURS and SYSTEMS[row["system"]].space is not None]
        comparisons += [_against(own, other) for other in lossy]
    return comparisons


def _against(own: Sequence[Row], other: Row) -> Row:
    aim = TARGETS.get(other["workload"]) if other["system"] == RIVAL else 1.0
    row: Row = {
        "run": other["run"], "name": other["name"], "system": other["system"], "target": aim, "theirs":
        other["ratio_weights"],
    }
    acceptable = [
        mine for mine in own
        if all(mine[f"degradation_{which}"] <= other[f"degradation_{which}"] for which in ("mean", "final"))
    ]
    if not acceptable:
        return row | {"epsilon": None, "reached": None}
    best = acceptable[0]
    times = best["ratio_weights"] / other["ratio_weights"]
    return row | {
        "epsilon": best["epsilon"], "ours": best["ratio_weights"], "times_weights": times,
        "times_files": best["ratio_files"] / other["ratio_files"], "reached": None if aim is None else times >= aim,
    }


def print_comparison(rows: Sequence[Row], against: Sequence[Row]) -> None:
    """Print tables per recording, and a summary for our system."""
    for run in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == run]
        show(f"{run}: size and degradation", SIZES, mine, SIZES_LEGEND)
        show(f"{run}: cost", COSTS, [row for row in mine if row["skipped"] is None], COSTS_LEGEND)
        beside = [row for row in against if row["run"] == run]
        show(f"{run}: dsq at no greater mean and final degradation", VERSUS, beside, "\n".join(_sentences(beside)))


def _sentences(against: Sequence[Row]) -> Iterator[str]:
    for row in against:
        if row["system"] == RIVAL and row["epsilon"] is not None:
            aim = "" if row["target"] is None else f" (aim {row['target']:g}: {'yes' if row['reached'] else 'NO'})"
            yield (
                f"dsq at epsilon {row['epsilon']:g} has {row['times_weights']:.2f} times the ratio of {row['name']} "
                f"at no greater mean and final degradation{aim}"
            )
        elif row["system"] == RIVAL:
            yield f"dsq at none of these epsilons causes as little degradation as {row['name']}"
    others = [row for row in against if row["system"] != RIVAL]
    behind = [row["name"] for row in others if row["epsilon"] is not None and not row["reached"]]
    unmatched = [row["name"] for row in others if row["epsilon"] is None]
    if others:
        yield f"ahead of every other system at equal degradation: {'no' if behind or unmatched else 'yes'}" + (
            f"; behind {', '.join(behind)}" if behind else ""
        ) + (f"; at no epsilon as little degradation as {', '.join(unmatched)}" if unmatched else "")


def _name(system: str, bound: float, usual: float) -> str:
    return system if bound == usual else f"{system} {bound:g}"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def all_systems() -> list[str]:
    """Return all systems, ours first."""
    return sorted(SYSTEMS, key=lambda name: name != OURS)
