"""Measure the size and degradation of configurations on real training runs; the defaults are chosen from its output.

    python scripts/measure_defaults.py record  /tmp/record            # train once, keep exact checkpoints
    python scripts/measure_defaults.py offline /tmp/record --json out.json   # all configurations on that run
    python scripts/measure_defaults.py restores --json out.json              # ten restores, per configuration
    python scripts/measure_defaults.py strengths llama vit --json out.json   # of steps by gradients, per workload

`offline` compresses a recorded chain of checkpoints, and evaluates each decoded base layer: ratio against degradation
of a single checkpoint. `restores` kills and resumes a run ten times from its own checkpoints: degradation of training,
which the first does not show. `strengths` compresses runs that `evaluate.py record` keeps with steps that follow the
gradients more or less, each at several fixed steps, without a search, and compares ratios at equal degradation.
Everything is in one process, with fixed seeds.
"""

from __future__ import annotations

import copy
import itertools
import math
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from gpt import GPT, GPTConfig, StdlibText, evaluate, loss_sum
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dsq_ckpt
from dsq_ckpt.cli import json_files
from dsq_ckpt.report.history import History
from dsq_ckpt.storage.manifest import Manifest

app = typer.Typer(add_completion=False, help=__doc__)
console = Console()

KM = {"fit": "kmeans"}
PAPER = {"fit": "lloyd", "bins": 8, "prune": 0.2, "protect": 0.005, "sigma": 0.2, "rate_distortion": 0.0}
LOG8 = {"fit": "kmeans", "bins": 8, "protect": 0.0, "domain": "log"}


def lattice(step: float, price: float = 0.05) -> dict[str, Any]:
    """Return the configuration of a lattice of this step (in root mean squares) and rate-distortion weight."""
    return {"fit": "lattice", "step": step, "rate_distortion": price}


OFFLINE: dict[str, dict[str, Any]] = {
    "papers: 8 bins, prune 0.2, RLE+Huffman": {
        "quantize.weights.codebook": PAPER, "delta.coder": "huffman"},
    "papers' codes, rANS": {"quantize.weights.codebook": PAPER},
    "k-means 8": {"quantize.weights.codebook": KM | {"bins": 8, "rate_distortion": 0.0}},
    **{f"k-means {bins} + RD {price}": {"quantize.weights.codebook": KM | {"bins": bins, "rate_distortion": price}}
       for bins in (8, 12, 16, 24) for price in (0.04, 0.15)},
    **{f"lattice {step} + RD {price}": {"quantize.weights.codebook": lattice(step, price)}
       for step in (0.35, 0.5, 0.6, 0.7, 0.85) for price in (0.0, 0.04, 0.08, 0.15)},
    "lattice 0.5, every outlier of 1 octave normalised": {
        "quantize.weights.codebook": lattice(0.5), "quantize.outlier_octaves": 1},
    "lattice 0.5, never normalised": {
        "quantize.weights.codebook": lattice(0.5), "quantize.outlier_octaves": 0},
}

def bits(weights: int, first: int, second: int) -> dict[str, Any]:
    """Return refinement bits of weights, exp_avg and exp_avg_sq."""
    return {"quantize.weights.refinement_bits": weights, "quantize.exp_avg.refinement_bits": first,
            "quantize.exp_avg_sq.refinement_bits": second}


EXACT_MOMENTS = {"quantize.exp_avg.method": "exact", "quantize.exp_avg_sq.method": "exact"}
RESTORES: dict[str, dict[str, Any]] = {
    "weights 4, moments 4 and 3": bits(4, 4, 3),
    "base alone": bits(0, 0, 0),
    "weights 4, moments 2 and 2": bits(4, 2, 2),
    "weights 4, moments exact": bits(4, 0, 0) | EXACT_MOMENTS,
    "weights 6, moments 4 and 3": bits(6, 4, 3),
    "weights 4, moments 0 and 0": bits(4, 0, 0),
    "everything exact": {"quantize.weights.method": "exact"} | EXACT_MOMENTS,
}


STRENGTHS = (0.0, 0.125, 0.1875, 0.25)
STEPS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
DEGRADATIONS = (0.005, 0.01, 0.02, 0.05)
"""Mean degradations that ratios are compared at."""


class Run:
    """A small GPT in training: the same batches, by step, in every run."""

    def __init__(self, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.steps = steps
        self.model = GPT(GPTConfig(context=96, layers=4, width=128, heads=4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.text = StdlibText(context=96, seed=seed)
        self.held_out = list(self.text.validation_batches(8, 0, 1, 16))

    def train(self, first: int, last: int) -> None:
        """Train steps `first` to `last`, exclusive: linear warm-up, cosine to a tenth."""
        for step in range(first, last):
            progress = step / self.steps
            rate = 2e-3 * min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * progress))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            inputs, targets = self.text.batch(step, 0, 1, 8)
            (loss_sum(self.model, inputs, targets) / targets.numel()).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def loss(self) -> float:
        return evaluate(self.model, self.held_out)


@app.command()
def record(run: Path, steps: int = 2400, every: int = 200, seed: int = 0) -> None:
    """Train without failures and keep exact checkpoints (torch.save) for `offline`."""
    run.mkdir(parents=True, exist_ok=True)
    training = Run(steps, seed)
    for last in range(every, steps + 1, every):
        training.train(last - every, last)
        torch.save(training.state(), run / f"step-{last:06d}.pt")
        console.print(f"step {last}: loss {training.loss():.4f}")


@app.command()
def offline(run: Path, json_path: Path = typer.Option(..., "--json"), seed: int = 0, only: str = "") -> None:
    """Compress the recorded chain with every configuration; the base layers' size and degradation."""
    files = sorted(run.glob("step-*.pt"))
    training = Run(1, seed)
    exact = []
    for file in files:
        training.restore(torch.load(file, weights_only=True))
        exact.append(training.loss())
    rows = [_offline_row(name, values, files, training, exact) for name, values in OFFLINE.items() if only in name]
    _report("offline", rows, json_path, {"checkpoints": len(files)})


def _offline_row(
    name: str, values: dict[str, Any], files: list[Path], training: Run, exact: list[float]
) -> dict[str, Any]:
    config = dsq_ckpt.DSQConfig().with_values(**values)
    kinds: dict[str, list[int]] = {}
    degradations, deltas = [], []
    with tempfile.TemporaryDirectory() as directory, _quiet():
        history = dsq_ckpt.SaveHistory()
        for file, loss in zip(files, exact, strict=True):
            state = torch.load(file, weights_only=True)
            target = Path(directory) / file.stem
            dsq_ckpt.save(state, target, config=config, model=training.model, history=history)
            manifest = Manifest.read(target)
            for kind, sizes in manifest.kinds.items():
                total = kinds.setdefault(kind, [0, 0, 0])
                for place, size in enumerate((sizes.logical, sizes.base, sizes.refinement)):
                    total[place] += size
            deltas.append(manifest.kinds["weights"].logical / manifest.kinds["weights"].base)
            dsq_ckpt.load(state, target, refinement=False, history=history)
            optimizer = copy.deepcopy(torch.load(file, weights_only=True)["optimizer"])
            training.restore({"model": state["model"], "optimizer": optimizer})
            degradations.append(training.loss() / loss - 1)
    row: dict[str, Any] = {"name": name, "mean_harm": statistics.mean(degradations), "max_harm": max(degradations)}
    row["best_delta"] = max(deltas)
    for kind, (logical, base, refinement) in kinds.items():
        row |= {f"ratio_{kind}": logical / base, f"bits_{kind}": 32 * base / logical,
                f"refinement_bits_{kind}": 32 * refinement / logical}
    console.print(f"{name}: weights {row['ratio_weights']:.1f}x at {100 * row['mean_harm']:.2f} %")
    return row


@app.command()
def restores(
    json_path: Path = typer.Option(..., "--json"), steps: int = 2400, failures: int = 10, seed: int = 0, only: str = ""
) -> None:
    """Measure the final loss of runs restored `failures` times from their checkpoints, against one without failures."""
    rows = [_restore_row("no failures", None, steps, failures, seed)]
    rows += [_restore_row(name, values, steps, failures, seed) for name, values in RESTORES.items() if only in name]
    for row in rows:
        row["against_no_failures"] = row["final_loss"] / rows[0]["final_loss"] - 1
    _report("restores", rows, json_path, {"steps": steps, "failures": failures, "seed": seed})


def _restore_row(
    name: str, values: dict[str, Any] | None, steps: int, failures: int, seed: int
) -> dict[str, Any]:
    training = Run(steps, seed)
    every = steps // (failures + 1)
    written = logical = 0
    with tempfile.TemporaryDirectory() as directory, _quiet():
        history = dsq_ckpt.SaveHistory()
        for number in range(failures):
            training.train(number * every, (number + 1) * every)
            if values is None:
                continue
            target = Path(directory) / f"step-{(number + 1) * every:06d}"
            config = dsq_ckpt.DSQConfig().with_values(**values)
            dsq_ckpt.save(training.state(), target, config=config, model=training.model, history=history)
            state = training.state()
            dsq_ckpt.load(state, target, history=history)
            training.restore(state)
            written += dsq_ckpt.describe(target)["bytes_written"]
            logical += dsq_ckpt.describe(target)["bytes_logical"]
        row: dict[str, Any] = {"name": name}
        if values is not None:
            kept_bytes = History.read(Path(directory)).total["everything"].kept
            row |= {"ratio_written": logical / written, "ratio_kept": logical / kept_bytes}
        training.train(failures * every, steps)
    row["final_loss"] = training.loss()
    console.print(row)
    return row


@app.command()
def strengths(
    workloads: list[str], json_path: Path = typer.Option(..., "--json"), seed: list[int] = typer.Option([0]),
) -> None:
    """Compress recorded runs with steps by gradients of several strengths; ratios of weights at equal degradation."""
    from evaluation.recording import default_directory

    torch.set_num_threads(1)
    rows = []
    for workload, number in ((name, one) for name in workloads for one in seed):
        run: dict[str, Any] = {"workload": workload, "seed": number}
        for strength in STRENGTHS:
            points = [_point(default_directory(workload, number), strength, step) for step in STEPS]
            rows.append(run | {"strength": strength, "points": points} | _at_equal_degradation(points))
            console.print({key: value for key, value in rows[-1].items() if key != "points"})
    _report("strengths", rows, json_path, {"steps": STEPS})


def _point(recording: Path, strength: float, step: float) -> dict[str, Any]:
    from evaluation.offline import summary
    from evaluation.replay import replay

    values = {"sensitivity": strength, "step": step}
    config = dsq_ckpt.DSQConfig.create({"storage": {"threads": 1}}).with_values(
        **{f"quantize.weights.codebook.{key}": value for key, value in values.items()}
    )
    with _quiet():
        figures = summary(replay(recording, config, choices={}))
    return {"step": step} | {
        key: figures[key] for key in ("ratio_weights", "ratio_weights_deltas", "degradation_mean", "degradation_final")
    }


def _at_equal_degradation(points: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the ratio where each of `DEGRADATIONS` is first passed, linear in logarithms; None beyond the steps."""
    row: dict[str, float | None] = {}
    for degradation in DEGRADATIONS:
        row[f"ratio_at_{degradation:g}"] = None
        for finer, coarser in itertools.pairwise(points):
            low, high = (max(point["degradation_mean"], 1e-5) for point in (finer, coarser))
            if row[f"ratio_at_{degradation:g}"] is None and low <= degradation < high:
                part = math.log(degradation / low) / math.log(high / low)
                ratios = [math.log(point["ratio_weights"]) for point in (finer, coarser)]
                row[f"ratio_at_{degradation:g}"] = math.exp(ratios[0] + part * (ratios[1] - ratios[0]))
    return row


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _report(title: str, rows: list[dict[str, Any]], path: Path, about: dict[str, Any]) -> None:
    table = Table(title=title)
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "points"))
    for key in keys:
        table.add_column(key)
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    console.print(table)
    json_files.write(path, {
        "measured": title, **about, "rows": rows, "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "dsq_ckpt": dsq_ckpt.__version__, "date": time.strftime("%Y-%m-%d"),
    })


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
