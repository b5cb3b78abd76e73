"""Processor time of saves and loads by pass over the data, in ns per element.

    python scripts/measure_passes.py --json passes.json
    python scripts/measure_passes.py --deltas 8 --json passes-after-deltas.json
    python scripts/measure_passes.py --parameters 2800000 --json passes-small.json

The state of `dsq bench` and what it becomes some hundred steps later is saved and loaded in one process with one
thread, under a profiler whose clock is the processor time of the thread. Each function's own time counts for one pass;
the kernels, compiled, are single functions to the profiler. Rounds are of a keyframe, a delta (with `--deltas`, the
last of so many) and loads of both; the median round of each is kept. Beside them is the time of a copy in memory, which
no pass that reads 4 bytes of an element and writes as many takes less than.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import dsq_ckpt
from dsq_ckpt.cli import json_files
from dsq_ckpt.cli.benchmark import drift, synthetic_state
from dsq_ckpt.cli.machine import processor
from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.engine.history import SaveHistory

PACKAGE = Path(dsq_ckpt.__file__).parent
PASSES: dict[str, tuple[str, ...]] = {
    "sketches": (
        "kernels/cpu.py:_count_keys", "kernels/cpu.py:_add_key_counts", "kernels/cpu.py:_count_bins",
        "kernels/cpu.py:sketch", "kernels/cpu.py:_count_octaves", "kernels/cpu.py:count_octaves",
        "kernels/cpu.py:joint_sketch", "native/sketches.py:count_bins", "native/sketches.py:count_keys",
        "native/sketches.py:count_octaves",
    ),
    "codes and their refinement": (
        "coding/codes.py:", "native/__init__.py:quantize", "kernels/cpu.py:_look_up", "kernels/cpu.py:quantize",
        "kernels/cpu.py:_refine_linear", "kernels/cpu.py:_refine_bits", "kernels/cpu.py:refine",
        "kernels/cpu_pack.py:_pack", "kernels/cpu_pack.py:pack", "kernels/cpu.py:gather_protected",
        "native/sketches.py:refine", "native/sketches.py:pack", "native/sketches.py:find_positions",
        "native/sketches.py:count_code", "kernels/cpu_decode.py:find_positions",
    ),
    "looks at refinement": (
        "kernels/cpu_pack.py:", "coding/pairs.py:", "coding/refinement_blocks.py:", "native/__init__.py:unpack",
        "native/sketches.py:count_pairs",
    ),
    "scales of moments, both ways": (
        "quantization/moments.py:", "quantization/matrix_scales.py:", "quantization/step_lengths.py:",
        "coding/scales.py:", "native/__init__.py:scale", "native/moments.py:divide_by_scales",
        "native/moments.py:divide_by_roots", "native/moments.py:multiply_by_roots",
        "native/moments.py:multiply_by_octaves", "native/moments.py:add_step_lengths", "native/moments.py:add_row_sums",
    ),
    "values": (
        "coding/values.py:", "native/__init__.py:look_up_values", "kernels/cpu_decode.py:", "native/sketches.py:",
    ),
    "entropy coding": ("coding/", "native/__init__.py:"),
    "looks at tensors": (
        "quantization/lost_rows.py:", "quantization/exact_values.py:", "quantization/manifolds.py:",
        "quantization/weight_averages.py:", "quantization/untrained_weights.py:", "quantization/frozen_tensors.py:",
        "quantization/nan_check.py:", "quantization/restored_values.py:", "native/moments.py:sum_part_waves",
    ),
    "checksums": ("~:<method 'update' of 'xxhash", "~:<method 'digest' of 'xxhash", "~:<built-in method xxhash"),
    "files": ("~:<method 'write' of '_io", "~:<method 'readinto' of '_io", "~:<built-in method posix."),
}
"""Name of a pass to the files and functions that it consists of; the first that matches counts."""
REST = "everything else: Python, torch, DCP"


def pass_of(file: str, function: str) -> str:
    """Return the pass that a function of a profile belongs to; functions in C, which have no file, go by their text."""
    path = Path(file)
    place = f"{path.relative_to(PACKAGE)}:{function}" if path.is_relative_to(PACKAGE) else f"{path.name}:{function}"
    return next((name for name, parts in PASSES.items() if place.startswith(parts)), REST)


def by_pass(work: Callable[[], Any]) -> Counter[str]:
    """Return seconds of processor time of this thread by pass, without the rest.

    A profiler adds a microsecond to each call in Python, which counts nothing beside a pass over a block.
    """
    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(work)
    seconds: Counter[str] = Counter()
    for (file, _, function), (_, _, own, *_) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        seconds[pass_of(file, function)] += own
    del seconds[REST]
    return seconds


def whole(work: Callable[[], Any]) -> float:
    """Return seconds of processor time of this thread, without a profiler."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def copy_seconds(count: int) -> float:
    """Return the least seconds of a copy of fp32 numbers from memory to memory, of ten."""
    source, target = torch.randn(count), torch.empty(count)
    times = []
    for _ in range(10):
        started = time.thread_time()
        target.copy_(source)
        times.append(time.thread_time() - started)
    return min(times)


def measure(parameters: int, moments: bool, rounds: int, directory: Path, deltas: int = 1) -> list[dict[str, Any]]:
    """Return rows: what was done, the pass, and its ns per element of the state.

    A delta is the last of `deltas` in a row, and its load decodes all of them.
    """
    states = [synthetic_state(parameters, moments)]
    for seed in range(1, deltas + 1):
        states.append(drift(states[-1], seed))
    elements = sum(tensor.numel() for tensor in states[0].values())
    into = {name: torch.empty_like(tensor) for name, tensor in states[0].items()}

    def chain(number: int, clock: Callable[[Callable[[], Any]], Any]) -> dict[str, Any]:
        run, history, times = directory / str(number), SaveHistory(), {}
        for step, state in enumerate(states):
            save = partial(dsq_ckpt.save, state, run / str(step), no_dist=True, history=history)
            if 0 < step < deltas:
                save()
            else:
                times["save of a delta" if step else "save of a keyframe"] = clock(save)
        for step, name in ((0, "keyframe"), (deltas, "delta")):
            load = partial(dsq_ckpt.load, into, run / str(step), no_dist=True, history=SaveHistory())
            times[f"load of a {name}"] = clock(load)
        shutil.rmtree(run)
        return times

    chain(0, whole)  # compiles, imports and finds pages
    passes = [chain(number, by_pass) for number in range(rounds)]
    totals = [chain(number, whole) for number in range(rounds)]
    rows = []
    for work in passes[0]:
        spent = {part: statistics.median(times[work][part] for times in passes) for part in PASSES}
        spent[REST] = statistics.median(times[work] for times in totals) - sum(spent.values())
        rows += [{"state": "with moments" if moments else "weights", "work": work, "pass": part,
                  "ns": seconds / elements * 1e9} for part, seconds in spent.items() if seconds]
    return rows


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=int, default=50_000_000, help="weights of the state")
    parser.add_argument("--rounds", type=int, default=5, help="of each; the median is kept")
    parser.add_argument("--deltas", type=int, default=1, choices=range(1, 33), metavar="1..32",
                        help="of a chain, the last of which is measured")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The profiler sees this thread alone, and one thread of a save or a load is the thread that calls.
    with tempfile.TemporaryDirectory() as directory, patch.object(StorageConfig, "thread_count", return_value=1):
        rows = [row for moments in (False, True)
                for row in measure(options.parameters, moments, options.rounds, Path(directory), options.deltas)]
    copied = copy_seconds(options.parameters) / options.parameters * 1e9
    for row in rows:
        print(f"{row['state']:14}{row['work']:22}{row['pass']:38}{row['ns']:6.2f} ns")
    print(f"a copy in memory: {copied:.2f} ns")
    if options.json:
        json_files.write(options.json, {
            "measured": "passes", "command": shlex.join(["python", "scripts/measure_passes.py", *sys.argv[1:]]),
            "parameters": options.parameters, "rounds": options.rounds, "deltas": options.deltas,
            "processor": processor(), "copy_ns": copied, "rows": rows,
        })


if __name__ == "__main__":
    main()
