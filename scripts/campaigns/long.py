"""Long chains, many tensors, large objects: files, memory and time stay bounded, and everything loads."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path

import torch

import dsq_ckpt
from campaigns import subjects
from campaigns.harness import Campaign, Found
from campaigns.subjects import State, same, state_at
from dsq_ckpt.storage.manifest import Manifest

KINDS = ("checkpoints, default chain", "checkpoints, one chain", "small tensors", "object of many elements")
_SMALL: State = {"quantize": {"min_elements": 256}, "storage": {"block_elements": 1024, "fsync": False}}
_FILES = 64
"""Descriptors that a process may have open beside those it has at first."""


class Long(Campaign):
    """What grows with the length of a run, or with the number of things in a state."""

    name = "long"
    full = few = len(KINDS)
    seconds = 3000.0

    def kind(self, number: int) -> str:
        """Return what there is much of."""
        return KINDS[number % len(KINDS)]

    def trial(self, number: int) -> Found:
        """Save and load it."""
        torch.set_num_threads(1)
        kind, run = self.kind(number), self.directory / f"run-{number}"
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + _FILES, limit[1]))
        if "checkpoints" in kind:
            verdict = self._chain(run, 300 if "one chain" in kind else None)
        elif kind == "small tensors":
            verdict = self._tensors(run)
        else:
            verdict = self._object(run)
        shutil.rmtree(run)
        return verdict

    def _chain(self, run: Path, longest: int | None) -> Found:
        count = 16 if self.short else 300
        config = {**_SMALL, "quantize": {**_SMALL["quantize"], **subjects.FINE_MOMENTS}}
        config |= {} if longest is None else {"delta": {"max_chain": longest}}
        resident, seconds = [], []
        for step in range(1, count + 1):
            started = time.perf_counter()
            dsq_ckpt.save(state_at(step), run / f"step-{step:04d}", config=config, no_dist=True)
            seconds.append(time.perf_counter() - started)
            resident.append(_resident())
        depths = [Manifest.read(run / f"step-{step:04d}").depth for step in range(1, count + 1)]
        if max(depths) != min(count - 1, longest or 32):
            return Found("wrong", f"the longest chain has {max(depths)} deltas")
        loads = []
        for step in sorted({*range(1, count + 1, max(1, count // 30)), count}):
            path = run / f"step-{step:04d}"
            started = time.perf_counter()
            state = subjects.read_all(path)
            loads.append(time.perf_counter() - started)
            if wrong := subjects.far(state, state_at(step), dsq_ckpt.describe(path)["refinement"] == "kept"):
                return Found("wrong", f"{path.name}: {wrong}")
        if subjects.command("verify", str(run))[0]:
            return Found("wrong", "dsq verify finds something")
        growth = (resident[-1] - resident[count // 3]) / 2**20
        if growth > 64:
            return Found("wrong", f"memory grew by {growth:.0f} MiB in the last two thirds of {count} saves")
        third = count // 3
        return Found("unchanged", (
            f"{count} checkpoints: {1e3 * _median(seconds[:third]):.0f} ms a save at first, "
            f"{1e3 * _median(seconds[-third:]):.0f} ms at last; loads {1e3 * loads[0]:.0f} ms, longest "
            f"{1e3 * max(loads):.0f} ms; {growth:.1f} MiB more memory"
        ))

    def _tensors(self, run: Path) -> Found:
        count = 200 if self.short else 3000
        state = {"small": {f"t{n}": torch.arange(n % 7 + 1) + n for n in range(count)}}
        state["many"] = {f"w{n}": torch.randn(16, 16, generator=torch.Generator().manual_seed(n)) for n in range(count)}
        return self._both(run, state, f"{count} tensors of each of two kinds", {**_SMALL, "system": "exact"})

    def _object(self, run: Path) -> Found:
        count = 20_000 if self.short else 1_000_000
        state = {"seen": list(range(count)), "scores": {"all": [n / 7 for n in range(count // 10)]}}
        return self._both(run, state, f"{count} numbers", _SMALL)

    def _both(self, run: Path, state: State, what: str, config: State) -> Found:
        seconds = []
        for step in (1, 2):
            started = time.perf_counter()
            dsq_ckpt.save(state, run / f"step-{step}", config=config, no_dist=True)
            seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        loaded = subjects.read_all(run / "step-2")
        load = time.perf_counter() - started
        if not same(state, loaded):
            return Found("wrong", "other values")
        size = sum(file.stat().st_size for file in (run / "step-1").iterdir())
        return Found("unchanged", f"{what}: {size / 2**20:.1f} MiB, save {seconds[1]:.2f} s, load {load:.2f} s")


def _resident() -> int:
    """Return bytes of memory in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
