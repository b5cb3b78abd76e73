"""The main job in one command: train on two ranks, kill one, resume, and load with other numbers of ranks.

    python scripts/demo.py --json demo.json

1. Two ranks train the small GPT with FSDP2 and save compressed checkpoints; between two saves rank 1 gets
   SIGKILL.
2. Two ranks resume from the newest complete checkpoint and train to the end.
3. One, two and three ranks load the last checkpoint, and one rank loads it without its refinement.

It runs on the CPU, needs no network, and ends with tables of sizes, save times and losses. The exit status is
1 if a check failed: the killed job hung, the wrong checkpoint was resumed from, or a loaded model is not the
saved one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).with_name("train_fsdp.py")
PHASE_TIMEOUT = 600.0
"""Seconds after which a phase is stopped and the demo fails."""
TOLD_EVERY = 10.0
"""Seconds between lines that tell how far a phase is."""
TAKES = "3 to 4 minutes on two cores"
"""Time of either demo with its default steps: 150, 160 and, beside other jobs, 241 seconds."""
GRACE = 45.0
"""Seconds that torchrun gets to stop its workers; it sends them SIGKILL itself after 30."""
ROUNDING = 1e-5
"""Largest relative difference of a loss computed from the same weights on another number of ranks."""
DEGRADATION = 0.01
"""Largest relative rise of the validation loss by one save and load."""
BASE_DEGRADATION = 0.1
"""The same for a load without refinement, which is what history keeps."""
MOMENTS = ("exp_avg", "exp_avg_sq")

Event = dict[str, Any]


class DemoError(Exception):
    """A phase did not do what it had to; the message names its log file."""


def launch(
    directory: Path, name: str, ranks: int, *arguments: str, target: Sequence[str] = (str(TRAIN),)
) -> tuple[int, list[Event]]:
    """Run a training script under torchrun, `train_fsdp.py` or another, and return its exit status and its events.

    Output goes to `NAME.log` and events to `NAME.jsonl` in `directory`; checkpoints are in `directory/run`. Meanwhile
    lines tell how far it is.

    Raises:
        DemoError: It ran longer than `PHASE_TIMEOUT`.
    """
    events, output = directory / f"{name}.jsonl", directory / f"{name}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), *target, "--out", str(directory / "run"), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works where the host cannot resolve its own name
    with output.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--log-file", str(events)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        print(f"         {name}: log in {output}", flush=True)
        deadline = time.monotonic() + PHASE_TIMEOUT
        try:
            while (status := ended(process)) is None:
                if time.monotonic() > deadline:
                    raise DemoError(f"{name} did not end within {PHASE_TIMEOUT:.0f} s, see {output}")
                print(f"         {name}: {progress(events)}", flush=True)
        finally:
            stop(process)
    lines = events.read_text().splitlines() if events.exists() else []
    return status, [json.loads(line) for line in lines]


def ended(process: subprocess.Popen[bytes]) -> int | None:
    """Wait a while for the end of a process; return its exit status, or None if it still runs."""
    try:
        return process.wait(TOLD_EVERY)
    except subprocess.TimeoutExpired:
        return None


def progress(events: Path) -> str:
    """Return how far a phase is, by its last event."""
    lines = events.read_text().splitlines() if events.exists() else []
    steps = re.findall(r'"step": (\d+)', "\n".join(lines[-20:]))
    return f"step {steps[-1]}" if steps else "imports"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its workers, if they still run.

    The workers have sessions of their own, so torchrun is asked first: on SIGTERM it ends them. If that
    does not help, its process group gets SIGKILL.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def must_succeed(
    directory: Path, name: str, ranks: int, *arguments: str, target: Sequence[str] = (str(TRAIN),)
) -> list[Event]:
    """Run a phase that has to end well, and return its events."""
    status, events = launch(directory, name, ranks, *arguments, target=target)
    if status:
        output = directory / f"{name}.log"
        raise DemoError(f"{name} ended with status {status}:\n{output.read_text()[-4000:]}")
    return events


def of(events: Iterable[Event], kind: str) -> list[Event]:
    """Return the events of one kind."""
    return [event for event in events if event["event"] == kind]


def bytes_on_disk(directory: Path) -> int:
    """Return the bytes of all files below `directory`, counting a file with several hard links once."""
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def size_figures(saves: list[Event], bytes_kept: int) -> dict[str, Any]:
    """Sum up what the saves reported: the base over the whole run, and the newest one with its refinement."""
    reports = [save["report"] for save in saves]
    kinds: dict[str, tuple[str, ...]] = {"weights": ("weights",), "moments": MOMENTS}
    named = {kind for kinds_of_row in kinds.values() for kind in kinds_of_row}
    kinds["other"] = tuple(sorted({kind for report in reports for kind in report["by_kind"]} - named))
    kinds["everything"] = (*kinds["weights"], *kinds["moments"], *kinds["other"])

    def total(of_reports: list[dict[str, Any]], row: str, field: str) -> int:
        parts = [report["by_kind"].get(kind, {}) for report in of_reports for kind in kinds[row]]
        return sum(part.get(field, 0) for part in parts)

    rows = {}
    for row in kinds:
        logical, base = total(reports, row, "bytes_logical"), total(reports, row, "bytes_base")
        newest = total(reports[-1:], row, "bytes_base") + total(reports[-1:], row, "bytes_refinement")
        rows[row] = {
            "bytes_logical": logical,
            "bytes_base": base,
            "ratio_base": logical / base if base else None,
            "newest_bytes": newest,
            "newest_ratio": total(reports[-1:], row, "bytes_logical") / newest if newest else None,
        }
    logical = sum(report["bytes_logical"] for report in reports)
    written = sum(report["bytes_written"] for report in reports)
    return {
        "checkpoints": len(reports),
        "keyframes": sum(report["keyframe"] for report in reports),
        "bytes_logical": logical,
        "bytes_written": written,
        "bytes_kept": bytes_kept,
        "ratio_written": logical / written,
        "ratio_kept": logical / bytes_kept,
        "by_kind": rows,
    }


def time_figures(runs: list[list[Event]]) -> dict[str, Any]:
    """Compare the seconds of the saves with plain `dcp.save` of the same state; medians over all saves."""
    saves = [save for events in runs for save in of(events, "save")]
    median, plain = (statistics.median(save[field] for save in saves) for field in ("seconds", "dcp_seconds"))
    first = max(of(events, "save")[0]["seconds"] for events in runs)
    return {"save": median, "dcp_save": plain, "ratio": median / plain, "slowest_first_save": first}


def run_demo(directory: Path, steps: int, save_every: int, console: Console) -> dict[str, Any]:
    """Run the three phases and return the figures and the checks."""
    kill_step = save_every * (steps // save_every // 2) + save_every // 2 + 1
    restored_step = kill_step // save_every * save_every
    schedule = ("--steps", str(steps), "--save-every", str(save_every), "--eval-every", str(save_every))
    started = time.perf_counter()

    def announce(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - started:5.0f} s[/dim]  {text}")

    announce(f"2 ranks train; rank 1 is killed in step {kill_step}")
    fatal = ("--die-at-step", str(kill_step))
    status, killed = launch(directory, "killed", 2, *schedule, "--compare-dcp", *fatal)
    if not of(killed, "step"):
        raise DemoError(f"no training step was logged:\n{(directory / 'killed.log').read_text()[-4000:]}")
    announce(f"torchrun ended with status {status}; 2 ranks resume and train to step {steps}")
    resumed = must_succeed(directory, "resumed", 2, *schedule, "--compare-dcp", "--resume")
    restored, last = of(resumed, "resume")[0], of(resumed, "save")[-1]
    before = {save["step"]: save for save in of(killed, "save")}.get(restored["step"])
    if before is None:
        raise DemoError(f"resumed from step {restored['step']}, which the killed run had not saved")
    announce("1, 2 and 3 ranks load the last checkpoint")

    def loss_after_load(name: str, ranks: int, *how: str) -> float:
        events = must_succeed(directory, name, ranks, *schedule, "--resume", *how)
        loss: float = of(events, "resume")[0]["validation_loss"]
        return loss

    loaded = {ranks: loss_after_load(f"load-{ranks}", ranks) for ranks in (1, 2, 3)}
    loaded_base = loss_after_load("load-base", 1, "--base-only")
    seconds = time.perf_counter() - started
    announce("done\n")

    losses_before = {event["step"]: event["loss"] for event in of(killed, "step")}
    losses_after = {event["step"]: event["loss"] for event in of(resumed, "step")}
    replayed = sorted(losses_before.keys() & losses_after.keys())
    rise = max(
        loss / saved_loss - 1
        for loss, saved_loss in (
            (restored["validation_loss"], before["validation_loss"]),
            (loaded[2], last["validation_loss"]),
        )
    )
    spread = max(loaded.values()) / min(loaded.values()) - 1
    sizes = size_figures(of(killed, "save") + of(resumed, "save"), bytes_on_disk(directory / "run"))
    return {
        "seconds": seconds,
        "sizes": sizes,
        "save_seconds": time_figures([killed, resumed]),
        "losses": {
            "killed_at_step": kill_step,
            "restored_step": restored["step"],
            "restored_validation_saved": before["validation_loss"],
            "restored_validation_loaded": restored["validation_loss"],
            "replayed_steps": len(replayed),
            "replayed_loss_before_kill": statistics.fmean(losses_before[step] for step in replayed),
            "replayed_loss_after_resume": statistics.fmean(losses_after[step] for step in replayed),
            "final_step": last["step"],
            "final_validation_saved": last["validation_loss"],
            "final_validation_loaded": {str(ranks): loss for ranks, loss in loaded.items()},
            "final_validation_loaded_base_only": loaded_base,
        },
        "checks": {
            "the killed job ended with an error": status != 0 and max(losses_before) == kill_step - 1,
            f"it resumed from step {restored_step}, the newest checkpoint": restored["step"] == restored_step,
            f"1, 2 and 3 ranks agree to {ROUNDING:g}": spread <= ROUNDING,
            f"a load raises the validation loss by at most {DEGRADATION:.0%}": rise <= DEGRADATION,
            f"the base alone raises it by at most {BASE_DEGRADATION:.0%}": (
                loaded_base / last["validation_loss"] - 1 <= BASE_DEGRADATION
            ),
            "less was kept than written, and less written than saved": (
                sizes["bytes_kept"] <= sizes["bytes_written"] <= sizes["bytes_logical"]
            ),
        },
    }


def megabytes(count: int) -> str:
    """Format bytes as MB."""
    return f"{count / 1e6:.2f} MB"


def ratio(value: float | None) -> str:
    """Format a ratio."""
    return "-" if value is None else f"{value:.1f}x"


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    sizes, times, losses = figures["sizes"], figures["save_seconds"], figures["losses"]
    count = sizes["checkpoints"]
    table = Table(title=f"Sizes: {count} checkpoints, {sizes['keyframes']} of them keyframes")
    for heading in ("", "uncompressed", "base, whole run", "ratio", "newest + refinement", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in sizes["by_kind"].items():
        newest = (megabytes(row["newest_bytes"]), ratio(row["newest_ratio"]))
        base = (megabytes(row["bytes_base"]), ratio(row["ratio_base"]))
        table.add_row(name, megabytes(row["bytes_logical"]), *base, *newest)
    console.print(table)

    table = Table(title="Over the whole run", show_header=False)
    for name, field in (("uncompressed", "logical"), ("written", "written"), ("kept on disk", "kept")):
        table.add_row(name, megabytes(sizes[f"bytes_{field}"]), ratio(sizes.get(f"ratio_{field}")))
    table.add_section()
    table.add_row("save, median", f"{times['save']:.3f} s", ratio(times["ratio"]) + " of dcp.save")
    table.add_row("plain dcp.save, median", f"{times['dcp_save']:.3f} s")
    table.add_row("slowest first save of a process", f"{times['slowest_first_save']:.3f} s", "imports")
    console.print(table)

    final = f"validation at step {losses['final_step']}:"
    table = Table(title="Losses (nats per byte)")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, before, after in (
        (
            f"validation at step {losses['restored_step']}: saved, loaded by the resumed run",
            losses["restored_validation_saved"],
            losses["restored_validation_loaded"],
        ),
        (
            f"training, {losses['replayed_steps']} steps done twice: first, resumed",
            losses["replayed_loss_before_kill"],
            losses["replayed_loss_after_resume"],
        ),
        *(
            (f"{final} saved, loaded by {ranks} rank(s)", losses["final_validation_saved"], loss)
            for ranks, loss in losses["final_validation_loaded"].items()
        ),
        (
            f"{final} saved, loaded without refinement",
            losses["final_validation_saved"],
            losses["final_validation_loaded_base_only"],
        ),
    ):
        table.add_row(name, f"{before:.5f}", f"{after:.5f}")
    console.print(table)


def run_command(
    description: str, steps: int, save_every: int, periods: int,
    run: Callable[[Path, int, int, Console], dict[str, Any]], show: Callable[[dict[str, Any], Console], None],
) -> int:
    """Run a demo from the command line: read the arguments, run it in a directory, show and write its figures.

    Args:
        description: text of `--help`.
        steps: default of `--steps`.
        save_every: default of `--save-every`.
        periods: how many times `--save-every` the steps must be at least.
        run: the demo, from a directory, the steps and `--save-every` to its figures.
        show: prints the figures.

    Returns:
        The exit status: 1 if a check failed, or the demo ended early.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--save-every", type=int, default=save_every, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, help="new directory for checkpoints and logs, else a temporary one")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    if arguments.steps < periods * arguments.save_every or arguments.save_every < 2:
        parser.error(f"--steps must be at least {periods} times --save-every, and --save-every at least 2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the phase that runs is ended
    console = Console()
    with tempfile.TemporaryDirectory(prefix="dsq-demo-") as temporary:
        directory = arguments.out or Path(temporary)
        if arguments.out:
            arguments.out.mkdir(parents=True)
        console.print(f"the default of {steps} steps takes {TAKES}")
        remark = "" if arguments.out else " (gone at the end; --out keeps them)"
        console.print(f"logs and checkpoints: {directory}{remark}", soft_wrap=True)
        try:
            figures = run(directory, arguments.steps, arguments.save_every, console)
        except DemoError as error:
            console.print("[red]FAILED[/red] ", end=" ")
            console.print(str(error), markup=False)
            return 1
    if arguments.json:
        from dsq_ckpt.cli import json_files

        json_files.write(arguments.json, figures)
    show(figures, console)
    for name, passed in figures["checks"].items():
        console.print(f"[green]ok[/green]      {name}" if passed else f"[red]FAILED[/red]  {name}")
    console.print(f"[dim]{figures['seconds']:.0f} s in all[/dim]")
    return 0 if all(figures["checks"].values()) else 1


def main() -> int:
    """Run the demo and return its exit status."""
    return run_command("Train, kill, resume, reshard: the main job, on a CPU.", 400, 50, 2, run_demo, show)


if __name__ == "__main__":
    sys.exit(main())
