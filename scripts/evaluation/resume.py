"""What a restart costs: training continued from a checkpoint, beside training continued from the exact state.

Both see the same batches and learning rates, so any difference is the checkpoint's. Beside them runs the floor: the
exact state with a relative noise of one part in a million in every value, which is what rounding alone may do.

The cost is told in lost steps: how many steps later the exact run would have reached the same held-out loss,
averaged over the next `COUNTED` steps. A loss difference is divided by the slope of the exact run's loss there.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dsq_ckpt
from evaluation.recording import one_thread
from evaluation.report import RESTART_EVERY, Column, Row, digits, percent, ratio
from evaluation.workloads import Workload, create, with_noise

STEPS, EVERY, COUNTED = 100, RESTART_EVERY, 50
"""Steps that are continued, between evaluations, and over which lost steps are averaged."""
FLOOR = "floor"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Curve:
    """Held-out losses of a continued run, after 0, `EVERY`, 2 `EVERY`, ... steps."""

    losses: list[float]

    def slope(self) -> float:
        """Return the loss that a step wins, by least squares over the curve; positive where training wins."""
        steps = np.arange(len(self.losses)) * EVERY
        return -float(np.polyfit(steps, self.losses, 1)[0])

    def behind(self, exact: Curve) -> list[float]:
        """Return the difference to the exact run's losses after each evaluation but the one before the first step."""
        return [own - other for own, other in zip(self.losses[1:], exact.losses[1:], strict=True)]


def lost_steps(curve: Curve, exact: Curve) -> float | None:
    """Return the steps that a run is behind the exact one, averaged over the next `COUNTED`.

    None where the exact run's loss does not fall over its curve: no later step has a lower loss.
    """
    slope = exact.slope()
    behind = curve.behind(exact)[: COUNTED // EVERY]
    return statistics.mean(behind) / slope if slope > 0 else None


def compare(
    name: str, seed: int, configs: Mapping[str, Any], points: Sequence[int], report: Report = lambda line: None,
    steps: int = STEPS,
) -> list[Row]:
    """Train a workload once, saving with every configuration, and continue it from each at several points.

    Args:
        name: Of the workload.
        seed: Of its weights and batches.
        configs: Configurations by name, as for `dsq_ckpt.Compressor`.
        points: Checkpoints to continue from, as numbers of steps; multiples of the workload's `checkpoint_every`.
        report: Called with a line about every continued run.
        steps: To continue for.

    Returns:
        A row for each point and configuration, and for the floor.

    Raises:
        ValueError: A point is not a checkpoint of the run.
    """
    rows: list[Row] = []
    with one_thread(), tempfile.TemporaryDirectory(prefix="dsq-resume-") as directory, ExitStack() as stack:
        workload = create(name, seed)
        every = workload.checkpoint_every
        if wrong := [point for point in points if point % every or not 0 < point <= workload.steps - steps]:
            raise ValueError(f"step {wrong[0]}: expected a multiple of {every}, {steps} steps or more before the end")
        compressors = {
            label: stack.enter_context(
                dsq_ckpt.Compressor(workload.model, workload.optimizer, config, evaluate=workload.evaluate)
            ) for label, config in configs.items()
        }
        for step in range(every, max(points) + 1, every):
            workload.train(step - every, step)
            paths = {label: Path(directory) / label / f"step-{step:06d}" for label in configs}
            for label, compressor in compressors.items():
                compressor.save(paths[label])
            if step in points:
                rows += [
                    {"workload": name, "seed": seed, "step": step, **row}
                    for row in _continue_all(workload, step, steps, paths, report)
                ]
    return rows


def _continue_all(
    workload: Workload, step: int, steps: int, paths: Mapping[str, Path], report: Report
) -> list[Row]:
    """Continue from the exact state, from that with noise, and from each checkpoint; the run is as before then."""
    exact = copy.deepcopy(workload.state())
    reference = _continued(workload, step, steps)
    states: dict[str, Any] = {FLOOR: with_noise(exact, workload.seed)}
    for label, path in paths.items():
        states[label] = copy.deepcopy(exact)
        dsq_ckpt.load(states[label], path)
    rows: list[Row] = []
    for label, state in states.items():
        workload.restore(state)
        curve = _continued(workload, step, steps)
        row = {
            "system": label, "slope": reference.slope(), "lost_steps": lost_steps(curve, reference),
            "behind": statistics.mean(curve.behind(reference)[: COUNTED // EVERY]) / reference.losses[0],
            "behind_at_end": curve.behind(reference)[-1] / reference.losses[-1],
            "worst_behind": max(curve.behind(reference)) / reference.losses[0],
            **update_error(workload.optimizer, exact["optimizer"], state["optimizer"]),
            "losses": [round(loss, 6) for loss in curve.losses],
            "exact_losses": [round(loss, 6) for loss in reference.losses],
        }
        if label in paths:
            about = dsq_ckpt.describe(paths[label])
            row |= {"bytes_logical": about["bytes_logical"], "bytes_written": about["bytes_written"]}
            row["written"] = about["bytes_logical"] / about["bytes_written"]
        rows.append(row)
        lost = row["lost_steps"]
        report(f"{workload.name} seed {workload.seed} step {step} {label}: "
               f"{'no' if lost is None else f'{lost:.2f}'} lost steps, update error {row['update_error']:.3f}")
    workload.restore(exact)
    return rows


def _continued(workload: Workload, step: int, steps: int) -> Curve:
    losses = [workload.evaluate()]
    for first in range(step, step + steps, EVERY):
        workload.train(first, first + EVERY)
        losses.append(workload.evaluate())
    return Curve(losses)


def update_error(
    optimizer: torch.optim.Optimizer, exact: Mapping[str, Any], restored: Mapping[str, Any]
) -> dict[str, float]:
    """Compare the direction that an optimizer's next update takes from a restored state and from the exact one.

    For Adam `m / (sqrt(v) + eps)`, both bias-corrected; for SGD its momentum. Matrices only.

    Args:
        optimizer: Tells the kind and its constants.
        exact: Its state dict as `get_state_dict` makes it.
        restored: The same, from a checkpoint.

    Returns:
        `update_error`, the relative error over all elements; `update_cosine`, the mean over tensors;
        `update_cosine_worst`, of the tensor that fares worst. Zeros and ones for an optimizer without such state.
    """
    difference = total = 0.0
    cosines = []
    for name, state in exact["state"].items():
        one, other = (_update(optimizer, part) for part in (state, restored["state"][name]))
        if one is None or other is None or one.ndim < 2 or not one.any():
            continue
        difference += float((one - other).square().sum())
        total += float(one.square().sum())
        cosines.append(float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0)))
    if not cosines:
        return {"update_error": 0.0, "update_cosine": 1.0, "update_cosine_worst": 1.0}
    return {
        "update_error": (difference / total) ** 0.5, "update_cosine": statistics.mean(cosines),
        "update_cosine_worst": min(cosines),
    }


def _update(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Tensor | None:
    if "exp_avg" in state:
        beta1, beta2 = optimizer.defaults["betas"]
        count = float(state["step"])
        mean, square = state["exp_avg"] / (1 - beta1**count), state["exp_avg_sq"] / (1 - beta2**count)
        update: Tensor = mean / (square.sqrt() + optimizer.defaults["eps"])
        return update
    return state.get("momentum_buffer")


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each workload and system: medians and the worst over points and seeds."""
    summaries: list[Row] = []
    for workload, system in dict.fromkeys((row["workload"], row["system"]) for row in rows):
        own = [row for row in rows if (row["workload"], row["system"]) == (workload, system)]
        lost = [row["lost_steps"] for row in own if row["lost_steps"] is not None]
        summaries.append({
            "workload": workload, "system": system, "points": len(own),
            "lost_steps": statistics.median(lost) if lost else None, "worst": max(lost, default=None),
            "behind": statistics.median(row["behind"] for row in own),
            "update_error": statistics.median(row["update_error"] for row in own),
            "update_cosine_worst": min(row["update_cosine_worst"] for row in own),
            "written": statistics.median(row["written"] for row in own) if "written" in own[0] else None,
        })
    return summaries


COLUMNS = (
    Column("workload", "workload"), Column("state", "system"), Column("points", "points"),
    Column("lost steps", "lost_steps", digits(2)), Column("worst", "worst", digits(2)),
    Column("loss behind", "behind", lambda share: f"{100 * share:.3f} %"),
    Column("update error", "update_error", percent), Column("worst cosine", "update_cosine_worst", digits(3)),
    Column("written", "written", ratio),
)
NOTES = (
    f"lost steps: how much later the exact run has the same held-out loss, mean of the next {COUNTED} steps; medians "
    "over points and seeds, and the worst. floor: the exact state with a noise of 1e-6 in every value."
)
