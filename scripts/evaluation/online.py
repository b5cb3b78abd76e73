"""Online runs: a workload that is killed and restored from its own compressed checkpoints while it trains.

Inshrinkerator, section 9.1 and Table 5. A run has evenly spaced failures and checkpoints at a fixed cadence. At a
failure everything in memory is overwritten with NaN, the newest checkpoint is restored, and training goes on with the
batches that the run without failures sees. The difference at the end is the degradation by all restores, and noise:
the system `noise` restores the exact state but for one part in a million, and shows how far chance alone leads.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsq_ckpt
from dsq_ckpt.cli import json_files
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.storage.description import list_linked_refinement
from dsq_ckpt.storage.manifest import iter_checkpoints
from evaluation.recording import default_directory, one_thread
from evaluation.report import Column, Row, digits, machine, percent, ratio
from evaluation.results import Results
from evaluation.workloads import NOISE_FLOOR, Workload, create, with_noise

REFERENCE_FILE = "reference.json"
OURS = "dsq"
WITHIN = 0.01
"""Largest relative rise of the final loss that counts as no degradation, as in the paper."""
PAPER_HOURS = (3, 8)
"""Hours between checkpoints in the paper's runs."""
_LOST = -12345  # what integers are overwritten with; no count of batches is negative

Report = Callable[[str], None]


def reference(name: str, seed: int, directory: Path | None = None, report: Report = lambda line: None) -> Row:
    """Return losses and accuracy of the run without failures; it is made once and kept beside the recording.

    Args:
        name: Name of the workload.
        seed: Seed of its weights and batches.
        directory: Of the recording, `default_directory` if None.
        report: Called with a line if the run has to be made.
    """
    path = (directory or default_directory(name, seed)) / REFERENCE_FILE
    with one_thread():
        workload = create(name, seed)
        # Bits, and so losses, differ between machines and versions.
        settings = {"run": workload.settings(), "machine": machine()["processor"], "torch": torch.__version__}
        if path.is_file():
            known: Row = json.loads(path.read_text())
            if known["settings"] == settings and "losses" in known:  # earlier ones kept the final loss alone
                return known
        report(f"{name}: the run without failures, {workload.steps} steps")
        every, losses = workload.checkpoint_every, list[float]()
        for step in range(0, workload.steps, every):
            workload.train(step, step + every)
            losses.append(workload.evaluate())
        figures = {
            "settings": settings, "loss": losses[-1], "accuracy": workload.accuracy(),
            "losses": {"every": every, "values": losses},
        }
    json_files.write(path, figures)
    return figures


def train_with_failures(
    workload: Workload, config: dsq_ckpt.DSQConfig, run: Path, failures: int = 10, per_failure: int = 4,
    report: Report = lambda line: None,
) -> Row:
    """Train a workload from its start to its end, with failures, and measure what its checkpoints cost.

    Args:
        workload: At step 0.
        config: Of the checkpoints.
        run: Directory for them, empty.
        failures: Number of failures; each follows a checkpoint at once.
        per_failure: Checkpoints from one failure to the next.
        report: Called with a line about every restore.

    Returns:
        The figures of the run; those that need one without failures are missing.

    Raises:
        ValueError: The run is too short for so many checkpoints.
        RuntimeError: A restore did not bring everything back.
    """
    count, every = _cadence(workload, failures, per_failure)
    saves: list[Row] = []
    restores: list[Row] = []
    training, saving = list[float](), list[float]()
    with (
        warnings.catch_warnings(record=True) as warned,
        dsq_ckpt.Compressor(
            workload.model, workload.optimizer, config, evaluate=workload.evaluate, history=dsq_ckpt.SaveHistory()
        ) as compressor,
    ):
        warnings.simplefilter("always")
        for number in range(1, count + 1):
            step = number * every
            with _timed(training):
                workload.train(step - every, step)
            loss = workload.evaluate()
            path = run / f"step-{step:06d}"
            with _timed(saving):
                compressor.save(path)
            saves.append({"step": step, "loss": loss, "seconds": saving[-1], **_searched(compressor.quality)})
            if number % per_failure == 0 and len(restores) < failures:
                restores.append({"step": step, **_fail_and_restore(workload, compressor, path)})
                report("  step {step}: loss {before:.4f} -> {after:.4f}".format(**restores[-1]))
        with _timed(training):
            workload.train(count * every, workload.steps)
    sizes, each = _sizes(run)
    for save, size in zip(saves, each, strict=True):
        save |= size
    per_checkpoint = statistics.mean(saving)
    return {
        "every": every, "failures": failures, "loss": workload.evaluate(), "accuracy": workload.accuracy(),
        "worst_restore": _worst(restores), **sizes,
        "evaluations_per_checkpoint": statistics.mean(save["evaluations"] for save in saves),
        "bound_missed": sum(not save["satisfied"] for save in saves),
        "train_seconds": sum(training), "save_seconds": per_checkpoint,
        "save_seconds_median": statistics.median(saving), "save_share": sum(saving) / sum(training),
        **{f"save_share_{hours}_h": per_checkpoint / (3600 * hours) for hours in PAPER_HOURS},
        "restores": restores, "checkpoints": saves, "warnings": len(warned),
        "warned": sorted({str(warning.message) for warning in warned})[:5],
    }


def train_with_noise(
    workload: Workload, failures: int = 10, per_failure: int = 4, report: Report = lambda line: None
) -> Row:
    """Train a workload as `train_with_failures` does, restoring the exact state but for a noise each time."""
    count, every = _cadence(workload, failures, per_failure)
    restores: list[Row] = []
    losses: list[Row] = []
    for number in range(1, count + 1):
        step = number * every
        workload.train(step - every, step)
        losses.append({"step": step, "loss": workload.evaluate()})
        if number % per_failure == 0 and len(restores) < failures:
            workload.restore(with_noise(workload.state(), step + workload.seed))
            restores.append({"step": step, "before": losses[-1]["loss"], "after": workload.evaluate()})
            report("  step {step}: loss {before:.4f} -> {after:.4f}".format(**restores[-1]))
    workload.train(count * every, workload.steps)
    return {
        "every": every, "failures": failures, "loss": workload.evaluate(), "accuracy": workload.accuracy(),
        "worst_restore": _worst(restores), "restores": restores, "checkpoints": losses,
    }


def _cadence(workload: Workload, failures: int, per_failure: int) -> tuple[int, int]:
    """Return the number of checkpoints, and of steps between them.

    Raises:
        ValueError: The run is too short for so many checkpoints.
    """
    count = (failures + 1) * per_failure
    every = workload.steps // count
    if every < 1:
        raise ValueError(f"{workload.steps} steps are too few for {count} checkpoints")
    return count, every


def _worst(restores: Sequence[Row]) -> float:
    """Return the largest relative rise of the loss at a restore."""
    return max((row["after"] / row["before"] - 1 for row in restores), default=0.0)


def _fail_and_restore(workload: Workload, compressor: dsq_ckpt.Compressor, path: Path) -> Row:
    """Lose all state in memory and restore a checkpoint; return the loss before and after."""
    before, damaged = workload.evaluate(), _damaged(workload)
    _destroy(workload)
    compressor.load(path)
    still = _damaged(workload)
    if still > damaged:  # a run that diverged may have had NaN before
        raise RuntimeError(f"the restore from {path.name} left {still - damaged} values as the failure had made them")
    return {"before": before, "after": workload.evaluate()}


def _tensors(workload: Workload) -> Iterator[Tensor]:
    """Yield all tensors that training changes."""
    yield from workload.model.parameters()
    yield from workload.model.buffers()
    for state in workload.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


@torch.no_grad()
def _destroy(workload: Workload) -> None:
    for tensor in _tensors(workload):
        tensor.fill_(math.nan if tensor.is_floating_point() else _LOST)


@torch.no_grad()
def _damaged(workload: Workload) -> int:
    return sum(
        int((~tensor.isfinite() if tensor.is_floating_point() else tensor == _LOST).sum())
        for tensor in _tensors(workload)
    )


def _searched(quality: Row | None) -> Row:
    """Return figures of one save's search; without `quality` there was no search, and no bound was missed."""
    quality = quality or {}
    keys = ("chosen", "degradation", "refinement_bits", "restore_loses", "restore_may_lose")
    return {
        "evaluations": quality.get("evaluations", 0), "satisfied": quality.get("satisfied", True),
        **{key: quality[key] for key in keys if key in quality},
    }


def _sizes(run: Path) -> tuple[Row, list[Row]]:
    """Return the ratios of a run on disk, and of every checkpoint.

    Weights are those that the manifests count as such: codes and protected values, without the tables, index and
    manifest that the full state is charged with. Weights that were stored exactly, because nothing kept to the bound,
    count at their uncompressed size, since manifests do not tell them from other exact tensors. A delta whose codes
    are all those of its parent has no bytes of weights; the best delta is one that changes something.
    """
    checkpoints = list(iter_checkpoints(run))
    weights = [manifest.kinds.get("weights") for _, manifest in checkpoints]
    whole = max((sizes.logical for sizes in weights if sizes), default=0)
    bases = [sizes.base + whole - sizes.logical if sizes else whole for sizes in weights]
    about = [dsq_ckpt.describe(path) for path, _ in checkpoints]
    logical, written, kept = (sum(row[f"bytes_{name}"] for row in about) for name in ("logical", "written", "kept"))
    linked = list_linked_refinement([manifest for _, manifest in checkpoints])
    kept += sum(file.size for file in linked)
    refined = sum(sizes.refinement for (_, manifest), sizes in zip(checkpoints, weights, strict=True)
                  if sizes and (manifest.refinement == "kept" or manifest.save_id in {of.name[:16] for of in linked}))
    deltas = [base for base, row in zip(bases, about, strict=True) if whole and not row["keyframe"]]
    changes = [base for base in deltas if base]
    ratios: Row = {
        "ratio_state_kept": logical / kept, "ratio_written": logical / written,
        "ratio_weights_kept": whole * len(checkpoints) / (sum(bases) + refined) if whole else None,
        "ratio_weights_base": whole * len(checkpoints) / sum(bases) if whole else None,
        "best_delta": whole / min(changes) if changes else None, "unchanged_deltas": len(deltas) - len(changes),
        "bytes": {"logical": logical, "written": written, "kept": kept, "weights_logical": whole * len(checkpoints),
                  "weights_base": sum(bases) if whole else None, "weights_refinements_kept": refined},
        "lossy_resumes": checkpoints[-1][1].lossy_resumes,
    }
    each: list[Row] = [
        {"keyframe": row["keyframe"], "ratio_written": row["bytes_logical"] / row["bytes_written"],
         "ratio_weights": whole / base if whole and base else None}
        for base, row in zip(bases, about, strict=True)
    ]
    return ratios, each


def configurations(
    system: str, epsilons: Sequence[float], own: Sequence[str] = ("{}",)
) -> Iterator[tuple[str, dsq_ckpt.DSQConfig | None]]:
    """Yield bounds to try, in order, and configurations: ours as given, published systems with the papers' bound.

    The noise floor has no configuration.
    """
    if system == NOISE_FLOOR:
        yield "-", None
    elif system == OURS:
        for text in own:
            config = dsq_ckpt.DSQConfig.create(json.loads(text))
            yield f"{config.search.bound} {config.search.epsilon:g}" + (f", {text}" if text != "{}" else ""), config
    elif SYSTEMS[system].space is None:
        yield "-", dsq_ckpt.DSQConfig.create({"system": system})
    else:
        for epsilon in epsilons:
            search = {"bound": "relative", "epsilon": epsilon}
            yield f"relative {epsilon:g}", dsq_ckpt.DSQConfig.create({"system": system, "search": search})


def run_system(
    name: str, seed: int, system: str, epsilons: Sequence[float], results: Results, exact: Row, failures: int = 10,
    per_failure: int = 4, report: Report = lambda line: None, own: Sequence[str] = ("{}",),
) -> list[Row]:
    """Run a system at ever stricter bounds, until one keeps the final loss within 1 %; returns a row for each.

    Ours is run with each of its configurations.

    Args:
        name: Name of the workload.
        seed: Seed of its weights and batches.
        system: Name of the system.
        epsilons: Bounds to try, the loosest first.
        results: Rows go there; one that is there is not run again.
        exact: The run without failures.
        failures, per_failure, report: As in `train_with_failures`.
        own: Configurations of ours, as JSON.
    """
    rows: list[Row] = []
    for bound, config in configurations(system, epsilons, own):
        with one_thread():
            workload = create(name, seed)
            settings = {"run": workload.settings(), "failures": failures, "per_failure": per_failure}
            settings["config"] = NOISE_FLOOR if config is None else config.model_dump(mode="json")
            row = results.find(settings)
            if row is None:
                report(f"{name}: {system}, {bound}")
                if config is None:
                    figures = train_with_noise(workload, failures, per_failure, report)
                else:
                    with tempfile.TemporaryDirectory(prefix="dsq-online-") as run:
                        figures = train_with_failures(workload, config, Path(run), failures, per_failure, report)
                worse = figures["loss"] / exact["loss"] - 1
                row = results.add(settings, {
                    "workload": name, "seed": seed, "name": system, "bound": bound, **figures,
                    "reference_loss": exact["loss"], "reference_accuracy": exact["accuracy"],
                    "reference_losses": exact["losses"],
                    "worse_by": worse, "within": worse <= WITHIN,  # false for a loss that is no number
                })
        rows.append(row)
        if row["within"] and system != OURS:
            break
    return rows


def versus(rows: Sequence[Row]) -> list[Row]:
    """Return, for each row of another lossy system, how many times smaller ours keeps the weights of the same run.

    Only where ours has no greater final loss, which `harmless` tells; else there are no `times`. `times_weights` is of
    all that is kept, `times_base` without the refinement of the newest checkpoints, as in a run of very many.
    """
    comparisons: list[Row] = []
    own = {_run(row): row for row in rows if row["name"] == OURS}
    for row in rows:
        mine = own.get(_run(row))
        if mine is None or mine is row or not row.get("ratio_weights_kept") or mine["loss"] is None:
            continue
        harmless = row["loss"] is None or mine["loss"] <= row["loss"]  # None: theirs diverged
        comparisons.append({
            **{key: row[key] for key in ("workload", "seed", "failures", "name", "bound")},
            "worse_by": row["worse_by"], "ours_worse_by": mine["worse_by"], "harmless": harmless,
            **{f"times_{short}": mine[key] / row[key] if harmless else None
               for short, key in (("weights", "ratio_weights_kept"), ("base", "ratio_weights_base"))},
        })
    return comparisons


def _run(row: Row) -> tuple[Any, ...]:
    return row["workload"], row["seed"], row["failures"], row["every"]


def targets(row: Row) -> list[tuple[str, bool]]:
    """Return the targets of our own system, and whether it reached them."""
    limits = [
        ("weights, kept", "ratio_weights_kept", 50), ("everything, written", "ratio_written", 15),
        ("best base layer of a delta, weights", "best_delta", 100),
    ]
    if row["workload"].startswith("gpt"):  # two moments per weight; SGD has one or none
        limits.insert(1, ("everything, kept", "ratio_state_kept", 40))
    outcomes = [(f"{text}: {ratio(row[key] or 0.0)}, target {limit}x", (row[key] or 0) >= limit)
             for text, key, limit in limits]
    return [("final loss worse by at most 1 %", bool(row["within"])), *outcomes]


NOTES = """\
worse by: final loss against the run without failures; restore: the worst rise of the loss at one; kept: base layers of
all checkpoints and the refinements that are left; written: mean of all checkpoints; best delta: of weights, among
those that change any code; empty: those that change none; missed: checkpoints for which nothing kept to the bound;
share: search and save against training, here and at one checkpoint in 3 or 8 hours.
The papers' systems keep the optimizer's state bit for bit, since the papers do not speak of it. That bounds their
ratios of everything; it is the ratio of weights that compares with the papers'."""

COLUMNS = (
    Column("<system", "name"), Column("<bound", "bound"), Column("loss", "loss", digits(4)),
    Column("worse by", "worse_by", percent), Column("accuracy", "accuracy", percent),
    Column("restore", "worst_restore", percent), Column("weights kept", "ratio_weights_kept", ratio),
    Column("all kept", "ratio_state_kept", ratio), Column("all written", "ratio_written", ratio),
    Column("best delta", "best_delta", ratio), Column("empty", "unchanged_deltas"),
    Column("evaluations", "evaluations_per_checkpoint", digits(1)), Column("missed", "bound_missed"),
    Column("resumes", "lossy_resumes"), Column("s / save", "save_seconds", digits(2)),
    Column("share", "save_share", percent),
    *(Column(f"at {hours} h", f"save_share_{hours}_h", lambda share: f"{100 * share:.4f} %") for hours in PAPER_HOURS),
)


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)
