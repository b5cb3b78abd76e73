"""DeepSpeed in one command: train with ZeRO-2 on two ranks, kill twice, resume, convert, and compare with its own tags.

    python scripts/demo_deepspeed.py --json demo-deepspeed.json

1. Two ranks train the small GPT in bf16 with DeepSpeed's own tags, without a failure: the reference.
2. Two ranks do the same with compressed tags, until rank 1 gets SIGKILL in the middle of a step.
3. They resume by the launcher, with `deepspeed.initialize` unchanged, until rank 1 gets SIGKILL in the midst of a save.
4. They resume and train to the end.
5. `zero_to_fp32.py`, which DeepSpeed puts beside the tags, converts the last one; `dsq` cleans up, verifies and lists.
6. A larger GPT is saved and loaded both ways, by turns: the same engine, the same state.

It runs on the CPU, needs no network, and ends with tables. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from demo import DEGRADATION, DemoError, Event, bytes_on_disk, launch, must_succeed, of, ratio, run_command
from gpt import GPT, GPTConfig, StdlibText, evaluate
from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).with_name("train_deepspeed.py")
CONFIG = Path(__file__).parent.parent / "configs" / "deepspeed" / "zero2.json"
OURS = (str(TRAIN),)
UNMODIFIED = ("-m", "dsq_ckpt.launch", str(TRAIN), "--plain-initialize")
LARGER = ("--layers", "12", "--width", "480", "--validation-batches", "0")
"""33 M parameters: enough that what a save costs per element is more than what it costs at all."""
BYTES_OWN = 14
"""What DeepSpeed's tags take per parameter: fp32 master weights, two fp32 moments, bf16 weights."""


def dsq(*arguments: str) -> tuple[int, str]:
    """Run a command of `dsq`; its exit status and what it said."""
    command = [sys.executable, "-c", "from dsq_ckpt.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def losses_of(*runs: list[Event]) -> dict[int, float]:
    """Return the training loss by step; for a repeated step, the later one."""
    return {event["step"]: event["loss"] for events in runs for event in of(events, "step")}


def difference(first: dict[int, float], second: dict[int, float]) -> float:
    """Return the mean difference of the losses of the same steps."""
    return statistics.fmean(abs(first[step] - second[step]) for step in first.keys() & second.keys())


def converted_loss(run: Path, directory: Path) -> float:
    """Return the validation loss of the weights that `zero_to_fp32.py` extracts from the newest tag."""
    target = directory / "fp32"
    command = [sys.executable, str(run / "zero_to_fp32.py"), str(run), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(f"zero_to_fp32.py ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    model = GPT()
    model.load_state_dict(torch.load(target / "pytorch_model.bin"))
    return evaluate(model, StdlibText().validation_batches(8, 0, 1, 12))


def median(events: Sequence[Event], field: str) -> float:
    """Return the median of a field."""
    return statistics.median(event[field] for event in events)


def size_figures(saves: list[Event], run: Path, parameters: int) -> dict[str, Any]:
    """Return bytes per parameter of the first tag and of the others, while they are the newest and later."""

    def per_parameter(chosen: list[Event]) -> dict[str, float]:
        reports = [save["report"] for save in chosen]
        newest = statistics.median(report["bytes_written"] for report in reports)
        older = statistics.median(
            report["bytes_written"] - sum(kind["bytes_refinement"] for kind in report["by_kind"].values())
            for report in reports
        )
        return {"newest": newest / parameters, "older": older / parameters}

    logical = BYTES_OWN * parameters * len(saves)
    bytes_kept = bytes_on_disk(run)
    return {
        "parameters": parameters,
        "tags": len(saves),
        "keyframe": per_parameter([save for save in saves if save["report"]["keyframe"]]),
        "delta": per_parameter([save for save in saves if not save["report"]["keyframe"]]),
        "bytes_own": logical,
        "bytes_kept": bytes_kept,
        "ratio_kept": logical / bytes_kept,
    }


def time_figures(events: list[Event]) -> dict[str, Any]:
    """Return medians of saves and loads, and of DeepSpeed's own in the same run, without the first, which compile."""
    saves, loads = of(events, "save")[1:], of(events, "load")
    tags = sorted({load["tag"] for load in loads})
    figures: dict[str, Any] = {"deltas": len(saves)}
    for name, chosen in (
        ("save", saves),
        ("load_keyframe", [load for load in loads if load["tag"] == tags[0]][1:]),
        ("load_newest", [load for load in loads if load["tag"] == tags[-1]][1:]),
    ):
        figures[name] = {
            "count": len(chosen),
            "seconds": median(chosen, "seconds"),
            "own_seconds": median(chosen, "own_seconds"),
            # Of each pair, since what else the machine does changes from one to the next.
            "ratio": statistics.median(event["seconds"] / event["own_seconds"] for event in chosen),
        }
    synced = [save["seconds"] / (save["own_seconds"] + save["own_fsync_seconds"]) for save in saves]
    figures["save"] |= {
        "own_fsync_seconds": median(saves, "own_fsync_seconds"), "ratio_with_fsync": statistics.median(synced),
        "bytes": median([save["report"] for save in saves], "bytes_written"), "own_bytes": median(saves, "own_bytes"),
    }
    return figures


def run_demo(directory: Path, steps: int, save_every: int, console: Console) -> dict[str, Any]:
    """Run the phases and return the figures and the checks."""
    run = directory / "run"
    started = time.perf_counter()
    halves = steps // save_every // 2
    kill_step = save_every * halves + save_every // 2 + 1
    kill_save = save_every * (halves + 1)
    schedule = ("--steps", str(steps), "--save-every", str(save_every))
    plain = directory / "plain.json"
    plain.write_text(json.dumps(json.loads(CONFIG.read_text()) | {"dsq_checkpoint": {"enabled": False}}))

    def announce(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - started:5.0f} s[/dim]  {text}")

    announce("2 ranks train with DeepSpeed's own tags")
    own = ("--deepspeed_config", str(plain), "--out", str(directory / "own"))
    reference = must_succeed(directory, "reference", 2, *schedule, *own, target=OURS)
    own_bytes = bytes_on_disk(directory / "own" / f"global_step{steps}")
    announce(f"2 ranks train with compressed tags; rank 1 is killed in step {kill_step}")
    status, killed = launch(directory, "killed", 2, *schedule, "--die-at-step", str(kill_step), target=OURS)
    if not of(killed, "step"):
        raise DemoError(f"no training step was logged:\n{(directory / 'killed.log').read_text()[-4000:]}")
    announce(f"2 ranks resume, run by the launcher; rank 1 is killed in the save after step {kill_save}")
    status_in_save, in_save = launch(
        directory, "killed-in-save", 2, *schedule, "--die-in-save", str(kill_save), target=UNMODIFIED
    )
    half_saved = run / f"global_step{kill_save}"
    incomplete = half_saved.is_dir() and not (half_saved / "manifest.json").exists()
    latest = (run / "latest").read_text()
    announce(f"2 ranks resume and train to step {steps}")
    resumed = must_succeed(directory, "resumed", 2, *schedule, target=OURS)
    announce("zero_to_fp32.py, dsq gc, dsq verify, dsq log")
    converted = converted_loss(run, directory)
    dsq("gc", str(run), "--older-than", "0")  # what the killed save left in the tag that was saved again
    verified, said = dsq("verify", str(run))
    _, log = dsq("log", str(run))
    announce("2 ranks save and load a larger GPT, by turns compressed and as DeepSpeed does")
    larger = ("--out", str(directory / "larger"), "--steps", "8", "--save-every", "1", "--loads", "4", *LARGER)
    timed = must_succeed(directory, "times", 2, *larger, "--compare-deepspeed", target=OURS)
    seconds = time.perf_counter() - started
    announce("done\n")

    saved_at = save_every * halves
    restored = [of(events, "start")[0]["resumed_from"] for events in (in_save, resumed)]
    expected = losses_of(reference)
    last, last_own = of(resumed, "save")[-1]["validation_loss"], of(reference, "save")[-1]["validation_loss"]
    before = {save["step"]: save["validation_loss"] for save in of(killed, "save")}[saved_at]
    after = of(resumed, "resume")[0]["validation_loss"]
    saves = of(killed, "save") + of(resumed, "save")
    sizes = size_figures(saves, run, sum(p.numel() for p in GPT().parameters()))
    sizes["own"] = own_bytes / sizes["parameters"]
    times = time_figures(timed)
    times["parameters"] = sum(p.numel() for p in GPT(GPTConfig(layers=12, width=480)).parameters())
    return {
        "command": shlex.join(["python", "scripts/demo_deepspeed.py", *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("dsq_ckpt", "torch", "deepspeed")},
        "cores": os.cpu_count(),
        "seconds": seconds,
        "sizes": sizes,
        "times": times,
        "losses": {
            "killed_at_step": kill_step,
            "killed_in_save_of_step": kill_save,
            "restored_step": saved_at,
            "restored_validation_saved": before,
            "restored_validation_loaded": after,
            "training_difference_after_resume": difference(losses_of(in_save, resumed), expected),
            "training_mean_after_resume": statistics.fmean(losses_of(in_save, resumed).values()),
            "final_validation": last,
            "final_validation_uninterrupted": last_own,
            "final_validation_converted": converted,
        },
        "log": log,
        "verify": said,
        "checks": {
            "up to the kill the losses are those of the reference, bit for bit": difference(
                losses_of(killed), expected
            ) == 0 and max(losses_of(killed)) == kill_step - 1 and status != 0,
            f"the save after step {kill_save} was killed half done, and latest names step {saved_at}": (
                status_in_save != 0 and incomplete and latest == f"global_step{saved_at}"
            ),
            f"both resumed from step {saved_at}": all(
                path is not None and Path(path).parent.name == f"global_step{saved_at}" for path in restored
            ),
            f"resuming raises the validation loss by at most {DEGRADATION:.0%}": after / before - 1 <= DEGRADATION,
            f"the resumed run ends within {DEGRADATION:.0%} of the uninterrupted one": (
                last / last_own - 1 <= DEGRADATION
            ),
            f"zero_to_fp32.py gives the model, to {DEGRADATION:.0%} of the validation loss": (
                abs(converted / last - 1) <= DEGRADATION
            ),
            "dsq verify finds every tag whole": verified == 0,
        },
    }


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    sizes, times, losses = figures["sizes"], figures["times"], figures["losses"]
    own = sizes["own"]
    table = Table(title=f"Bytes per parameter of a tag ({sizes['parameters'] / 1e6:.1f} M parameters, bf16, ZeRO-2)")
    for heading in ("", "newest", "", "older: base alone", ""):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("DeepSpeed's own", f"{own:.2f}", "", f"{own:.2f}", "")
    for name in ("keyframe", "delta"):
        row = sizes[name]
        newest, older = (f"{row[field]:.2f}" for field in ("newest", "older"))
        table.add_row(name, newest, ratio(own / row["newest"]), older, ratio(own / row["older"]))
    console.print(table)
    ratio_text = ratio(sizes["ratio_kept"])
    console.print(f"all {sizes['tags']} tags on disk are {ratio_text} smaller than as many of DeepSpeed's own\n")

    table = Table(title=f"Seconds ({times['parameters'] / 1e6:.0f} M parameters, medians of pairs in one run)")
    for heading in ("", "compressed", "DeepSpeed's own", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    save, keyframe, newest = (times[name] for name in ("save", "load_keyframe", "load_newest"))
    synced = save["own_seconds"] + save["own_fsync_seconds"]
    for name, row, own_seconds, factor in (
        ("save (compressed: flushed to the device)", save, save["own_seconds"], save["ratio"]),
        ("save, both flushed", save, synced, save["ratio_with_fsync"]),
        ("load a keyframe, files in the page cache", keyframe, keyframe["own_seconds"], keyframe["ratio"]),
        (f"load after {times['deltas']} deltas, likewise", newest, newest["own_seconds"], newest["ratio"]),
    ):
        table.add_row(name, f"{row['seconds']:.3f}", f"{own_seconds:.3f}", f"{factor:.2f}x")
    console.print(table)

    table = Table(title="Losses (nats per byte)")
    for heading in ("", "expected", "found"):
        table.add_column(heading, justify="right" if heading else "left")
    final = losses["final_validation"]
    for name, expected, value in (
        (
            f"validation at step {losses['restored_step']}: saved, loaded",
            losses["restored_validation_saved"], losses["restored_validation_loaded"],
        ),
        (
            "validation at the end: uninterrupted, killed and resumed",
            losses["final_validation_uninterrupted"], final,
        ),
        ("the same: saved, converted by zero_to_fp32.py", final, losses["final_validation_converted"]),
    ):
        table.add_row(name, f"{expected:.5f}", f"{value:.5f}")
    console.print(table)
    console.print(
        f"after the resume, training losses differ by {losses['training_difference_after_resume']:.5f} of "
        f"{losses['training_mean_after_resume']:.3f} from the uninterrupted run's\n"
    )
    console.print(figures["log"], markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demo and return its exit status."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    return run_command("Train with DeepSpeed, kill, resume, convert: on a CPU.", 160, 20, 3, run_demo, show)


if __name__ == "__main__":
    sys.exit(main())
