"""Bits that a trellis saves on the weights of recorded runs, and other reasons why differences can be smaller.

    python scripts/measure_trellis.py llama --json trellis-llama.json
    python scripts/measure_trellis.py gpt-short --units today half --checkpoints 5 --json trellis-gpt-short.json

`scripts/evaluate.py record` makes the runs. Each is saved with two steps of the lattice (`dsq` in the rows), which
gives the weights that are quantized and the unit of the step of each. Then their levels are chosen anew: on the lattice
itself (`values`), as differences to the last reconstruction in the same steps (`differences`), and as differences by
two quantizers between which the parities of levels switch, with 4 and 8 states (`trellis`). Units are those of each
checkpoint (`today`) or of the first one (`kept`), or `half`: the geometric mean of `kept` and its mean over all
weights, as with half the strength of the gradients.

Bits are those of an ideal adaptive coder per weight, whose contexts are the group, the last code and the quantizer;
with `neighbours` also the two weights before, and whether the last checkpoint changed the weight. Distortion is in
squared units of each checkpoint; it and degradation are means over deltas. Rows of `versus` compare the bits of deltas
with those of `values` at equal distortion, that of `dsq`, and at equal degradation, each system at its best price of a
bit.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from evaluation import create
from evaluation.recording import default_directory, load_recording
from evaluation.replay import save_recorded
from evaluation.trellis import MACHINES, REACH, Counts, Tensor, choose, encode, fix_units

import dsq_ckpt
from dsq_ckpt.api.compressor import fractions_of
from dsq_ckpt.cli import json_files
from dsq_ckpt.cli.machine import processor
from dsq_ckpt.core.arrays import F64
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.kernels import cpu
from dsq_ckpt.kernels.keys import KeyWindow
from dsq_ckpt.quantization.dequantizer import scale_of
from dsq_ckpt.quantization.plan import plan_as_configured
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import ContainerReader
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.record_fields import get_exponent

Row = dict[str, Any]
STEPS = (2.8, 2.0)
PRICES = {
    0.003: (2.8, 4.0, 5.6), 0.01: (1.4, 2.0, 2.8, 4.0, 5.6), 0.03: (1.4, 2.0, 2.8), 0.1: (1.4, 2.0, 2.8),
    0.2: (1.0, 1.4, 2.0),
}
"""Squared steps that a bit is worth to the steps to try: a higher price widens the cell of zero."""
LOW = 0.05
"""Higher prices spend least at a distortion, never at a degradation: the model is not evaluated with them."""
FINER = 2**0.5  # steps of a trellis are so much larger, at about equal distortion
SYSTEMS = (
    ("values", "today", 1, False), ("differences", "today", 1, False), ("trellis", "today", 4, False),
    ("trellis", "today", 8, False), ("differences", "kept", 1, False), ("trellis", "kept", 8, False),
    ("differences", "half", 1, False), ("trellis", "half", 8, False), ("differences", "half", 1, True),
)
DEGRADATIONS = (0.03, 0.006)
"""About the means that bounds of 5 and 1 % on each checkpoint end with."""


class Point(NamedTuple):
    """A checkpoint as `dsq` saved it: its quantized weights, their bits with models, and what they decode to."""

    tensors: list[Tensor]
    bits: int
    decoded: dict[str, F64]


def save_run(workload: str, step: float, most: int) -> Iterator[Point]:
    """Save a recorded run with a fixed step, and yield its checkpoints after step 0, `most` of them."""
    run = create(workload)
    config = dsq_ckpt.DSQConfig.model_validate(
        {"quantize": {"weights": {"codebook": {"step": step}}}, "storage": {"fsync": False}}
    )
    history, fractions = dsq_ckpt.SaveHistory(), fractions_of(config)
    with tempfile.TemporaryDirectory() as name:
        for checkpoint in list_checkpoints(workload, most):
            path = Path(name) / f"{checkpoint['step']:06d}"
            saved = save_recorded(run, checkpoint, path, config, plan_as_configured, fractions, history=history)
            tensors, decoded, bits = [], {}, saved.codes.codes
            manifest = Manifest.read(path)
            with Checkpoint(path) as opened, Workers(1, config.storage.block_elements) as workers:
                references = {key.fqn: reference for key, reference in opened.iter_chunks()}
                [own] = [file.name for file in manifest.files if file.role == "own"]
                reader = ContainerReader(path / own)
                reader.close()
                for group, entry in reader.contents["groups"].items():
                    bits += 8 * entry["model"][1] if group.startswith("weights/") else 0
                for record in reader.contents["records"]:
                    fqn = record["fqn"]
                    if record["type"] == "coded" and record["group"].startswith("weights/"):
                        unit = manifest.groups[record["group"]].step * scale_of(get_exponent(record)) / step
                        values = checkpoint["model"][fqn.removeprefix("model.")]
                        tensors.append(Tensor(fqn, record["group"], _flat(values), unit))
                        decoded[fqn] = _flat(opened.decode_tensor(references[fqn], False, workers))
            yield Point(tensors, bits, decoded)


def list_checkpoints(workload: str, most: int) -> Iterator[Any]:
    """Yield the recorded checkpoints after step 0, `most` of them."""
    for number, checkpoint in enumerate(load_recording(default_directory(workload, 0)).checkpoints):
        if number and number <= most:
            yield checkpoint


def interpolate(rows: Sequence[Row], key: str, target: float) -> float | None:
    """Return the least bits at which a system has this distortion or degradation, between steps of the same price."""
    found = []
    for price in {row["price"] for row in rows}:
        line = sorted((row for row in rows if row["price"] == price), key=lambda row: row["step"])
        for low, high in pairwise(line):
            if low[key] is not None and low[key] < target <= high[key]:
                share = (target - low[key]) / (high[key] - low[key])
                found.append(float(np.exp((1 - share) * np.log(low["bits"]) + share * np.log(high["bits"]))))
    return min(found, default=None)


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return what systems save of `values` and of `differences`, at distortions of `dsq` and at fixed degradations."""
    systems: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["system"] != "dsq":
            systems.setdefault(tuple(row[key] for key in ("system", "units", "states", "neighbours")), []).append(row)
    targets = [("distortion", row["distortion"]) for row in rows if row["system"] == "dsq"]
    targets += [("degradation", target) for target in DEGRADATIONS]
    compared = []
    for key, target in targets:
        found = {system: interpolate(own, key, target) for system, own in systems.items()}
        for (system, units, states, neighbours), bits in found.items():
            others = ("values", "today", 1, False), ("differences", units, 1, neighbours)
            saved = [1 - bits / other if bits and (other := found.get(name)) else None for name in others]
            compared.append({
                "run": rows[0]["run"], "at": key, "target": target, "system": system, "units": units, "states": states,
                "neighbours": neighbours, "bits": bits, "saved": saved[0], "saved_of_differences": saved[1],
            })
    return compared


def time_choices(tensors: Sequence[Tensor]) -> list[Row]:
    """Return ns per weight of the pass that `dsq` chooses codes by, and of trellises, on one thread."""
    values = np.concatenate([tensor.values / tensor.unit for tensor in tensors])
    window, codes, floats = KeyWindow(7744, 8464), np.empty(values.size, np.uint8), values.astype(np.float32)
    parent, table = np.zeros(values.size, np.uint8), np.zeros((2, window.size), np.uint8)
    context, levels = np.full(values.size, 2 * REACH), np.empty(values.size, np.int64)
    rates = Counts.guess().bits()
    works = {"dsq": partial(cpu.quantize, floats, parent, 1, window.lo, window.hi, 1.0, table, codes)}
    for states, machine in MACHINES.items():
        target = values / STEPS[0]
        works[f"states: {states}"] = partial(choose, target, context, False, *machine, *rates, 0.03, levels)
    rows = []
    for name, work in works.items():
        times = []
        for _ in range(6):  # the first compiles
            began = time.thread_time()
            work()
            times.append(time.thread_time() - began)
        rows.append({"choice": name, "ns": 1e9 * min(times) / values.size})
    return rows


def measure(
    workload: str, steps: Sequence[float], most: int, units: Sequence[str], report: Callable[[Row], None]
) -> list[Row]:
    """Return a row for each system, step and price; `report` is called with each."""
    run, rows = create(workload), list[Row]()
    kept = [{key: checkpoint[key] for key in ("model", "loss")} for checkpoint in list_checkpoints(workload, most)]
    saved = {step: list(save_run(workload, step, most)) for step in steps}
    today = [point.tensors for point in saved[steps[0]]]
    sizes = [sum(tensor.values.size for tensor in tensors) for tensors in today]

    def note(made: Sequence[tuple[float, dict[str, F64]]], **labels: Any) -> None:
        bits, worse, distortion = [each for each, _ in made], [], []
        for checkpoint, (_, values), tensors, size in zip(kept, made, today, sizes, strict=True):
            squares = (np.square((values[t.name] - t.values) / t.unit).sum() for t in tensors)
            distortion.append(float(sum(squares)) / size)
            if labels["price"] > LOW:
                continue
            state = dict(checkpoint["model"])
            for name, value in values.items():
                name = name.removeprefix("model.")
                state[name] = torch.from_numpy(value).to(state[name].dtype).reshape(state[name].shape)
            run.model.load_state_dict(state)
            worse.append(run.evaluate() / checkpoint["loss"] - 1)
        rows.append({
            "run": workload, **labels, "bits_keyframe": bits[0], "bits": statistics.mean(bits[1:]),
            "distortion": statistics.mean(distortion[1:]), "degradation": statistics.mean(worse[1:]) if worse else None,
            "degradation_max": max(worse[1:], default=None),
        })
        report(rows[-1])

    for step, points in saved.items():
        made = [(point.bits / size, point.decoded) for point, size in zip(points, sizes, strict=True)]
        note(made, system="dsq", units="today", states=1, neighbours=False, step=step, price=0.02)
    series = {"today": today, "kept": fix_units(today, 1.0), "half": fix_units(today, 0.5)}
    for system, which, states, neighbours in SYSTEMS:
        for price, tried in PRICES.items():
            if which not in units or (price > LOW and which != "today"):
                continue
            for step in tried if len(steps) > 1 else steps:
                wide = step * (FINER if states > 1 else 1)
                made = list(encode(series[which], wide, price, states, system == "values", neighbours))
                note(made, system=system, units=which, states=states, neighbours=neighbours, step=wide, price=price)
    return rows


def _flat(tensor: torch.Tensor) -> F64:
    return tensor.numpy().reshape(-1).astype(np.float64)


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", help="of scripts/evaluate.py, recorded with seed 0")
    parser.add_argument("--steps", type=float, nargs="+", default=list(STEPS), help="of `dsq`; one: of all systems")
    parser.add_argument("--checkpoints", type=int, default=1000, help="after step 0, how many at most")
    parser.add_argument("--units", nargs="+", default=["today", "kept", "half"], choices=["today", "kept", "half"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, versus, times = list[Row](), list[Row](), list[Row]()
    for workload in arguments.workloads:
        own = measure(workload, arguments.steps, arguments.checkpoints, arguments.units, partial(print, flush=True))
        rows, versus = rows + own, versus + compare(own)
        [first] = save_run(workload, arguments.steps[0], 1)
        times += [{"run": workload, **row} for row in time_choices(first.tensors)]
    result = {"versus": versus, "times": times}
    print(json_files.dumps(result), end="")
    if arguments.json is not None:
        command = shlex.join(["python", *sys.argv])
        about = {"command": command, "measured": "trellis", "machine": processor()}
        json_files.write(arguments.json, about | {"rows": rows} | result)


if __name__ == "__main__":
    main()
