"""What a run keeps and reads on account of its chain: refinement layers, copies of keyframes, checks of ancestors.

    python scripts/measure_chain.py --json chain.json

A random walk of weights and Adam's moments is saved 33 times in one chain, with `refinement.keep_last` 1 and 3, and
with `storage.replicate_keyframes`. Bytes are those on the device, each hard-linked file once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dsq_ckpt
from dsq_ckpt.ancestry import CHECKED_EVERY, damaged, due
from dsq_ckpt.manifest import Manifest
from dsq_ckpt.remembered import ParentRef
from dsq_ckpt.workers import Workers

_SETTINGS: dict[str, dict[str, Any]] = {
    "keep_last 1": {"refinement": {"keep_last": 1}},
    "keep_last 3 (default)": {},
    "replicate_keyframes": {"storage": {"replicate_keyframes": True}},
}


def walk(layers: int, saves: int) -> Any:
    """Yield the states of a run: weights that move by a tenth of their size over 25 saves, and their moments."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.weight": torch.randn(1000, 1000, generator=generator) * 0.02 for n in range(layers)}
    for _ in range(saves):
        moved = {name: torch.randn(w.shape, generator=generator) * 4e-4 for name, w in weights.items()}
        for name, step in moved.items():
            weights[name] += step
        moments = {name: {"exp_avg": step, "exp_avg_sq": step.square()} for name, step in moved.items()}
        yield {"model": weights, "optimizer": {"state": moments}}


def on_device(run: Path) -> int:
    """Return the bytes of all files of a run, each inode once."""
    stats = [path.stat() for path in run.rglob("*") if path.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def checks(run: Path) -> tuple[list[float], list[int]]:
    """Return seconds and bytes of the check that goes with the save after each checkpoint of a run, on one rank."""
    seconds, sizes = [], []
    for path in sorted(run.iterdir()):
        manifest = Manifest.read(path)
        files = due(ParentRef(manifest.save_id, str(path), manifest.depth))
        with Workers(2, 1 << 20) as workers:
            started = time.perf_counter()
            assert not damaged(path, files, workers)
            seconds.append(time.perf_counter() - started)
        sizes.append(sum(file.size for file in files))
    return seconds, sizes


def measure(layers: int, saves: int, directory: Path) -> dict[str, Any]:
    """Return sizes and times by setting."""
    rows: dict[str, Any] = {}
    for name, config in _SETTINGS.items():
        run = directory / name
        seconds: list[float] = []
        reports: list[dict[str, Any]] = []
        for number, state in enumerate(walk(layers, saves)):
            started = time.perf_counter()
            dsq_ckpt.save(state, run / f"{number:03d}", config=config)
            seconds.append(time.perf_counter() - started)
            reports.append(dsq_ckpt.describe(run / f"{number:03d}"))
        logical = sum(report["bytes_logical"] for report in reports)
        rows[name] = {
            "bytes_logical": logical, "bytes_on_device": on_device(run), "ratio_kept": logical / on_device(run),
            "bytes_written": statistics.mean(report["bytes_written"] for report in reports),
            "keyframe_bytes": reports[0]["bytes_written"], "save_seconds": statistics.median(seconds),
        }
        if config == {}:
            times, sizes = checks(run)
            rows[name] |= {"check_seconds": statistics.mean(times), "check_seconds_most": max(times),
                           "check_bytes": statistics.mean(sizes), "check_bytes_most": max(sizes)}
    return {"parameters": layers * 10**6, "saves": saves, "checked_every": CHECKED_EVERY, "settings": rows}


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="of a million weights each")
    parser.add_argument("--saves", type=int, default=33)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(arguments.layers, arguments.saves, Path(directory))
    text = json.dumps({"command": "python scripts/measure_chain.py", **result}, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
