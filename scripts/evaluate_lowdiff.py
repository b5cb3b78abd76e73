"""Compare systems for checkpoints in every iteration: LowDiff and LowDiff+ of this package, and published ones.

    python scripts/evaluate_lowdiff.py time --json time.json             # training time, gradients compressed
    python scripts/evaluate_lowdiff.py plain --json plain.json           # the same, not compressed
    python scripts/evaluate_lowdiff.py frequency --json frequency.json   # shortest interval within 3.5 %
    python scripts/evaluate_lowdiff.py recovery --json recovery.json     # against training the same steps again
    python scripts/evaluate_lowdiff.py writes --json writes.json         # time to write by batch size
    python scripts/evaluate_lowdiff.py storage --json storage.json       # bytes of a checkpoint
    python scripts/evaluate_lowdiff.py ratios --json ratios.json         # ratios of compression
    python scripts/evaluate_lowdiff.py contention --json contention.json # what work on one CPU takes from the other
    python scripts/evaluate_lowdiff.py constants --json constants.json   # what the simulations need
    python scripts/evaluate_lowdiff.py wasted constants.json --json wasted.json      # by time between failures
    python scripts/evaluate_lowdiff.py failures constants.json --json failures.json  # effective time, many failures
    python scripts/evaluate_lowdiff.py ranks constants.json --json ranks.json        # effective time, many ranks
    python scripts/evaluate_lowdiff.py kills --json kills.json           # what is lost when processes are killed
    python scripts/evaluate_lowdiff.py report *.json                     # plots, and what was to be reached

Training has one CPU and checkpointing another; nothing else should run on either.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from evaluation import report as results
from evaluation.lowdiff import constants as measured_constants
from evaluation.lowdiff import contention as contentions
from evaluation.lowdiff import plots, recovery, training, wasted, writes
from evaluation.lowdiff import targets as aims
from evaluation.lowdiff.loop import Setting
from evaluation.lowdiff.process import Cores, WorkerError
from evaluation.lowdiff.rounds import Plan
from evaluation.lowdiff.systems import COMPARED, NAMES, OURS, WITHOUT
from evaluation.simulation import Failures
from rich.console import Console

from dsq_ckpt.cli import json_files

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(highlight=False, soft_wrap=True)
results.PANELS.update(plots.PANELS)

WORKLOAD = typer.Option("gpt", help="What is trained: gpt, gpt-tiny.")
BATCH = typer.Option(None, help="Rows of a batch; the workload's own by default.")
SEED = typer.Option(0, help="Seed of the initial weights and of the batches.")
COMPRESSOR = typer.Option(aims.COMPRESSOR, help="Of gradients, for all systems.")
ROUNDS = typer.Option(12, min=1, help="Rounds; medians of them are kept.")
LEAD = typer.Option(4, min=0, help="Steps of a block that are not timed.")
STEPS = typer.Option(20, min=1, help="Steps of a block that are.")
CORES = typer.Option(None, help="CPU of training and of checkpointing, as in 0,1; the first two by default.")
DIRECTORY = typer.Option(None, help="For checkpoints, on the disk to be measured; a temporary one by default.")
JSON = typer.Option(..., "--json", help="File to write the results to.")
REPEATS = typer.Option(5, min=1, help="Of every measurement; medians are kept.")
CONSTANTS = typer.Argument(help="JSON file that `constants` wrote.", exists=True, dir_okay=False)
FAILURES = typer.Option(20_000, min=1, help="Failures that are simulated of each case.")
OVERHEADS = typer.Option(
    [], help="JSON files of `time` and `plain`: their overheads instead of those among the constants.", exists=True,
)
RESTART = typer.Option(0.0, min=0, help="Seconds from a failure until a process can load; the same for all systems.")


def _systems(usual: Sequence[str]) -> Any:
    return typer.Option(",".join(usual), "--systems", help=f"Separated by commas, of {', '.join(NAMES)}.")


@app.command()
def time(
    systems: str = _systems([WITHOUT, *COMPARED, "lowdiff"]), compressor: str = COMPRESSOR, workload: str = WORKLOAD,
    batch: int | None = BATCH, seed: int = SEED, rounds: int = ROUNDS, lead: int = LEAD, steps: int = STEPS,
    cores: str | None = CORES, directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Measure training time with a checkpoint in every iteration, gradients compressed for all (experiment 1)."""
    setting = Setting(workload, batch, seed, compressor)
    with _bench(setting, rounds, lead, steps, cores, directory) as bench:
        rows = training.training_time(bench, _known(systems))
        _done(aims.TIME, bench, rows, training.TIME_COLUMNS, training.TIME_NOTES, json_path)


@app.command()
def plain(
    systems: str = _systems([WITHOUT, *COMPARED, "lowdiff+"]), workload: str = WORKLOAD, batch: int | None = BATCH,
    seed: int = SEED, rounds: int = ROUNDS, lead: int = LEAD, steps: int = STEPS, cores: str | None = CORES,
    directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Measure training time with a checkpoint in every iteration, gradients as they are (experiment 2)."""
    setting = Setting(workload, batch, seed, "none")
    with _bench(setting, rounds, lead, steps, cores, directory) as bench:
        rows = training.training_time(bench, _known(systems))
        _done(aims.PLAIN, bench, rows, training.TIME_COLUMNS, training.TIME_NOTES, json_path)


@app.command()
def frequency(
    systems: str = _systems([*COMPARED, *OURS]), compressor: str = COMPRESSOR, bound: float = 0.035,
    workload: str = WORKLOAD, batch: int | None = BATCH, seed: int = SEED, rounds: int = ROUNDS, lead: int = LEAD,
    steps: int = STEPS, cores: str | None = CORES, directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Find the shortest interval between checkpoints that keeps overhead within a bound (experiment 4)."""
    setting = Setting(workload, batch, seed, compressor)
    with _bench(setting, rounds, lead, steps, cores, directory) as bench:
        rows = training.shortest_intervals(bench, _known(systems), bound)
        _done(aims.FREQUENCY, bench, rows, training.INTERVAL_COLUMNS, "", json_path, bound=bound)


@app.command("recovery")
def recovery_command(
    systems: str = _systems(recovery.SYSTEMS), intervals: str = typer.Option("5,10,20,50", help="Steps to replay."),
    compressor: str = COMPRESSOR, repeats: int = REPEATS, workload: str = WORKLOAD, batch: int | None = BATCH,
    seed: int = SEED, cores: str | None = CORES, directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Measure recovery against training the same steps again, by steps since the full checkpoint (experiment 5)."""
    setting = Setting(workload, batch, seed, compressor)
    with _bench(setting, 1, 0, 1, cores, directory) as bench:
        chosen = _known(systems)
        rows = recovery.recovery_times(bench, chosen, [int(steps) for steps in intervals.split(",")], repeats)
        rows += recovery.persisted_times(bench, [name for name in recovery.IN_MEMORY if name in chosen], repeats)
        _done(aims.RECOVERY, bench, rows, recovery.COLUMNS, recovery.NOTES, json_path, intervals=intervals)


@app.command("writes")
def writes_command(
    sizes: str = typer.Option("1,2,5,10,20", help="Steps that are written at once."), logged: int = 40,
    compressor: str = COMPRESSOR, repeats: int = REPEATS, workload: str = WORKLOAD, batch: int | None = BATCH,
    seed: int = SEED, rounds: int = ROUNDS, lead: int = LEAD, steps: int = STEPS, cores: str | None = CORES,
    directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Measure the time to write a logged step by the size of a batch (experiment 6)."""
    setting = Setting(workload, batch, seed, compressor)
    with _bench(setting, rounds, lead, steps, cores, directory) as bench:
        rows = writes.batched_writes(bench, [int(size) for size in sizes.split(",")], logged, repeats)
        _done(aims.WRITES, bench, rows, writes.WRITE_COLUMNS, "", json_path, sizes=sizes, logged=logged)


@app.command()
def storage(
    compressors: str = typer.Option("topk:0.01,topk:0.001,topk:0.1,kmeans:16,bf16,fp16,none"), logged: int = 20,
    workload: str = WORKLOAD, batch: int | None = BATCH, seed: int = SEED, cores: str | None = CORES,
    directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Measure the bytes of a checkpoint, full and differential (experiment 7)."""
    setting = Setting(workload, batch, seed, aims.COMPRESSOR)
    with _bench(setting, 1, 0, 1, cores, directory) as bench:
        rows = writes.storage(bench, compressors.split(","), logged)
        _done(aims.STORAGE, bench, rows, writes.SIZE_COLUMNS, "", json_path, compressors=compressors, logged=logged)


@app.command()
def ratios(
    values: str = typer.Option("0.1,0.075,0.05,0.01,0.005,0.001", help="Share of the gradient that is kept."),
    workload: str = WORKLOAD, batch: int | None = BATCH, seed: int = SEED, rounds: int = ROUNDS, lead: int = LEAD,
    steps: int = STEPS, cores: str | None = CORES, directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Measure LowDiff at several ratios of compression: bytes per step and overhead (experiment 8)."""
    setting = Setting(workload, batch, seed, "topk")
    with _bench(setting, rounds, lead, steps, cores, directory) as bench:
        rows = training.ratios(bench, [float(value) for value in values.split(",")])
        _done(aims.RATIOS, bench, rows, training.RATIO_COLUMNS, "", json_path)


@app.command()
def contention(
    logged: int = 20, compressor: str = COMPRESSOR, workload: str = WORKLOAD, batch: int | None = BATCH,
    seed: int = SEED, rounds: int = ROUNDS, lead: int = LEAD, steps: int = STEPS, cores: str | None = CORES,
    directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Measure the fraction by which the checkpointing process slows down training on another CPU."""
    setting = Setting(workload, batch, seed, compressor)
    with _bench(setting, rounds, lead, steps, cores, directory) as bench:
        rows = contentions.contention(bench, logged)
        _done(aims.CONTENTION, bench, rows, contentions.COLUMNS, contentions.NOTES, json_path, logged=logged)


@app.command()
def constants(
    systems: str = _systems([*COMPARED, *OURS]), compressor: str = COMPRESSOR, repeats: int = REPEATS,
    workload: str = WORKLOAD, batch: int | None = BATCH, seed: int = SEED, rounds: int = ROUNDS, lead: int = LEAD,
    steps: int = STEPS, cores: str | None = CORES, directory: Path | None = DIRECTORY, json_path: Path = JSON,
) -> None:
    """Measure the costs of checkpoints and recoveries of each system: the constants of the simulations."""
    setting = Setting(workload, batch, seed, compressor)
    with _bench(setting, rounds, lead, steps, cores, directory) as bench:
        rows = measured_constants.constants(bench, _known(systems), repeats)
        _done(aims.CONSTANTS, bench, rows, measured_constants.COLUMNS, measured_constants.NOTES, json_path)


@app.command("wasted")
def wasted_command(
    source: Path = CONSTANTS, hours: str = typer.Option("0.5,1,2", help="Between failures of the job."),
    count: int = FAILURES, restart: float = RESTART, seed: int = SEED, overheads: list[Path] = OVERHEADS,
    json_path: Path = JSON,
) -> None:
    """Simulate the wasted time of jobs with failures (experiment 3)."""
    cases = [Failures(float(mtbf) * wasted.HOUR, seed=seed) for mtbf in hours.split(",")]
    _simulated(aims.WASTED, source, cases, count, restart, overheads, json_path)


@app.command()
def failures(
    source: Path = CONSTANTS, hours: str = typer.Option("0.1,0.3,0.5,1,2,5", help="Between failures of the job."),
    count: int = FAILURES, restart: float = RESTART, seed: int = SEED, overheads: list[Path] = OVERHEADS,
    json_path: Path = JSON,
) -> None:
    """Simulate the effective training time of jobs that fail often (experiment 9)."""
    cases = [Failures(float(mtbf) * wasted.HOUR, seed=seed) for mtbf in hours.split(",")]
    _simulated(aims.FAILURES, source, cases, count, restart, overheads, json_path)


@app.command()
def ranks(
    source: Path = CONSTANTS, numbers: str = typer.Option("8,64,512,1024,2048,4096,8192,16384", help="Of ranks."),
    hours: float = typer.Option(wasted.OPT_175B, help="Between failures of one rank."),
    count: int = FAILURES, restart: float = RESTART, seed: int = SEED, overheads: list[Path] = OVERHEADS,
    json_path: Path = JSON,
) -> None:
    """Simulate the effective training time of jobs on many ranks, any of which fails the job (experiment 10)."""
    cases = [Failures(hours * wasted.HOUR, int(number), seed=seed) for number in numbers.split(",")]
    _simulated(aims.RANKS, source, cases, count, restart, overheads, json_path)


@app.command()
def kills(
    trials: int = typer.Option(200, min=1, help="Runs that are killed, once or twice each."),
    seed: int | None = typer.Option(None, help="A random one by default."),
    parallel: int = typer.Option(2, min=1, help="Runs at a time."), json_path: Path = JSON,
) -> None:
    """Kill runs with a log at random moments, and recover them; exit status 1 unless all are what they must be."""
    from campaigns import log_kills

    measured = log_kills.measure(trials, random.randrange(1 << 30) if seed is None else seed, parallel, console.print)
    json_files.write(json_path, measured)
    problems = measured["summary"]["problems"]
    console.print_json(data={**measured["summary"], "problems": len(problems)})
    for result in problems:
        console.print("PROBLEM", json.dumps(result))
    raise typer.Exit(1 if problems or len(measured["trials"]) < trials else 0)


@app.command()
def report(
    files: list[Path] = typer.Argument(help="JSON files that the other commands wrote."),
    directory: Path | None = typer.Option(None, help="Where plots go; beside each file by default."),
) -> None:
    """Draw results, one PNG for each file, and say which targets they reach."""
    for picture in results.plot_each(files, directory):
        console.print(picture)
    for file in files:
        document = json.loads(file.read_text())
        _print_targets(document["measured"], document["rows"])


@contextmanager
def _bench(
    setting: Setting, rounds: int, lead: int, steps: int, cores: str | None, directory: Path | None
) -> Iterator[training.Bench]:
    """Yield the benchmark, in a temporary directory."""
    torch.set_num_threads(1)
    given = Cores(*(int(core) for core in cores.split(","))) if cores else Cores.available()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lowdiff-", dir=directory) as path:
        try:
            yield training.Bench(setting, Path(path), given, Plan(rounds, lead, steps), console.print)
        except WorkerError as error:
            console.print(f"error: {error}", markup=False)
            raise typer.Exit(1) from None


def _done(
    measured: str, bench: training.Bench, rows: list[results.Row], columns: Sequence[results.Column], notes: str,
    json_path: Path, **more: Any,
) -> None:
    """Write the document, print the table and the targets."""
    settings = {
        **vars(bench.setting), **vars(bench.plan), "core_training": bench.cores.training,
        "core_checkpointing": bench.cores.checkpointing, **more,
    }
    document = results.document(measured, settings, rows)
    json_files.write(json_path, document)
    results.show(measured, columns, document["rows"], notes)
    _print_targets(measured, document["rows"])


def _simulated(
    measured: str, source: Path, cases: Sequence[Failures], count: int, restart: float, overheads: Sequence[Path],
    json_path: Path,
) -> None:
    content = json.loads(source.read_text())
    if content.get("measured") != aims.CONSTANTS:
        raise typer.BadParameter(f"{source} holds no constants (measured: {content.get('measured')!r})")
    times = [json.loads(path.read_text()) for path in overheads]
    if wrong := [path for path, time in zip(overheads, times, strict=True) if time["measured"] not in aims.TIMES]:
        raise typer.BadParameter(f"{wrong[0]} holds no training times")
    content["rows"] = wasted.with_overheads(content["rows"], [row for time in times for row in time["rows"]])
    rows = wasted.compare(content["rows"], cases, count, restart)
    settings = {
        "constants": source.name, "overheads": [path.name for path in overheads], "failures": count,
        "restart": restart, "seed": cases[0].seed,
    }
    document = results.document(measured, settings, rows, constants=content)
    json_files.write(json_path, document)
    results.show(measured, wasted.COLUMNS, document["rows"], wasted.NOTES)
    _print_targets(measured, document["rows"])


def _print_targets(measured: str, rows: Sequence[results.Row]) -> None:
    for text, met in aims.targets(measured, rows):
        console.print(f"{'[green]ok[/green]    ' if met else '[red]missed[/red]'}  {text}")


def _known(given: str) -> list[str]:
    """Return the given systems, if all of them are known."""
    names = given.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    app()
