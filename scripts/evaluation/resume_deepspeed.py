"""What a restart costs under DeepSpeed: ZeRO-2 on two ranks in bf16, from compressed tags and from DeepSpeed's own.

The run that goes on without a restart sees the same batches, so that training losses of the same step can be compared.
"""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import numpy as np
from demo import DemoError, Event, launch, of
from demo_deepspeed import CONFIG, OURS

from evaluation.report import Column, Row, digits, percent, ratio
from evaluation.resume import COUNTED, STEPS, Report

RANKS = 2
FORMATS = {"DeepSpeed's own tags": False, "default": True}
"""Names of what is restored from, and whether it is compressed."""


def compare(directory: Path, seed: int, point: int, report: Report = lambda line: None) -> list[Row]:
    """Train without a restart, and again with one at a step from each kind of tag.

    Args:
        directory: For runs and logs; empty.
        seed: Of the initial weights and of the batches.
        point: Step that is restarted at.
        report: Called with a line about every restart.

    Returns:
        A row for each kind of tag.

    Raises:
        DemoError: A run failed.
    """
    def trained(name: str, config: Path, last: int) -> dict[int, float]:
        schedule = ("--steps", str(last), "--save-every", str(last), "--validation-batches", "0", "--seed", str(seed))
        where = directory / name
        where.mkdir(exist_ok=True)
        status, events = launch(where, str(last), RANKS, *schedule, "--deepspeed_config", str(config), target=OURS)
        if status:
            raise DemoError(f"training with {name} ended with status {status}, see {where / f'{last}.log'}")
        made.extend(of(events, "save"))
        return {event["step"]: event["loss"] for event in of(events, "step")}

    tree = json.loads(CONFIG.read_text())
    made: list[Event] = []
    rows: list[Row] = []
    whole: dict[int, float] = {}
    for name, compressed in FORMATS.items():
        config = directory / f"{compressed}.json"
        config.write_text(json.dumps(tree | {"dsq_checkpoint": tree["dsq_checkpoint"] | {"enabled": compressed}}))
        if not whole:
            whole = trained("without a restart", config, point + STEPS)
        made.clear()
        trained(name, config, point)
        save_report = made[0].get("report", {})
        own = trained(name, config, point + STEPS)
        losses = [whole[step] for step in range(point + 1, point + STEPS + 1)]
        slope = -float(np.polyfit(np.arange(STEPS), losses, 1)[0])
        behind = [own[step] - whole[step] for step in range(point + 1, point + STEPS + 1)]
        lost = statistics.mean(behind[:COUNTED]) / slope
        report(f"seed {seed} step {point} {name}: {lost:.2f} lost steps")
        rows.append({
            "seed": seed, "step": point, "system": name, "slope": slope, "lost_steps": lost,
            "behind": statistics.mean(behind[:COUNTED]) / losses[0],
            "behind_at_end": statistics.mean(behind[-10:]) / losses[-1],
            "written": save_report["bytes_logical"] / save_report["bytes_written"] if save_report else None,
            "losses": [round(own[step], 5) for step in sorted(own) if step > point],
            "exact_losses": [round(loss, 5) for loss in losses],
        })
        shutil.rmtree(directory / name)
    return rows


def summary(rows: list[Row]) -> list[Row]:
    """Return a row for each kind of tag: medians and the worst over points and seeds."""
    summaries: list[Row] = []
    for system in FORMATS:
        own = [row for row in rows if row["system"] == system]
        summaries.append({
            "system": system, "points": len(own), "worst": max(row["lost_steps"] for row in own),
            **{key: statistics.median(row[key] for row in own) for key in ("lost_steps", "behind", "behind_at_end")},
            "written": own[0]["written"] and statistics.median(row["written"] for row in own),
        })
    return summaries


COLUMNS = (
    Column("restored from", "system"), Column("points", "points"), Column("lost steps", "lost_steps", digits(2)),
    Column("worst", "worst", digits(2)), Column("loss behind", "behind", percent),
    Column("after 100 steps", "behind_at_end", percent), Column("written", "written", ratio),
)
