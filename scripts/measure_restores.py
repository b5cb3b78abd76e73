"""Restores one after the other, without a search: what each costs, and where the run ends.

    python scripts/measure_restores.py llama vit lstm moe --json restores.json

A workload of `scripts/evaluate.py` is trained and saved every sixteenth of its steps by `dsq_ckpt.save` with its
defaults. From the middle on, each save is followed by a restore into a model made anew: eight in a row. The cost of a
restore is the held-out loss after it over that before it. The same run is done without restores, and with refinement
layers of one width alone (`before`), as they were when values could stay where the first restore put them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from evaluation.workloads import Workload, create

import dsq_ckpt
from dsq_ckpt.cli import json_files
from dsq_ckpt.engine import quantizing

PARTS = 16
"""Pieces of a run, with a save after each."""


@contextmanager
def one_width() -> Iterator[None]:
    """Divide cells as often as is asked for, wherever values lie."""
    with patch.object(quantizing, "with_parts_for", lambda chunks, fitted, comm: dict(fitted)):
        yield


def saved(workload: Workload, path: Path, restores: bool) -> tuple[int, Workload, float]:
    """Save, and maybe restore into a workload made anew: bytes written, what to go on with, loss over that before."""
    state = workload.state()
    result = dsq_ckpt.save(state, path, model=workload.model)
    if not restores:
        return result.bytes_written, workload, 1.0
    before, again = workload.evaluate(), create(workload.name, workload.seed)
    state = again.state()
    dsq_ckpt.load(state, path)
    again.restore(state)
    return result.bytes_written, again, again.evaluate() / before


def run(name: str, seed: int, restores: bool, directory: Path) -> dict[str, Any]:
    """Return costs of all restores of a run, its last loss, and the bytes it wrote."""
    dsq_ckpt.forget()
    workload, costs, written = create(name, seed), [], 0
    for part in range(PARTS):
        workload.train(part * workload.steps // PARTS, (part + 1) * workload.steps // PARTS)
        again = restores and PARTS // 2 <= part < PARTS - 1
        count, workload, cost = saved(workload, directory / f"{part:02d}", again)
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
                    found = run(name, seed, rule != "no restores", Path(directory))
                exact = exact or found["final"]
                rows.append({"workload": name, "seed": seed, "rule": rule, **found, "ends": found["final"] / exact - 1})
                costs = " ".join(f"{100 * cost:+.2f}" for cost in found["costs"])
                print(f"{name} {seed} {rule}: ends {100 * rows[-1]['ends']:+.2f} %, wrote {found['bytes_written']:,}; "
                      f"restores {costs} %", flush=True)
    return rows


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--seeds", type=int, default=1, help="0, 1, ...")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.workloads, options.seeds)
    if options.json is not None:
        command = shlex.join(["python", "scripts/measure_restores.py", *sys.argv[1:]])
        json_files.write(options.json, {"measured": "restores", "command": command, "rows": rows})


if __name__ == "__main__":
    main()
