"""Benchmark of the stall of training by an asynchronous save, for `dsq bench`, compared with `dcp.async_save`."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dsq_ckpt.api import saving as api
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.engine.history import SaveHistory

STALL = "stall of async_save"
STAGES = {", quantize": "quantize", "": "auto"}
"""`storage.stage` by the suffix of a row's name."""


def measure_stalls(
    states: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], config: DSQConfig, directory: Path, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of calls of `async_save`, and their ratios to calls of `dcp.async_save`.

    Args:
        states: two states of equal shapes, saved alternately, so that all saves but the first are deltas.
        config: configuration of the saves, except for `storage.stage`.
        directory: directory on the disk to be measured.
        repeats: runs per figure, after a run that compiles kernels and allocates memory.
    """
    measured: dict[str, list[float]] = {}
    for name, stage in STAGES.items():
        staged, history = config.with_values(**{"storage.stage": stage}), SaveHistory()
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            for number in range(repeats + 1):
                state, plain, own = states[number % 2], Path(scratch) / "plain", Path(scratch) / "run" / f"{number}"
                peer = _time_call(lambda: dcp.async_save(
                    state, storage_writer=dcp.FileSystemWriter(plain, sync_files=True), no_dist=True  # noqa: B023
                ))
                shutil.rmtree(plain)
                own_seconds = _time_call(
                    lambda: api.async_save(state, own, config=staged, no_dist=True, history=history)  # noqa: B023
                )
                if not number:
                    continue
                for key, value in (
                    (f"{STALL}{name} / of dcp.async_save", own_seconds / peer), (f"{STALL}{name}, s", own_seconds),
                    ("stall of dcp.async_save, s", peer),
                ):
                    measured.setdefault(key, []).append(value)
    return measured


def _time_call(call: Callable[[], Any]) -> float:
    """Return the seconds of a call that starts a save. Wait for the save afterwards."""
    os.sync()
    start = time.perf_counter()
    future: Future[Any] = call()
    seconds = time.perf_counter() - start
    future.result()
    return seconds
