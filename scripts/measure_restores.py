"""Restores one after the other, without a search: what each costs, and where the run ends.

    python scripts/measure_restores.py llama vit lstm moe vgg finetune --json restores.json
    python scripts/measure_restores.py --short --seeds 8 --json restores-short.json

A workload of `scripts/evaluate.py` is trained and saved every sixteenth of its steps by `dsq_ckpt.save` with its
defaults. From the middle on, each save is followed by a restore into a model made anew: seven in a row. The cost of a
restore is the held-out loss after it over that before it. The same run is done without restores, and with refinement
layers of one width alone (`before`), as they were when values could stay where the first restore put them.

With `--short`, a network of 0.2 M parameters is restored so often that training moves its weights by less than a part
between restores: at 2/3 and 5/6 of a cosine schedule; eight times, 20 steps apart, at a small constant rate; eight
times with no step between, where the error of the weights is measured too; and twelve times from each third save of
SGD, ten steps apart, where the length of momentum is.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from evaluation.workloads import Workload, create
from torch import nn

import dsq_ckpt
from dsq_ckpt.cli import json_files
from dsq_ckpt.engine import quantizing

PARTS = 16
"""Pieces of a run, with a save after each."""


@contextmanager
def one_width() -> Iterator[None]:
    """Divide cells as often as is asked for, wherever values lie."""
    with patch.object(quantizing, "refine_restored_groups", lambda chunks, fitted, *_: dict(fitted)):
        yield


def save_and_restore(
    workload: Workload, path: Path, restores: bool, history: dsq_ckpt.SaveHistory
) -> tuple[int, Workload, float]:
    """Save, and maybe restore into a workload made anew: bytes written, what to go on with, loss over that before."""
    state = workload.state()
    result = dsq_ckpt.save(state, path, model=workload.model, history=history)
    if not restores:
        return result.bytes_written, workload, 1.0
    before, again = workload.evaluate(), create(workload.name, workload.seed)
    state = again.state()
    dsq_ckpt.load(state, path, history=history)
    again.restore(state)
    return result.bytes_written, again, again.evaluate() / before


def run(name: str, seed: int, restores: bool, directory: Path) -> dict[str, Any]:
    """Return costs of all restores of a run, its last loss, and the bytes it wrote."""
    workload, costs, written, history = create(name, seed), [], 0, dsq_ckpt.SaveHistory()
    for part in range(PARTS):
        workload.train(part * workload.steps // PARTS, (part + 1) * workload.steps // PARTS)
        again = restores and PARTS // 2 <= part < PARTS - 1
        count, workload, cost = save_and_restore(workload, directory / f"{part:02d}", again, history)
        written += count
        costs += [cost - 1] if again else []
    return {"costs": costs, "final": workload.evaluate(), "bytes_written": written}


def measure(names: list[str], seeds: int) -> list[Mapping[str, Any]]:
    """Return a row for each workload, seed and rule."""
    rows: list[Mapping[str, Any]] = []
    for name in names:
        for seed in range(seeds):
            exact = 0.0
            for rule in ("no restores", "now", "before"):
                with tempfile.TemporaryDirectory() as directory, one_width() if rule == "before" else nullcontext():
                    row = run(name, seed, rule != "no restores", Path(directory))
                exact = exact or row["final"]
                rows.append({"workload": name, "seed": seed, "rule": rule, **row, "ends": row["final"] / exact - 1})
                costs = " ".join(f"{100 * cost:+.2f}" for cost in row["costs"])
                print(f"{name} {seed} {rule}: ends {100 * rows[-1]['ends']:+.2f} %, wrote {row['bytes_written']:,}; "
                      f"restores {costs} %", flush=True)
    return rows


class Small:
    """A network of 0.2 M parameters that learns a table, with AdamW, or SGD where momentum is given."""

    def __init__(self, seed: int, rate: float, steps: int = 0, momentum: float = 0.0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = nn.Sequential(
                nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)
            )
        self.settings, self.seed = (seed, rate, steps, momentum), seed
        self.history = dsq_ckpt.SaveHistory()
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, rate)
        if momentum:
            self.optimizer = torch.optim.SGD(parameters, rate, momentum=momentum)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps) if steps else None

    def train(self, first: int, last: int) -> None:
        """Train steps `first` to `last`, exclusive."""
        for step in range(first, last):
            tokens = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(10_000 * self.seed + step))
            nn.functional.cross_entropy(self.model(tokens), (7 * tokens + 1) % 256).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.schedule is not None:
                self.schedule.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss over the table."""
        tokens = torch.arange(256)
        return float(nn.functional.cross_entropy(self.model(tokens), (7 * tokens + 1) % 256))

    def state(self) -> dict[str, Any]:
        """Return what is saved, and loaded into."""
        tree: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        return tree if self.schedule is None else tree | {"schedule": self.schedule}

    def save(self, path: Path) -> None:
        """Save the state with the defaults."""
        dsq_ckpt.save(self.state(), path, history=self.history)

    def restored(self, path: Path) -> Small:
        """Return what a restore makes of a checkpoint; its saves continue those of this one."""
        small = Small(*self.settings)
        small.history = self.history
        dsq_ckpt.load(small.state(), path, history=self.history)
        return small


def twice(seed: int, directory: Path, steps: int) -> dict[str, Any]:
    """Return the cost of restores at 2/3 and 5/6 of a schedule, and what the run ends above one without.

    It is saved every ten steps.
    """
    exact, run, costs = Small(seed, 1e-3, steps), Small(seed, 1e-3, steps), []
    exact.train(0, steps)
    for part in range(steps // 10):
        run.train(10 * part, 10 * part + 10)
        path = directory / f"{part:02d}"
        run.save(path)
        if 10 * part + 10 in (steps * 2 // 3, steps * 5 // 6):
            before, run = run.loss(), run.restored(path)
            costs.append(run.loss() / before - 1)
    return {"costs": costs, "ends": run.loss() / exact.loss() - 1}


def often(seed: int, directory: Path, rate: float, steps: int) -> dict[str, Any]:
    """Return what eight restores, some steps apart, leave above a run without, and the error of the last layer."""
    run = Small(seed, 1e-3)
    run.train(0, 90)
    exact = copy.deepcopy(run)
    for training in (run, exact):
        training.settings = (seed, rate, 0, 0.0)
        training.optimizer = torch.optim.AdamW(training.model.parameters(), rate)
    for number in range(8):
        for training in (run, exact):
            training.train(100 + steps * number, 100 + steps * (number + 1))
        run.save(directory / str(number))
        run = run.restored(directory / str(number))
    own, true = (training.model.get_parameter("4.weight").detach() for training in (run, exact))
    return {"ends": run.loss() / exact.loss() - 1, "error": float((own - true).norm() / true.norm())}


def later(seed: int, directory: Path, momentum: float, rests: bool) -> dict[str, Any]:
    """Return what twelve restores, each from the third save after the last, leave of a run, and of its momentum.

    It is saved every ten steps. With `rests`, the first two layers have no gradients meanwhile; the run goes on for ten
    steps with them.
    """
    rate = 0.5 * (1 - momentum)
    exact, run = Small(seed, rate, 0, momentum), Small(seed, rate, 0, momentum)
    for training in (exact, run):
        training.train(0, 30)
    for number in range(36):
        for training in (exact, run):
            for layer in (0, 1):
                training.model[layer].requires_grad_(not rests)
            training.train(30 + 10 * number, 40 + 10 * number)
        run.save(directory / f"{number:02d}")
        if number % 3 == 2:
            run = run.restored(directory / f"{number:02d}")
    lengths = [
        float(sum(own["momentum_buffer"].square().sum() for own in one.optimizer.state.values()) ** 0.5)
        for one in (run, exact)
    ]
    for training in (exact, run):
        training.model.requires_grad_(True)
        training.train(390, 400)
    return {"ends": run.loss() / exact.loss() - 1, "length": lengths[0] / lengths[1]}


def short(seeds: int) -> list[Mapping[str, Any]]:
    """Return a row for each experiment, seed and rule."""
    rows: list[Mapping[str, Any]] = []
    for name, work in _experiments().items():
        for rule in ("now", "before"):
            for seed in range(seeds):
                with tempfile.TemporaryDirectory() as directory, one_width() if rule == "before" else nullcontext():
                    rows.append({"experiment": name, "rule": rule, "seed": seed, **work(seed, Path(directory))})
            own = [row for row in rows if row["experiment"] == name and row["rule"] == rule]
            costs = [statistics.mean(costs) for costs in zip(*(row.get("costs", []) for row in own), strict=True)]
            print(f"{name}, {rule}: restores " + " ".join(f"{100 * cost:+.2f}" for cost in costs)
                  + f" %, ends {100 * statistics.mean(row['ends'] for row in own):+.2f} %, "
                  f"error {statistics.mean(row.get('error', 0.0) for row in own):.4f}, "
                  f"momentum {statistics.mean(row.get('length', 1.0) for row in own):.2f} times as long", flush=True)
    return rows


def _experiments() -> dict[str, Callable[[int, Path], dict[str, Any]]]:
    experiments: dict[str, Callable[[int, Path], dict[str, Any]]] = {}
    for steps in (60, 120, 240):
        experiments[f"two restores in a schedule of {steps} steps"] = partial(twice, steps=steps)
    for rate in (1e-6, 1e-5, 1e-4, 1e-3):
        experiments[f"eight restores, 20 steps of {rate:g} apart"] = partial(often, rate=rate, steps=20)
    experiments["eight restores, no step between"] = partial(often, rate=1e-3, steps=0)
    for momentum in (0.9, 0.99):
        experiments[f"twelve restores of SGD, momentum {momentum}"] = partial(later, momentum=momentum, rests=False)
    experiments["twelve restores of SGD, layers that rest"] = partial(later, momentum=0.9, rests=True)
    return experiments


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--short", action="store_true", help="a small network, restored a few steps apart")
    parser.add_argument("--seeds", type=int, default=1, help="0, 1, ...")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = short(options.seeds) if options.short else measure(options.workloads, options.seeds)
    if options.json is not None:
        command = shlex.join(["python", "scripts/measure_restores.py", *sys.argv[1:]])
        json_files.write(options.json, {"measured": "restores", "command": command, "rows": rows})


if __name__ == "__main__":
    main()
