"""Saves and loads of a state on a GPU, timed: for `bench_gpu.py`."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt

Rows = dict[str, dict[str, float]]


class Clock:
    """Times of queued work in seconds, by events on a GPU."""

    def __init__(self, where: torch.device) -> None:
        self._cuda = where.type == "cuda"

    def time(self, work: Callable[[], object]) -> float:
        """Measure the time from an idle device until all operations that `work` queued are done."""
        if not self._cuda:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000)  # meanwhile the host queues: launches are not what is measured
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def summary(values: list[float]) -> dict[str, float]:
    """Return median and range of what was measured."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def whole_layers(parameters: int) -> list[tuple[int, ...]]:
    """Return shapes of a few large tensors."""
    return [(parameters // 512, 64)] * 8


def transformer(parameters: int, width: int) -> list[tuple[int, ...]]:
    """Return shapes of a transformer's layers, including norms and biases, with at most so many parameters."""
    layer = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]
    return layer * max(1, parameters // sum(math.prod(shape) for shape in layer))


def measure_saves(
    where: torch.device, shapes: list[tuple[int, ...]], bits: int, stage: str, saves: int, rows: Rows, name: str = "",
) -> None:
    """Measure the stall of the training thread, and device memory, of asynchronous saves in the steady state.

    Args:
        where: device of the state.
        shapes: of its tensors.
        bits: of refinement.
        stage: what training waits for, as `storage.stage`.
        saves: timed saves.
        rows: filled.
        name: of the rows, after a comma.
    """
    clock, cuda = Clock(where), where.type == "cuda"
    suffix = (f", {bits} refinement bits" if bits else "") + (f", {name}" if name else "")
    generator = torch.Generator(where).manual_seed(1)
    state = _weights(shapes, generator)
    parameters = sum(x.numel() for x in state.values())
    host = [torch.empty(x.shape, pin_memory=cuda) for x in state.values()]

    def plain(targets: list[torch.Tensor]) -> None:
        for x, target in zip(state.values(), targets, strict=True):
            target.copy_(x, non_blocking=True)

    plain(host)
    copies = [clock.time(partial(plain, host)) for _ in range(saves)]
    del host
    settings = {"quantize": {"weights": {"refinement_bits": bits}}, "storage": {"stage": stage}}
    config = dsq_ckpt.DSQConfig.create(settings)
    stalls, background, extra = [], [], []
    with tempfile.TemporaryDirectory() as run:
        history = dsq_ckpt.SaveHistory()
        base = torch.cuda.memory_allocated(where) if cuda else 0
        for number in range(saves + 2):
            if cuda:
                torch.cuda.reset_peak_memory_stats(where)
            pending: list[Any] = []
            path = Path(run) / f"step-{number:06d}"
            save = partial(dsq_ckpt.async_save, state, path, config=config, history=history)
            stall = clock.time(lambda: pending.append(save()))  # noqa: B023
            started = time.perf_counter()
            pending[0].result()
            if number >= 2:
                stalls.append(stall)
                background.append(time.perf_counter() - started)
                extra.append((torch.cuda.max_memory_allocated(where) - base) / parameters if cuda else 0.0)
            _step(state, generator)
    ceiling = statistics.median(copies)
    rows[f"copy to pinned memory, s{suffix}"] = summary(copies)
    rows[f"stall, s{suffix}"] = summary(stalls)
    rows[f"stall, µs per tensor{suffix}"] = summary([stall * 1e6 / len(shapes) for stall in stalls])
    rows[f"background, s{suffix}"] = summary(background)
    rows[f"stall / copy to pinned memory{suffix}"] = summary([stall / ceiling for stall in stalls])
    rows[f"extra device memory, bytes per element{suffix}"] = summary(extra)


def measure_peers(
    where: torch.device, shapes: list[tuple[int, ...]], saves: int, rows: Rows
) -> None:
    """Measure asynchronous saves and loads beside DCP's own, by turns: seconds of the host, files in the page cache."""
    generator = torch.Generator(where).manual_seed(3)
    state = _weights(shapes, generator)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        if where.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        result = call()
        if where.type == "cuda" and not isinstance(result, Future):
            torch.cuda.synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    with tempfile.TemporaryDirectory() as directory:
        history = dsq_ckpt.SaveHistory()
        for number in range(saves + 2):
            plain, own = Path(directory) / "plain", Path(directory) / "run" / f"step-{number:06d}"
            shutil.rmtree(plain, ignore_errors=True)
            dcp_result = timed("stall of dcp.async_save, s", partial(
                dcp.async_save, state, storage_writer=dcp.FileSystemWriter(plain, sync_files=False), no_dist=True
            ))
            timed("dcp.async_save after it, s", dcp_result.result)
            dsq_result = timed("stall of async_save, s", partial(
                dsq_ckpt.async_save, state, own, no_dist=True, history=history
            ))
            timed("async_save after it, s", dsq_result.result)
            _step(state, generator)
        for _ in range(saves + 2):
            timed("dcp.load, s", partial(
                dcp.load, state, storage_reader=dcp.FileSystemReader(plain), no_dist=True
            ))
            timed("load, s", partial(dsq_ckpt.load, state, own, no_dist=True, history=history))
    measured = {name: values[2:] for name, values in seconds.items()}
    rows.update({name: summary(values) for name, values in measured.items()})
    whole = {
        name: [a + b for a, b in zip(measured[f"stall of {name}, s"], measured[f"{name} after it, s"], strict=True)]
        for name in ("async_save", "dcp.async_save")
    }
    ratios = {
        "stall / of dcp.async_save": (measured["stall of async_save, s"], measured["stall of dcp.async_save, s"]),
        "save in the background / by dcp.async_save": (whole["async_save"], whole["dcp.async_save"]),
        f"load / dcp.load, after {saves + 1} deltas": (measured["load, s"], measured["dcp.load, s"]),
    }
    for name, (dsq_result, dcp_result) in ratios.items():
        rows[name] = summary([a / b for a, b in zip(dsq_result, dcp_result, strict=True)])


def _weights(shapes: list[tuple[int, ...]], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.randn(shape, generator=generator, device=generator.device) * 0.02
            for i, shape in enumerate(shapes)}


def _step(state: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Change weights about as much as training does between two checkpoints."""
    for x in state.values():
        x.add_(torch.randn(x.shape, generator=generator, device=x.device), alpha=0.001)
