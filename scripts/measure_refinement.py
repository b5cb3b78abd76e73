"""Bytes of a run by how many checkpoints in a row store the refinement of weights as a difference.

    python scripts/measure_refinement.py llama lstm vit --json refinement-differences.json

Models of `scripts/evaluate.py` are trained, and saved 44 and 11 times: the more steps lie between two checkpoints, the
farther weights move. `bytes_kept_mean` is the mean of what the run keeps after each of its saves, as the last one alone
depends on whether it begins a row. All checkpoints are saved with every value of `refinement.max_differences`, with the
default configuration and no search. What is loaded must not depend on it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from evaluation import create
from measure_chain import on_device

import dsq_ckpt
from dsq_ckpt import DSQConfig
from dsq_ckpt.cli import json_files
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest

DIFFERENCES = (0, 1, 3)


def measure(workload: str, saves: int, directory: Path) -> list[dict[str, Any]]:
    """Return a row for each value: ratios, bits of refinement per weight, and processor time.

    Raises:
        RuntimeError: the values that a checkpoint loads depend on how its refinement is stored.
    """
    training = create(workload)
    every = training.steps // saves
    histories = {most: dsq_ckpt.SaveHistory() for most in DIFFERENCES}
    seconds, loads = dict.fromkeys(DIFFERENCES, 0.0), dict.fromkeys(DIFFERENCES, 0.0)
    kept = dict.fromkeys(DIFFERENCES, 0)
    for number in range(saves):
        training.train(number * every, (number + 1) * every)
        state, decoded = training.state(), list[dict[ChunkKey, torch.Tensor]]()
        for most in DIFFERENCES:
            path = directory / str(most) / f"{number:03d}"
            config = {"refinement": {"max_differences": most}, "storage": {"fsync": False}}
            began = time.process_time()
            dsq_ckpt.save(state, path, config=config, history=histories[most])
            between = time.process_time()
            decoded.append(decode(path))
            loads[most] += time.process_time() - between
            seconds[most] += between - began
            kept[most] += on_device(path.parent)
        for values in decoded[1:]:
            for key, value in decoded[0].items():
                if not torch.equal(value, values[key]):
                    raise RuntimeError(f"'{key.fqn}' of checkpoint {number} depends on how its refinement is stored")
    return [
        {"workload": workload, "saves": saves, "every": every, "max_differences": most, **_sizes(directory / str(most)),
         "bytes_kept_mean": kept[most] / saves, "save_processor_seconds": seconds[most] / saves,
         "load_processor_seconds": loads[most] / saves}
        for most in DIFFERENCES
    ]


def decode(path: Path) -> dict[ChunkKey, torch.Tensor]:
    """Return all tensors of a checkpoint; a load would count as a restore of the run."""
    with Checkpoint(path) as checkpoint, Workers(1, DSQConfig().storage.block_elements) as workers:
        return {key: checkpoint.decode_tensor(ref, True, workers) for key, ref in checkpoint.iter_chunks()}


def _sizes(run: Path) -> dict[str, float]:
    paths = sorted(run.iterdir())
    reports = [dsq_ckpt.describe(path) for path in paths]
    logical = sum(report["bytes_logical"] for report in reports)
    weights = [Manifest.read(path).kinds["weights"] for path in paths]
    elements = sum(kind.logical for kind in weights) / 4
    return {
        "ratio_written": logical / sum(report["bytes_written"] for report in reports),
        "ratio_kept": logical / on_device(run),
        "refinement_bits_per_weight": 8 * sum(kind.refinement for kind in weights) / elements,
    }


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", help="of scripts/evaluate.py")
    parser.add_argument("--saves", type=int, nargs="+", default=[44, 11], help="of a run, at even distances")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for workload in arguments.workloads:
        for saves in arguments.saves:
            with tempfile.TemporaryDirectory() as directory:
                rows += measure(workload, saves, Path(directory))
    result = {"command": shlex.join(["python", *sys.argv]), "measured": "refinement", "rows": rows}
    print(json_files.dumps(result), end="")
    if arguments.json is not None:
        json_files.write(arguments.json, result)


if __name__ == "__main__":
    main()
