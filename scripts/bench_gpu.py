"""How fast the GPU's part of a save is: kernels against a copy in device memory, the stall against a copy to the host,
and saves and loads against those of DCP.

    python scripts/bench_gpu.py --json benchmarks/results/gpu-NAME.json

Times are medians by CUDA events. Every kernel goes round several buffers, together larger than the cache, and writes
into outputs that were overwritten before; its bandwidth counts the bytes that it must move, no others. Ceilings are
measured in the same run. What a chunk costs beside its bytes shows in the rows of many small chunks, and of a
transformer's layers: there the time of the host, which queues the work, counts as well. Without a GPU `--device cpu`
runs every line on interpreted kernels; its times mean nothing, and the JSON says so.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import typer
from gpu_saves import Clock, Rows, measure_peers, measure_saves, summary, transformer, whole_layers
from rich.console import Console
from rich.table import Table

from dsq_ckpt.cli import json_files
from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.kernels.backend import Backend, Refinement
from dsq_ckpt.kernels.dispatch import backend_for
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization import device
from dsq_ckpt.quantization.codebook import GroupFit, GroupSketch, fit_group
from dsq_ckpt.quantization.dequantizer import Dequantizer, scale_of
from dsq_ckpt.version import __version__

AIMS = {  # name: (aim, whether more is better)
    "sketch, fp32": (0.6, True),
    "joint sketch, fp32": (0.6, True),
    "quantize, joint table, fp32": (0.5, True),
    "dequantize, fp32": (0.6, True),
    "stall / copy to pinned memory": (0.15, False),
    "stall / copy to pinned memory, 4 refinement bits": (0.3, False),
    "extra device memory, bytes per element": (1.25, False),
    "stall / of dcp.async_save": (1.0, False),
    "save in the background / by dcp.async_save": (0.7, False),
}
BUFFERS = 4
SMALL = 128, 128
"""Shape of a small chunk."""
STEP = Lattice(step=0.5)


def main(
    parameters: int = typer.Option(1_000_000_000, help="Elements of the shard whose save is timed."),
    elements: int = typer.Option(256_000_000, help="Elements of each buffer that kernels are timed on."),
    repeats: int = typer.Option(20, help="Of every kernel; medians are kept."),
    saves: int = typer.Option(5, help="Timed saves, after a keyframe and a delta."),
    chunks: int = typer.Option(1000, help="How many small chunks."),
    width: int = typer.Option(2048, help="Of the transformer; it gets as many layers as --parameters allow."),
    name: str = typer.Option("cuda", "--device", help="Where to run."),
    json_path: Path | None = typer.Option(None, "--json", help="Write the figures there."),
) -> None:
    """Measure, print a table, write JSON."""
    where = torch.device(name)
    if where.type != "cuda":
        device.DEVICES.add(where.type)
    elif where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    rows: Rows = {}
    measure_kernels(where, elements, repeats, rows)
    measure_small(where, chunks, repeats, rows)
    for bits in (0, 4):
        measure_saves(where, whole_layers(parameters), bits, "quantize", saves, rows)
    measure_peers(where, whole_layers(parameters), saves, rows)
    for stage in ("quantize", "copy"):
        how = ", copied" if stage == "copy" else ""
        measure_saves(where, [SMALL] * chunks, 0, stage, saves, rows, f"{chunks} small chunks{how}")
        measure_saves(where, transformer(parameters, width), 0, stage, saves, rows, f"a transformer{how}")
    result = {
        "measured": "gpu" if where.type == "cuda" else "nothing: a trial run on the CPU",
        "command": f"python scripts/bench_gpu.py --parameters {parameters} --elements {elements} --repeats {repeats} "
        f"--saves {saves} --chunks {chunks} --width {width}",
        "machine": {
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else platform.processor(),
            "system": platform.platform(),
        },
        "versions": {"dsq_ckpt": __version__, "torch": torch.__version__, "triton": _triton_version()},
        "date": time.strftime("%Y-%m-%d"), "rows": rows,
    }
    table = Table(title=f"{result['machine']['device']}: {result['measured']}")  # type: ignore[index]
    table.add_column("figure")
    for column in ("median", "min", "max", "aim"):
        table.add_column(column, justify="right")
    for key, row in rows.items():
        aim = "" if key not in AIMS else f"{'≥' if AIMS[key][1] else '≤'} {AIMS[key][0]:g}"
        table.add_row(key, *(f"{row[part]:.3g}" for part in ("median", "min", "max")), aim)
    Console(width=120).print(table)
    if json_path is not None:
        json_files.write(json_path, result)


def measure_kernels(where: torch.device, n: int, repeats: int, rows: Rows) -> None:
    """Share of the copy bandwidth that each kernel reaches."""
    clock, backend = Clock(where), _backend(where)
    generator = torch.Generator(where).manual_seed(0)
    before = [torch.randn(n, generator=generator, device=where) * 0.02 for _ in range(BUFFERS)]
    after = [x + torch.randn(n, generator=generator, device=where) * 0.002 for x in before]
    floats = [torch.empty_like(x) for x in before]
    bytes_ = [[torch.empty(n, dtype=torch.uint8, device=where) for _ in range(BUFFERS)] for _ in range(3)]
    previous, codes, symbols = bytes_
    first = _fitted(backend, before[0], None, None)
    for x, out in zip(before, previous, strict=True):
        _quantize(backend, first, x, None, out)
    second = _fitted(backend, after[0], previous[0], first)
    for x, old, out, symbol in zip(after, previous, codes, symbols, strict=True):
        _quantize(backend, second, x, old, out, symbol)
    window, book = second.window, second.codebook
    table = torch.from_numpy(second.table).to(where)
    counts = torch.zeros(FULL.size, dtype=torch.int64, device=where)
    joint = torch.zeros(second.table.shape, dtype=torch.int64, device=where)
    halves = [x.bfloat16() for x in after]
    protected = torch.empty(0, dtype=torch.float32, device=where)

    def place(i: int) -> Refinement:
        return _refinement(second, symbols[i])

    levels, low, width, sign = Dequantizer(book, 0.0, 4).tables(where)
    symbol_mask = [symbol.remainder_(16) for symbol in symbols]
    last = second.table.shape[0] - 1
    work: dict[str, tuple[float, Callable[[int], object]]] = {  # bytes per element that must move, what to run
        "copy": (8, lambda i: floats[i].copy_(after[i])),
        "sketch, fp32": (4, lambda i: backend.sketch(after[i], FULL.lo, FULL.hi, 1.0, counts)),
        "sketch, bf16": (2, lambda i: backend.sketch(halves[i], FULL.lo, FULL.hi, 1.0, counts)),
        "joint sketch, fp32": (5, lambda i: backend.joint_sketch(
            after[i], previous[i], last, window.lo, window.hi, 1.0, joint)),
        "quantize, one row, fp32": (5, lambda i: backend.quantize(
            after[i], None, last, window.lo, window.hi, 1.0, table, codes[i])),
        "quantize, joint table, fp32": (6, lambda i: backend.quantize(
            after[i], previous[i], last, window.lo, window.hi, 1.0, table, codes[i])),
        "quantize, joint table, bf16": (4, lambda i: backend.quantize(
            halves[i], previous[i], last, window.lo, window.hi, 1.0, table, codes[i])),
        "quantize and refine, joint table, fp32": (7, lambda i: backend.quantize(
            after[i], previous[i], last, window.lo, window.hi, 1.0, table, codes[i], place(i))),
        "dequantize, fp32": (5, lambda i: backend.dequantize(codes[i], levels, 1.0, -1, protected, floats[i])),
        "dequantize, 4 refinement bits, fp32": (6, lambda i: backend.dequantize_refined(
            codes[i], symbol_mask[i], 4, low, width, sign, levels, 1.0, -1, protected, False, floats[i])),
        "pack, 4 bits": (1.5, lambda i: backend.pack(symbol_mask[i], 4)),
        "changed_codes": (2, lambda i: backend.find_changes(codes[i], previous[i], n // 8)),
    }
    rounds = itertools.cycle(range(BUFFERS))
    bandwidth: dict[str, list[float]] = {}
    for key, (size, run) in work.items():
        run(next(rounds))  # compiled now
        seconds = []
        for _ in range(repeats):
            at = next(rounds)
            floats[at].fill_(float("nan"))
            if key.startswith("quantize"):
                codes[at].fill_(255)
            seconds.append(clock.time(partial(run, at)))
        if key.startswith("quantize"):  # poisoned outputs must be gone before others read them
            for i in range(BUFFERS):
                backend.quantize(after[i], previous[i], last, window.lo, window.hi, 1.0, table, codes[i])
        bandwidth[key] = [size * n / second / 1e9 for second in seconds]
    backend.check()
    ceiling = statistics.median(bandwidth["copy"])
    rows["device copy, GB/s read and written"] = summary(bandwidth.pop("copy"))
    for key, values in bandwidth.items():
        rows[key] = summary([value / ceiling for value in values])
        rows[f"{key}, GB/s"] = summary(values)


def measure_small(where: torch.device, chunks: int, repeats: int, rows: Rows) -> None:
    """Measure the time of kernels for each of many small chunks."""
    clock, backend, n = Clock(where), _backend(where), math.prod(SMALL)
    generator = torch.Generator(where).manual_seed(2)
    before = torch.randn(chunks, n, generator=generator, device=where) * 0.02
    after = before + torch.randn(chunks, n, generator=generator, device=where) * 0.002
    previous, codes = (torch.empty(chunks, n, dtype=torch.uint8, device=where) for _ in range(2))
    first = _fitted(backend, before.view(-1), None, None)
    _quantize(backend, first, before.view(-1), None, previous.view(-1))
    second = _fitted(backend, after.view(-1), previous.view(-1), first)
    window, last = second.window, second.table.shape[0] - 1
    table = torch.from_numpy(second.table).to(where)
    counts = torch.zeros(FULL.size, dtype=torch.int64, device=where)
    joint = torch.zeros(second.table.shape, dtype=torch.int64, device=where)
    target = torch.empty_like(after)
    tallies: list[torch.Tensor | None] = [None] * chunks

    def quantized(i: int) -> None:
        tallies[i] = backend.quantize(
            after[i], previous[i], last, window.lo, window.hi, 1.0, table, codes[i],
            protected_code=second.codebook.protected,
        )

    work: dict[str, Callable[[int], object]] = {
        "copy": lambda i: target[i].copy_(after[i]),
        "sketch": lambda i: backend.sketch(after[i], FULL.lo, FULL.hi, 1.0, counts),
        "joint sketch": lambda i: backend.joint_sketch(
            after[i], previous[i], last, window.lo, window.hi, 1.0, joint),
        "quantize, joint table": quantized,
        "gather protected": lambda i: backend.gather_protected(
            after[i], codes[i], second.codebook.protected, tallies[i], capacity=n),
        "changed_codes": lambda i: backend.find_changes(codes[i], previous[i], n // 8),
    }
    for key, run in work.items():
        run(0)  # compiled now
        seconds = [clock.time(lambda: [run(i) for i in range(chunks)]) for _ in range(repeats)]  # noqa: B023
        rows[f"{key}, µs for each of {chunks} small chunks"] = summary([value * 1e6 / chunks for value in seconds])
    backend.check()


def _backend(where: torch.device) -> Backend:
    if where.type == "cuda":
        return backend_for(where)
    interpreted: Backend = import_module("dsq_ckpt.triton_kernels.backend").TritonBackend(where)
    return interpreted


def _fitted(backend: Backend, x: torch.Tensor, parent: torch.Tensor | None, before: GroupFit | None) -> GroupFit:
    window = FULL if before is None else before.codebook.window
    rows = 1 if before is None else before.codebook.symbols + 1
    counts = torch.zeros((rows, window.size), dtype=torch.int64, device=x.device)
    backend.joint_sketch(x, parent, rows - 1, window.lo, window.hi, 1.0 / scale_of(0.0), counts)
    sketch = GroupSketch(counts.cpu().numpy(), window)
    return fit_group(sketch, STEP, None if before is None else before.codebook, 4)


def _refinement(fitted: GroupFit, symbols: torch.Tensor) -> Refinement:
    low, inverse = (torch.from_numpy(part).to(symbols.device) for part in fitted.cells)
    return Refinement(low, inverse, 4, False, symbols)


def _quantize(
    backend: Backend, fitted: GroupFit, x: torch.Tensor, parent: torch.Tensor | None, codes: torch.Tensor,
    symbols: torch.Tensor | None = None,
) -> None:
    table = torch.from_numpy(fitted.table).to(x.device)
    refinement = None if symbols is None else _refinement(fitted, symbols)
    backend.quantize(
        x, parent, table.shape[0] - 1, fitted.window.lo, fitted.window.hi, 1.0, table, codes, refinement
    )


def _triton_version() -> str:
    return str(import_module("triton").__version__)


if __name__ == "__main__":
    typer.run(main)
