"""Compare checkpoint compression systems on real training runs.

    python scripts/evaluate.py record gpt --seed 0    # train once without failures, keep exact checkpoints
    python scripts/evaluate.py offline gpt --json offline.json        # every system on that recorded run
    python scripts/evaluate.py peers gpt-short --json peers.json      # ExCP, NNCodec, BitSnap, ZipNN and zstd on it
    python scripts/evaluate.py exact finetune --json exact.json       # lossless differences: candidates
    python scripts/evaluate.py ablations gpt --json ablations.json    # what each part of a system is worth there
    python scripts/evaluate.py online gpt --json online.json          # every system in a run that fails ten times
    python scripts/evaluate.py oneshot llama vit --json oneshot.json  # one checkpoint by itself, within a bound
    python scripts/evaluate.py transfer llama vit --json transfer.json  # fine-tuning from what that gives back
    python scripts/evaluate.py resume llama --json resume.json        # steps that a restore costs the next hundred
    python scripts/evaluate.py resume-deepspeed --json resume-deepspeed.json  # the same from DeepSpeed's tags
    python scripts/evaluate.py rework mlr --json rework.json          # iterations that a restore costs
    python scripts/evaluate.py report offline.json online.json        # plots; --together, --side-by-side
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from evaluation import ablations as parts
from evaluation import create, names, timings
from evaluation import exact as exact_coding
from evaluation import offline as comparison
from evaluation import oneshot as one_shot
from evaluation import online as online_runs
from evaluation import report as results
from evaluation import resume as resumed
from evaluation import resume_deepspeed as restarted_tags
from evaluation import rework as rework_runs
from evaluation import transfer as transferred
from evaluation.peers import comparison as beside
from evaluation.peers.environment import PeerMissingError
from evaluation.recording import default_directory, load_recording
from evaluation.recording import record as record_run
from evaluation.results import Results
from evaluation.workloads import NOISE_FLOOR
from rich.console import Console

from dsq_ckpt import DSQError
from dsq_ckpt.cli import json_files
from dsq_ckpt.config.systems import SYSTEMS

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(highlight=False, soft_wrap=True)


def _systems(usual: Sequence[str], known: Collection[str] = tuple(SYSTEMS)) -> Any:
    """Return the option that names systems, the same for all commands."""
    return typer.Option(",".join(usual), "--systems", help=f"Separated by commas, of {', '.join(known)}.")


def _named(systems: str) -> list[str]:
    """Return the names in an option; a comma before a space belongs to a name."""
    return re.split(",(?! )", systems)


ONLINE = [*SYSTEMS, NOISE_FLOOR]
JSON = typer.Option(..., "--json", help="File to write the results to.")
PART = typer.Option(list(parts.PARTS), help=f"Of {', '.join(parts.PARTS)}; several times for several.")
EPSILON = typer.Option(0.05, help="Bound: relative degradation of the held-out loss by a base layer.")
ONESHOT = typer.Argument(..., help=f"One or more of {', '.join(one_shot.MODELS)}.")
WORKLOADS = typer.Argument(..., help=f"One or more of {', '.join(names())}.")
CONFIGS = typer.Option(
    ["default", "moments_exact"], "--config", help="A preset, or a configuration as JSON; several times for several."
)
ROWS = typer.Option(None, "--json", help="File to write rows to, each when it is there; those in it are not run again.")


@app.command()
def record(
    workload: str = typer.Argument(help=f"One of {', '.join(names())}."),
    seed: int = typer.Option(0, help="Seed of the initial weights and of the batches."),
    directory: Path | None = typer.Option(None, help="Where to; in the user's cache by default."),
) -> None:
    """Train a workload without failures and keep its exact checkpoints. A complete recording is left as it is."""
    if workload not in names():
        raise typer.BadParameter(f"{workload!r} is not one of {', '.join(names())}")
    console.print(record_run(workload, seed, directory, report=console.print))


@app.command()
def offline(
    workload: str = typer.Argument(help=f"One of {', '.join(names())}."),
    seed: list[int] = typer.Option([0], help="Of the recorded run; several times for several runs."),
    directory: list[Path] = typer.Option([], help="Recordings, where they are not in the user's cache."),
    systems: str = _systems(comparison.all_systems()),
    epsilon: float = EPSILON,
    dsq_epsilon: list[float] = typer.Option([0.04, 0.03, 0.02, 0.01], help="Further bounds for dsq."),
    json_path: Path = JSON,
) -> None:
    """Compress recorded runs with every system at the configuration it searches for: ratio, degradation and cost."""
    chosen = _known(_named(systems), comparison.all_systems())
    recordings = _recordings(workload, seed, directory)
    torch.set_num_threads(1)
    settings = {"workload": workload, "seed": seed, "epsilon": epsilon, "dsq_epsilon": dsq_epsilon, "systems": chosen}
    rows: list[results.Row] = []
    for row in comparison.compare(recordings, epsilon, dsq_epsilon, chosen, console.print):
        rows.append(row)
        # After each system: what was measured is kept, should the program be stopped.
        against = comparison.versus(rows)
        json_files.write(json_path, results.document("offline", settings, rows, versus=against))
    comparison.print_comparison(rows, against)


@app.command()
def peers(
    workload: list[str] = WORKLOADS,
    seed: int = typer.Option(0, help="Of the recorded runs."),
    directory: Path | None = typer.Option(None, help="The recording, where it is not in the user's cache."),
    peers: str = typer.Option(",".join(beside.JOBS), help=f"Separated by commas, of {', '.join(beside.JOBS)}."),
    epsilon: list[float] = typer.Option([0.05, 0.01, 0.002], help="Bounds of every lossy peer, and of dsq."),
    dsq_epsilon: list[float] = typer.Option([0.03, 0.02, 0.005], help="Further bounds for dsq."),
    dsq_sensitivity: list[float] = typer.Option([], help="Further strengths of steps by gradients, for dsq."),
    json_path: Path = JSON,
) -> None:
    """Compress recorded runs with other projects' coders and with dsq at equal degradation: ratio, and speed in MB/s.

    NNCodec and ZipNN are installed into an environment of their own, on first use.
    """
    chosen = _known(peers.split(","), beside.JOBS)
    names_of = _known(workload, names())
    recordings = [_recordings(name, [seed], [] if directory is None else [directory])[0] for name in names_of]
    torch.set_num_threads(1)
    settings = {
        "workload": names_of, "seed": seed, "peers": chosen, "epsilon": epsilon, "dsq_epsilon": dsq_epsilon,
        "dsq_sensitivity": dsq_sensitivity, "tolerance": beside.TOLERANCE,
    }
    rows: list[results.Row] = []
    for recording in recordings:
        try:
            for row in beside.compare(recording, chosen, epsilon, dsq_epsilon, dsq_sensitivity, console.print):
                rows.append(row)
                # After each row: what was measured is kept, should the program be stopped.
                json_files.write(json_path, results.document("peers", settings, rows, versus=beside.versus(rows)))
        except (PeerMissingError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
    beside.print_comparison(rows, beside.versus(rows))


@app.command()
def exact(
    workload: list[str] = WORKLOADS,
    seed: int = typer.Option(0, help="Of the recorded runs."),
    directory: Path | None = typer.Option(None, help="The recording, where it is not in the user's cache."),
    json_path: Path = JSON,
) -> None:
    """Code recorded tensors exactly given those of earlier checkpoints: size and processor time of candidates."""
    torch.set_num_threads(1)
    names_of, rows = _known(workload, names()), list[results.Row]()
    for name in names_of:
        recording = _recordings(name, [seed], [] if directory is None else [directory])[0]
        rows += exact_coding.measure(recording, console.print)
        json_files.write(json_path, results.document("exact", {"workload": names_of, "seed": seed}, rows))
    results.show("exactly, given an earlier checkpoint", exact_coding.COLUMNS, rows, exact_coding.NOTES)


@app.command()
def ablations(
    workload: str = typer.Argument(help=f"One of {', '.join(names())}."),
    seed: int = typer.Option(0, help="Of the recorded run."),
    directory: Path | None = typer.Option(None, help="The recording, where it is not in the user's cache."),
    part: list[str] = PART,
    epsilon: float = EPSILON,
    elements: int = typer.Option(timings.ELEMENTS, help="Values that timings are taken on."),
    repeats: int = typer.Option(3, help="Of every timing; medians are kept."),
    json_path: Path = JSON,
) -> None:
    """Measure what coders, components of systems, levels and sketches are worth on one recorded run."""
    if unknown := sorted(set(part) - set(parts.PARTS)):
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(parts.PARTS)}")
    [recording] = _recordings(workload, [seed], [] if directory is None else [directory])
    torch.set_num_threads(1)
    work: dict[str, Callable[[], list[results.Row]]] = {
        "coders": lambda: parts.coders(recording, epsilon, console.print),
        "components": lambda: parts.components(recording, epsilon, console.print),
        "bins": lambda: parts.bins(recording, console.print),
        "ranks": lambda: parts.ranks(recording, console.print),
        "timings": lambda: timings.timings(console.print, elements, repeats),
    }
    settings = {
        "workload": workload, "seed": seed, "epsilon": epsilon, "part": part, "elements": elements, "repeats": repeats,
    }
    rows: list[results.Row] = []
    for name in (name for name in parts.PARTS if name in part):
        rows += work[name]()
        # After each part: what was measured is kept, should a later one fail.
        json_files.write(json_path, results.document("ablations", settings, rows))
    for name in part:
        results.show(name, parts.COLUMNS[name], [row for row in rows if row["part"] == name])


@app.command()
def online(
    workload: str = typer.Argument(help=f"One of {', '.join(names())}."),
    systems: str = _systems(["exact", "noise", "dsq", "inshrinkerator", "uniform", "adaptive", "kmeans"], ONLINE),
    epsilons: str = typer.Option(
        "0.05,0.02,0.01,0.005",
        help="Bounds of systems other than dsq, up to the first that keeps the final loss within 1 %.",
    ),
    failures: int = typer.Option(10, min=0, help="Failures, evenly spaced."),
    per_failure: int = typer.Option(4, min=1, help="Checkpoints from one failure to the next."),
    seed: int = typer.Option(0, help="Seed of the initial weights and of the batches."),
    config: list[str] = typer.Option(["{}"], help="Of dsq, as JSON; several times for several."),
    directory: Path | None = typer.Option(None, help="Of the recording; in the user's cache by default."),
    json_path: Path | None = ROWS,
) -> None:
    """Train with failures and restores from each system's checkpoints, and compare with a run without failures."""
    _known([workload], names())
    chosen = _known(_named(systems), ONLINE)
    bounds = [float(bound) for bound in epsilons.split(",")]
    store = _rows_in(json_path, "online", {
        "workload": workload, "seed": seed, "failures": failures, "per_failure": per_failure, "epsilons": bounds,
        "systems": chosen, **({} if config == ["{}"] else {"config": config}),
    }, lambda rows: {"versus": online_runs.versus(rows)})
    exact = online_runs.reference(workload, seed, directory, console.print)
    rows: list[results.Row] = []
    failed = False
    for system in chosen:
        try:
            rows += online_runs.run_system(
                workload, seed, system, bounds, store, exact, failures, per_failure, console.print, config
            )
        except DSQError as error:  # one system that fails does not take the hours of others with it
            failed = True
            console.print(f"{system} failed: {error}", markup=False)
    title = f"{workload}, seed {seed}: loss {exact['loss']:.4f}, accuracy {exact['accuracy']:.2%} without failures"
    title += f"; here {failures} failures, {(failures + 1) * per_failure} checkpoints"
    results.show(title, online_runs.COLUMNS, rows, online_runs.NOTES)
    for row in rows:
        for text, met in online_runs.targets(row) if row["name"] == "dsq" else ():
            console.print(f"{'[green]ok[/green]    ' if met else '[red]missed[/red]'}  dsq, {text}")
    if failed:
        raise typer.Exit(1)


@app.command()
def resume(
    workload: list[str] = WORKLOADS,
    config: list[str] = CONFIGS,
    seed: list[int] = typer.Option([0], help="Seeds of the initial weights and of the batches."),
    share: list[float] = typer.Option([0.2, 0.4, 0.7], help="Points of the run to continue from, as shares of it."),
    json_path: Path | None = ROWS,
) -> None:
    """Continue runs from checkpoints and from the exact state with the same batches: the steps that a restart costs."""
    chosen = _known(workload, names())
    configs = {text: json.loads(text) if text.startswith("{") else text for text in config}
    store = _rows_in(json_path, "resume", {"workload": chosen, "config": config, "seed": seed, "share": share})

    def compared(name: str, number: int) -> list[results.Row]:
        plan = create(name, number).plan
        points = {round(part * plan.steps / plan.checkpoint_every) * plan.checkpoint_every for part in share}
        return resumed.compare(name, number, configs, sorted(points), console.print)

    rows = store.of_each_run(chosen, seed, {"config": config, "share": share}, compared)
    results.show("restarts, against the exact state", resumed.COLUMNS, resumed.summary(rows), resumed.NOTES)


@app.command()
def oneshot(
    workload: list[str] = ONESHOT,
    seed: list[int] = typer.Option([0], help="Seeds of the initial weights and of the batches."),
    bound: float = EPSILON,
    systems: str = _systems(one_shot.SYSTEMS, one_shot.SYSTEMS),
    json_path: Path | None = ROWS,
) -> None:
    """Compress trained models, or shipped ones, by themselves with every system: the size at a bound on the loss."""
    chosen, own = _known(workload, one_shot.MODELS), _known(_named(systems), one_shot.SYSTEMS)
    store = _rows_in(json_path, "oneshot", {"workload": chosen, "seed": seed, "bound": bound, "systems": own})
    rows = store.of_each_run(
        chosen, seed, {"bound": bound, "systems": own},
        lambda name, number: one_shot.compare(name, number, bound, own, console.print),
    )
    results.show("one checkpoint by itself", one_shot.COLUMNS, rows, one_shot.NOTES)


@app.command()
def transfer(
    workload: list[str] = WORKLOADS,
    seed: list[int] = typer.Option([0], help="Seeds of the initial weights and of the batches."),
    bound: list[float] = typer.Option(transferred.BOUNDS, help="Bounds: relative degradation of the held-out loss."),
    systems: str = _systems(transferred.SYSTEMS, transferred.SYSTEMS),
    json_path: Path | None = ROWS,
) -> None:
    """Fine-tune on another task from what every system's compressed checkpoint gives back, at several bounds."""
    chosen, own = _known(workload, transferred.TASKS), _known(_named(systems), transferred.SYSTEMS)
    store = _rows_in(json_path, "transfer", {"workload": chosen, "seed": seed, "systems": own})
    rows = store.of_each_run(
        chosen, seed, {"bounds": bound, "systems": own},
        lambda name, number: transferred.compare(name, number, bound, own, console.print),
    )
    results.show("fine-tuning from compressed checkpoints", transferred.COLUMNS, rows, transferred.NOTES)


@app.command()
def resume_deepspeed(
    seed: list[int] = typer.Option([0], help="Seeds of the initial weights and of the batches."),
    at: list[int] = typer.Option([60], min=1, help="Steps to restart at."),
    json_path: Path | None = ROWS,
) -> None:
    """Restart a DeepSpeed run (ZeRO-2, bf16, two ranks) from compressed tags and from its own."""
    store = _rows_in(json_path, "resume-deepspeed", {"seed": seed, "at": at})
    for number in seed:
        for point in at:
            settings = {"seed": number, "step": point}
            if store.find(settings) is None:
                with tempfile.TemporaryDirectory(prefix="dsq-resume-") as directory:
                    rows = restarted_tags.compare(Path(directory), number, point, console.print)
                store.add(settings, {"rows": rows})
    rows = [row for part in store.rows for row in part["rows"]]
    results.show("restarts under DeepSpeed", restarted_tags.COLUMNS, restarted_tags.summary(rows), resumed.NOTES)


@app.command()
def rework(
    workload: str = typer.Argument(help=f"One of {', '.join(names())}; the paper's are mlr, lenet, alexnet and mf."),
    systems: str = _systems(["lc", "topn", "scar", "dsq"]),
    bits: str = typer.Option("2,3", help="Of lc, separated by commas; topn and scar are made as large as each."),
    coded: bool = typer.Option(False, "--coded", help="As large in files, all by rANS; else as the paper counts."),
    trials: int = typer.Option(50, min=1, help="Failures at random steps."),
    every: int = typer.Option(1, min=1, help="Iterations between checkpoints."),
    limit: int = typer.Option(200, min=1, help="Iterations after which a trial is given up."),
    rate: float | None = typer.Option(None, help="Highest learning rate; the lower, the less of rework is chance."),
    seed: int = typer.Option(0, help="Seed of the initial weights, of the batches and of the failures."),
    json_path: Path | None = ROWS,
) -> None:
    """Count the iterations that it takes, after a restore from a chain of checkpoints, to be back at the failure."""
    _known([workload], names())
    plan = rework_runs.Experiment(workload, seed, every, trials, limit, rate)
    methods = rework_runs.methods(_known(_named(systems), SYSTEMS), [int(count) for count in bits.split(",")], coded)
    store = _rows_in(json_path, "rework", {
        "workload": workload, "seed": seed, "every": every, "trials": trials, "limit": limit, "rate": rate,
        "systems": systems, "bits": bits, **({"coded": True} if coded else {}),
    })
    curve = rework_runs.loss_curve(plan)
    rows = [rework_runs.run_method(plan, method, curve, store, console.print) for method in methods]
    steps = ", ".join(str(trial["step"]) for trial in rows[0]["trials"])
    title = f"{workload}, seed {seed}: a checkpoint every {every}, {trials} failures after steps {steps}"
    results.show(title, rework_runs.COLUMNS, rows, rework_runs.NOTES)


@app.command()
def report(
    files: list[Path] = typer.Argument(help="JSON files that the other commands wrote."),
    directory: Path | None = typer.Option(None, help="Where plots go; beside each file by default."),
    together: Path | None = typer.Option(
        None, help="Draw one PNG instead: size and degradation of all systems, of files that offline and peers wrote."
    ),
    side_by_side: Path | None = typer.Option(None, help="Draw one PNG instead: the first plot of each file."),
) -> None:
    """Draw results: one PNG for each file, or one for all."""
    if together is not None:
        results.plot_together(files, together)
    elif side_by_side is not None:
        results.plot_side_by_side(files, side_by_side)
    else:
        for picture in results.plot_each(files, directory):
            console.print(picture)


def _known(given: list[str], known: Collection[str]) -> list[str]:
    """Return the given names, if all of them are known."""
    if unknown := [name for name in given if name not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return given


def _rows_in(
    path: Path | None, measured: str, settings: dict[str, Any],
    conclude: Callable[[Sequence[results.Row]], dict[str, Any]] = lambda rows: {},
) -> Results:
    """Return the rows of earlier calls of the same command."""
    try:
        return Results(path, measured, settings, conclude)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _recordings(workload: str, seeds: list[int], directories: list[Path]) -> list[Path]:
    """Return the directories of complete recordings of a workload."""
    recordings = directories or [default_directory(workload, seed) for seed in seeds]
    for directory in recordings:
        try:
            recorded = load_recording(directory).info["settings"]["workload"]
        except FileNotFoundError as error:
            raise typer.BadParameter(str(error)) from error
        if recorded != workload:
            raise typer.BadParameter(f"{directory} is a recording of {recorded}, not of {workload}")
    return recordings


if __name__ == "__main__":
    app()
