"""Seconds that a new process takes to import dsq_ckpt and to save for the first time.

    python scripts/measure_startup.py --json startup.json

Processes take turns: one saves with `dsq_ckpt.save`, one with `dcp.save`. Each imports torch and what it saves with,
makes a small state, and saves it twice. Seconds are by the clock and of the processor, of all threads of the process;
medians over the processes. Kernels were compiled before, by a process that is not counted, and files are in the page
cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dsq_ckpt.cli import json_files
from dsq_ckpt.cli.machine import processor

PROCESS = """
import json, sys, time
def clock():
    return time.perf_counter(), time.process_time()
times = [clock()]
import torch
import torch.distributed.checkpoint as dcp
times.append(clock())
def save(state, path):
    dcp.save(state, checkpoint_id=path, no_dist=True)
if sys.argv[1] == "dsq":
    import dsq_ckpt
    dsq_ckpt.save  # imported when it is first named
    def save(state, path):
        dsq_ckpt.save(state, path, no_dist=True)
times.append(clock())
generator = torch.Generator().manual_seed(0)
state = {f"layer{index}.weight": torch.randn(256, 256, generator=generator) / 16 for index in range(int(sys.argv[3]))}
for step in range(2):
    times.append(clock())
    save(state, f"{sys.argv[2]}/step-{step}")
    times.append(clock())
    for tensor in state.values():
        tensor += torch.randn(tensor.shape, generator=generator) / 1000
print(json.dumps(times))
"""
"""Prints the clock before and after `import torch`, after what saves is imported, and before and after each save."""
INTERVALS = {"import torch": (0, 1), "import of what saves": (1, 2), "first save": (3, 4), "second save": (5, 6)}


def start(system: str, directory: Path, tensors: int) -> dict[str, tuple[float, float]]:
    """Return the seconds by the clock, and those of the processor, of each part of a new process.

    Args:
        system: what saves, `dsq` or `dcp`.
        directory: where, which is made.
        tensors: of 65,536 elements each.

    Raises:
        subprocess.CalledProcessError: the process failed.
    """
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROCESS, system, str(directory), str(tensors)],
        stdout=subprocess.PIPE, check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    )
    times = json.loads(process.stdout.splitlines()[-1])
    return {part: (times[end][0] - times[begin][0], times[end][1] - times[begin][1])
            for part, (begin, end) in INTERVALS.items()}


def measure(rounds: int, tensors: int) -> list[dict[str, Any]]:
    """Return rows: what saves, the part of its process, and the medians of its seconds."""
    with tempfile.TemporaryDirectory() as directory:
        start("dsq", Path(directory, "compiles"), tensors)
        runs = [{system: start(system, Path(directory, f"{system}-{number}"), tensors) for system in ("dcp", "dsq")}
                for number in range(rounds)]
    rows = []
    for system in ("dcp", "dsq"):
        parts = {part: [run[system][part] for run in runs] for part in INTERVALS}
        parts["first save beyond the second"] = [
            (first[0] - second[0], first[1] - second[1])
            for first, second in zip(parts["first save"], parts["second save"], strict=True)
        ]
        rows += [{"system": system, "part": part, "seconds": statistics.median(sample[0] for sample in samples),
                  "processor_seconds": statistics.median(sample[1] for sample in samples)}
                 for part, samples in parts.items()]
    return rows


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="processes of each kind")
    parser.add_argument("--tensors", type=int, default=32, help="of 65,536 elements each")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    rows = measure(options.rounds, options.tensors)
    for row in rows:
        print(f"{row['system']:5}{row['part']:30}{row['seconds']:7.3f} s, processor {row['processor_seconds']:7.3f} s")
    if options.json:
        json_files.write(options.json, {
            "measured": "startup", "command": shlex.join(["python", "scripts/measure_startup.py", *sys.argv[1:]]),
            "rounds": options.rounds, "tensors": options.tensors, "processor": processor(), "rows": rows,
        })


if __name__ == "__main__":
    main()
