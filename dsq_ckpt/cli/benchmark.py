"""`dsq bench`: kernels compared with memcpy, and saves and loads compared with those of DCP, on this machine.

Every figure is a median with its spread. The peer is measured in the same run, since ratios are less noisy than times.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from dsq_ckpt import kernels
from dsq_ckpt.api import loading
from dsq_ckpt.api import saving as api
from dsq_ckpt.cli.bench_coding import COUNT, STREAMS, coding_benchmarks
from dsq_ckpt.cli.bench_stall import STALL, measure_stalls
from dsq_ckpt.cli.machine import processor
from dsq_ckpt.codebooks.algorithms.exact_kmeans import exact_kmeans
from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.coding import RansCoder, coder_path
from dsq_ckpt.coding.codes import quantize
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.codebook import GroupSketch, fit_group
from dsq_ckpt.storage.description import describe
from dsq_ckpt.version import __version__

_TARGETS = {  # name: (target, True if more is better)
    "sketch / memcpy": (0.4, True),
    "joint sketch / memcpy": (0.3, True),
    "table quantize / memcpy": (0.3, True),
    "k-means, all k to 32, 3000 buckets, ms": (50.0, False),
    "save keyframe / dcp.save": (0.7, False),
    "save delta / dcp.save": (0.7, False),
    "load keyframe / dcp.load": (0.6, False),
    "load after 8 deltas / dcp.load": (1.0, False),
    "load after 32 deltas / dcp.load": (2.0, False),
    "load keyframe, cold / dcp.load, cold": (1.0, False),
    "save memory / fp32 bytes": (0.6, False),
    f"{STALL} / of dcp.async_save": (1.0, False),
}

_DEPTHS = (4, 8, 32)
"""Numbers of deltas before a load, measured for weights alone; `delta.max_chain: auto` has four at most."""

_CODER_TARGETS = {  # for coders with vector instructions
    "rANS encode, G codes/s": (0.6, True),
    "rANS decode, G codes/s": (0.8, True),
    **{f"encode, {name}, G codes/s": (0.6, True) for name in STREAMS},
    **{f"decode, {name}, G codes/s": (0.8, True) for name in STREAMS},
}


_COPIES = 4
"""States in memory at once: the saved state, a later state, a state to load into, and the copy of an async save."""


def run_bench(
    parameters: int, threads: int, directory: Path, moments: bool = True, repeats: int = 5, stall_only: bool = False
) -> dict[str, Any]:
    """Run all benchmarks; return medians, spreads and the machine, as JSON data.

    Args:
        parameters: size of the model; with `moments` the state has three times as many elements.
        threads: worker threads of saves and loads; 0 for the number that a save would choose.
        directory: directory of the checkpoints, on the disk to be measured.
        moments: also measure a state with Adam's moments, if there is enough memory.
        repeats: runs per figure.
        stall_only: only measure the stall of training by asynchronous saves.
    """
    rows: dict[str, dict[str, float]] = {}
    if not stall_only:
        _measure_kernels(min(parameters, 25_000_000), repeats, rows)
        _measure_coding(max(repeats, 15), rows)
        _measure_clustering(repeats, rows)
    left_out = ""
    for with_moments in (False, True) if moments else (False,):
        needed, available = _COPIES * 4 * parameters * (3 if with_moments else 1), _available_memory()
        if needed > available:
            skipped = "weights + moments" if with_moments else "all saves"
            left_out = f"{skipped}, which need {needed / 2**30:.1f} GiB of memory of {available / 2**30:.1f} left"
            break
        if not stall_only:
            _measure_checkpoints(parameters, with_moments, threads, directory, repeats, rows)
        _measure_stalls(parameters, with_moments, threads, directory, repeats, rows)
    return {
        "parameters": parameters, "threads": threads or DSQConfig().storage.thread_count(), "rows": rows,
        **({"left_out": left_out} if left_out else {}),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "coder": coder_path(),
        "versions": {"dsq_ckpt": __version__, "torch": torch.__version__, "numpy": np.__version__},
        "date": time.strftime("%Y-%m-%d"),
    }


def print_bench(result: dict[str, Any], console: Console) -> None:
    """Print the result as a table."""
    table = Table(title=f"dsq bench: {result['parameters']:,} parameters, {result['threads']} thread(s)")
    table.add_column("figure")
    for name in ("median", "min", "max", "aim"):
        table.add_column(name, justify="right")
    targets = _TARGETS | (_CODER_TARGETS if result["coder"].startswith("avx") else {})
    for name, row in result["rows"].items():
        target = targets.get(name.removesuffix(" (weights + moments)"))
        aim = "" if target is None else f"{'≥' if target[1] else '≤'} {target[0]:g}"
        table.add_row(name, *(f"{row[key]:.3g}" for key in ("median", "min", "max")), aim)
    console.print(table)
    if "left_out" in result:
        console.print(f"left out: {result['left_out']}")


def _measure_kernels(count: int, repeats: int, rows: dict[str, dict[str, float]]) -> None:
    rng = np.random.default_rng(0)
    before = rng.normal(0, 0.02, count).astype(np.float32)
    after = before + rng.normal(0, 0.005, count).astype(np.float32)  # about 0.7 bits per code, as early in training
    target, codes, parent = np.empty_like(after), np.empty(count, np.uint8), np.empty(count, np.uint8)
    counts = np.zeros((1, FULL.size), np.int64)
    kernels.sketch(before, FULL.lo, FULL.hi, 1.0, counts[0])
    first = fit_group(GroupSketch(counts, FULL), Lattice(step=0.5), None)
    quantize(before, None, 0, FULL, 1.0, first.table, parent)
    window, symbols = first.codebook.window, first.codebook.symbols
    joint = np.zeros((symbols + 1, window.size), np.int64)
    kernels.joint_sketch(after, parent, symbols, window.lo, window.hi, 1.0, joint)
    second = fit_group(GroupSketch(joint, window), Lattice(step=0.5), first.codebook)
    quantize(after, parent, symbols, window, 1.0, second.table, codes)
    coder, first_coder = RansCoder.fit(second.counts), RansCoder.fit(first.counts)
    data, keyframe = coder.encode(codes, parent), first_coder.encode(parent, None)
    decoded = np.empty_like(codes)
    single, scratch = np.zeros(FULL.size, np.int64), np.zeros_like(joint)
    work: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, after),
        "sketch": lambda: kernels.sketch(after, FULL.lo, FULL.hi, 1.0, single),
        "joint sketch": lambda: kernels.joint_sketch(after, parent, symbols, window.lo, window.hi, 1.0, scratch),
        "table quantize": lambda: quantize(after, parent, symbols, window, 1.0, second.table, codes),
        "rANS encode": lambda: coder.encode(codes, parent),
        "rANS decode": lambda: coder.decode(data, parent, decoded),
        "rANS encode, keyframe": lambda: first_coder.encode(parent, None),
        "rANS decode, keyframe": lambda: first_coder.decode(keyframe, None, decoded),
    }
    seconds = _measure_interleaved(work, repeats)
    rows["memcpy, G elements/s"] = _summarize([count / s / 1e9 for s in seconds["memcpy"]])
    for name in ("sketch", "joint sketch", "table quantize"):
        rows[f"{name} / memcpy"] = _summarize([a / b for a, b in zip(seconds["memcpy"], seconds[name], strict=True)])
    for name in ("rANS encode", "rANS decode", "rANS encode, keyframe", "rANS decode, keyframe"):
        rows[f"{name}, G codes/s"] = _summarize([count / s / 1e9 for s in seconds[name]])
    rows["bits per code, delta"] = _summarize([8 * len(data) / count])
    rows["bits per code, keyframe"] = _summarize([8 * len(keyframe) / count])


def _measure_coding(repeats: int, rows: dict[str, dict[str, float]]) -> None:
    work, bits = coding_benchmarks()
    for name, seconds in _measure_interleaved(work, repeats).items():
        rows[f"{name}, G codes/s"] = _summarize([COUNT / s / 1e9 for s in seconds])
    for name, value in bits.items():
        rows[f"bits per code, {name}"] = _summarize([value])


def _measure_clustering(repeats: int, rows: dict[str, dict[str, float]]) -> None:
    rng = np.random.default_rng(0)
    points = np.sort(rng.normal(size=3000))
    weights = np.exp(-points**2 / 2) * 1e5
    seconds = _measure_interleaved({"k-means": lambda: exact_kmeans(points, weights, 32)}, repeats)
    rows["k-means, all k to 32, 3000 buckets, ms"] = _summarize([1e3 * s for s in seconds["k-means"]])


def _measure_checkpoints(
    parameters: int, moments: bool, threads: int, directory: Path, repeats: int, rows: dict[str, dict[str, float]]
) -> None:
    suffix = " (weights + moments)" if moments else ""
    config = DSQConfig().with_values(**{"storage.threads": threads})
    state = synthetic_state(parameters, moments)
    drifted = drift(state, 1)
    targets = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    fp32 = sum(tensor.numel() for tensor in state.values()) * 4
    directory.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {}
    memory = []
    with tempfile.TemporaryDirectory(dir=directory) as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = Path(scratch)
        if not moments:
            _save_chain(state, root / "chain", config)
        for number in range(repeats + 1):  # the first round warms caches and compiles kernels
            # Nothing is deleted in between, since a training run also writes to unused blocks of the disk.
            plain, run = root / f"dcp-{number}", root / f"dsq-{number}"
            history = SaveHistory()
            dcp_load = partial(dcp.load, targets, storage_reader=dcp.FileSystemReader(plain), no_dist=True)
            timed: dict[str, Callable[[], object]] = {
                "dcp.save": partial(
                    dcp.save, state, storage_writer=dcp.FileSystemWriter(plain, sync_files=True), no_dist=True
                ),
                "save keyframe": partial(api.save, state, run / "key", config=config, no_dist=True, history=history),
                "dcp.load": dcp_load,
                "load keyframe": partial(loading.load, targets, run / "key", no_dist=True, history=history),
                "save delta": partial(api.save, drifted, run / "delta", config=config, no_dist=True, history=history),
                "dcp.load, cold": dcp_load,
                "load keyframe, cold": partial(loading.load, targets, run / "key", no_dist=True, history=history),
            }
            for depth in () if moments else _DEPTHS:
                timed[f"load after {depth} deltas"] = partial(
                    loading.load, targets, root / "chain" / f"{depth:02d}", no_dist=True, history=SaveHistory()
                )
            for name, work in timed.items():
                os.sync()
                if name.endswith("cold"):
                    _evict_page_cache(root)
                _resident_peak(reset=True)
                resident = _resident_bytes()
                seconds.setdefault(name, []).append(_time_call(work))
                if name == "save delta":  # the parent's codes were resident before: one byte per element
                    memory.append((_resident_peak(reset=False) - resident + fp32 / 4) / fp32)
            if number == 0:
                rows["ratio of a keyframe" + suffix] = _summarize([_compression_ratio(run / "key")])
                rows["ratio of a delta" + suffix] = _summarize([_compression_ratio(run / "delta")])
    for name, peer in (
        ("save keyframe", "dcp.save"), ("save delta", "dcp.save"), ("load keyframe", "dcp.load"),
        ("load keyframe, cold", "dcp.load, cold"), *((f"load after {n} deltas", "dcp.load") for n in _DEPTHS),
    ):
        if name not in seconds:
            continue
        ratios = [a / b for a, b in zip(seconds[name][1:], seconds[peer][1:], strict=True)]
        rows[f"{name} / {peer}{suffix}"] = _summarize(ratios)
    for name in seconds:
        rows[f"{name}, s{suffix}"] = _summarize(seconds[name][1:])
    rows[f"save memory / fp32 bytes{suffix}"] = _summarize(memory[1:])


def _measure_stalls(
    parameters: int, moments: bool, threads: int, directory: Path, repeats: int, rows: dict[str, dict[str, float]]
) -> None:
    state = synthetic_state(parameters, moments)
    config = DSQConfig().with_values(**{"storage.threads": threads})
    directory.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = measure_stalls((state, drift(state, 1)), config, directory, repeats)
    suffix = " (weights + moments)" if moments else ""
    rows.update({name + suffix: _summarize(values) for name, values in measured.items()})


def synthetic_state(parameters: int, moments: bool) -> dict[str, torch.Tensor]:
    """Return a transformer-shaped state of about `parameters` realistic weights: matrices, an embedding, norms."""
    width = max(64, int((parameters / (12 * 8 + 64)) ** 0.5) // 64 * 64)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (64 * width, width)}
    layer = 0
    while sum(int(np.prod(shape)) for shape in shapes.values()) + 12 * width * width <= parameters:
        for name, rows_, columns in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes[f"layers.{layer}.{name}.weight"] = (rows_ * width, columns * width)
        shapes[f"layers.{layer}.norm.weight"] = (width,)
        layer += 1
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        scale = 0.02 * 2 ** (0.5 * float(torch.randn((), generator=generator)))
        state[f"model.{name}"] = torch.empty(shape).normal_(0, scale, generator=generator)
        if moments:
            first = torch.empty(shape).normal_(0, 1e-3, generator=generator)
            spread = torch.empty(shape).normal_(0, 1.5, generator=generator).exp_()
            state[f"optimizer.state.{name}.exp_avg"] = first * spread.sqrt()
            state[f"optimizer.state.{name}.exp_avg_sq"] = spread * 1e-5
    return state


def _save_chain(state: dict[str, torch.Tensor], run: Path, config: DSQConfig) -> None:
    """Save a keyframe, and the deltas of the longest measured chain."""
    history = SaveHistory()
    for number in range(max(_DEPTHS) + 1):
        api.save(state, run / f"{number:02d}", config=config, no_dist=True, history=history)
        state = drift(state, number)


def drift(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return the state some hundred steps later: weights changed by a 20th of their size, moments half renewed.

    Codes of weights then take 0.3 bits each, as in recorded runs.
    """
    generator = torch.Generator().manual_seed(seed)
    later = {}
    for name, tensor in state.items():
        noise = torch.empty(tensor.shape).normal_(0, 1, generator=generator)
        if name.endswith("exp_avg_sq"):
            later[name] = tensor * (0.3 * noise).exp_()
        elif name.endswith("exp_avg"):
            later[name] = 0.7 * tensor + noise.mul_(0.7 * tensor.std())
        else:
            later[name] = tensor + noise.mul_(0.05 * tensor.std())
    return later


def _compression_ratio(path: Path) -> float:
    sizes = describe(path)
    return float(sizes["bytes_logical"] / sizes["bytes_written"])


def _measure_interleaved(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Measure the seconds of each function after a warm-up, alternating, so that a slow moment affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(repeats + 1):
        for name, run in work.items():
            elapsed = _time_call(run)
            if number:
                seconds[name].append(elapsed)
    return seconds


def _time_call(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _summarize(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _evict_page_cache(root: Path) -> None:
    """Evict the files from the page cache, as after a restart. Caches of the disk itself are not affected."""
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _available_memory() -> float:
    """Return the bytes of memory available to this process or its container; infinite if unknown."""
    available = math.inf
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # "max" means no limit; in a container the group is the root
        group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip())
        used = int((group / "memory.current").read_text())
        available = min(available, int((group / "memory.max").read_text()) - used)
    return available


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _resident_peak(reset: bool) -> int:
    """Return the high-water mark of resident memory in bytes (Linux); with `reset`, set it back first."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
