"""LC-Checkpoint's figures other than rework, which `evaluate.py rework` counts.

    python scripts/evaluate_lc.py stages alexnet mf --json stages.json   # figures 2 and 4: what each stage is worth
    python scripts/evaluate_lc.py deleted mlr --json deleted.json        # figure 5: which buckets matter
    python scripts/evaluate_lc.py case mf --every 84 --json case.json    # figure 6: a run that fails once
"""

from __future__ import annotations

from pathlib import Path

import typer
from evaluation import case_study, names, promotion
from evaluation import report as results
from evaluation.rework import Experiment

from dsq_ckpt.cli import json_files

app = typer.Typer(add_completion=False, help=__doc__)

WORKLOAD = typer.Argument(help=f"One of {', '.join(names())}.")
WORKLOADS = typer.Argument(..., help=f"One or more of {', '.join(names())}.")
RATE = typer.Option(None, help="Highest learning rate, if not the workload's.")
SEED = typer.Option(0, help="Seed of the initial weights and of the batches.")
BITS = typer.Option([2, 3], help="Of priority promotion; several times for several.")
JSON = typer.Option(..., "--json", help="File to write the results to.")


@app.command()
def stages(
    workload: list[str] = WORKLOADS,
    bits: list[int] = BITS,
    every: int = typer.Option(1, min=1, help="Iterations between checkpoints."),
    samples: int = typer.Option(10, min=2, help="Checkpoints to measure, spread over the run."),
    seed: int = SEED,
    json_path: Path = JSON,
) -> None:
    """Measure exponent-based quantization, priority promotion and Huffman coding: what each leaves of the size."""
    settings = {"workload": workload, "bits": bits, "every": every, "samples": samples, "seed": seed}
    rows: list[results.Row] = []
    for name in workload:
        for count in bits:
            rows.append(promotion.stages(_plan(name, seed, every, None), count, samples))
            # After each: what was measured is kept, should the program be stopped.
            json_files.write(json_path, results.document("stages", settings, rows))
    results.show("LC-Checkpoint's stages", promotion.STAGES, rows, promotion.STAGES_NOTES)


@app.command()
def deleted(
    workload: str = WORKLOAD,
    start: int = typer.Option(100, min=0, help="Iteration of the state that differences are taken from."),
    rate: float | None = RATE,
    seed: int = SEED,
    json_path: Path = JSON,
) -> None:
    """Set each bucket of a difference to zero: the relative error of the loss."""
    rows = promotion.deleted(_plan(workload, seed, 1, rate), start)
    settings = {"workload": workload, "start": start, "rate": rate, "seed": seed}
    json_files.write(json_path, results.document("deleted", settings, rows))
    results.show("buckets set to zero", promotion.DELETED, rows, promotion.DELETED_NOTES)


@app.command()
def case(
    workload: str = WORKLOAD,
    every: int = typer.Option(..., min=1, help="Steps of an iteration, as of a pass over the data."),
    bits: int = typer.Option(3, min=1, help="Of priority promotion."),
    iterations: int = typer.Option(15, min=2, help="Of the run without a failure."),
    failure: int = typer.Option(7, min=1, help="Iteration at whose end the run fails."),
    interval: int = typer.Option(10, min=1, help="Iterations between full checkpoints."),
    rate: float | None = RATE,
    seed: int = SEED,
    json_path: Path = JSON,
) -> None:
    """Let a run fail once, with a lossy checkpoint after every iteration and with rare full ones."""
    plan = _plan(workload, seed, every, rate)
    if failure > iterations:
        raise typer.BadParameter(f"a failure at iteration {failure} is past the last one, {iterations}")
    steps, planned = (iterations + case_study.MORE * failure) * every, plan.workload().plan
    if steps > planned.steps and planned.floor < 1:
        raise typer.BadParameter(
            f"{steps} steps are more than the {planned.steps} of {workload}, whose learning rate ends with them"
        )
    rows = list(case_study.compare(plan, bits, iterations, failure, interval))
    settings = {
        "workload": workload, "every": every, "bits": bits, "iterations": iterations, "failure": failure,
        "interval": interval, "rate": rate, "seed": seed,
    }
    json_files.write(json_path, results.document("case", settings, rows))
    results.show(f"{workload}: a failure at iteration {failure}", case_study.COLUMNS, rows, case_study.NOTES)


def _plan(workload: str, seed: int, every: int, rate: float | None) -> Experiment:
    """Return a run without failures of its own.

    Raises:
        typer.BadParameter: There is no such workload.
    """
    if workload not in names():
        raise typer.BadParameter(f"{workload!r} is not one of {', '.join(names())}")
    return Experiment(workload, seed, every, trials=1, limit=1, rate=rate)


if __name__ == "__main__":
    app()
