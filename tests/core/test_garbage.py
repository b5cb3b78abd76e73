"""Python's garbage collector during a save."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.core.garbage import collector_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leave the collector on."""
    gc.enable()
    yield
    gc.enable()


def test_a_save_walks_no_objects_in_search_of_garbage(tmp_path: Path) -> None:
    began: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and not gc.isenabled():
            began.append(info["generation"])
        elif phase == "start":
            outside.append(info["generation"])

    outside: list[int] = []
    state = {f"layers.{number}.weight": torch.randn(64, 64) for number in range(30)}
    dsq_ckpt.save(state, tmp_path / "1", no_dist=True)  # modules are imported, kernels loaded
    gc.collect()
    gc.callbacks.append(note)
    try:
        dsq_ckpt.save(state, tmp_path / "2", no_dist=True)
    finally:
        gc.callbacks.remove(note)
    assert not began and not [generation for generation in outside if generation == 2]
    assert gc.isenabled()


def test_the_collector_is_on_again_after_an_error(tmp_path: Path) -> None:
    state = {"layer.weight": torch.randn(64, 64)}
    dsq_ckpt.save(state, tmp_path / "1", no_dist=True)
    with pytest.raises(dsq_ckpt.CheckpointExists):
        dsq_ckpt.save(state, tmp_path / "1", no_dist=True)
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off(tmp_path: Path) -> None:
    gc.disable()
    dsq_ckpt.save({"layer.weight": torch.randn(64, 64)}, tmp_path / "1", no_dist=True)
    assert not gc.isenabled()


def test_pauses_nest() -> None:
    with collector_paused(), collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_fork_during_a_save_has_its_collector() -> None:
    """As a data loader's thread makes them."""
    found: list[int] = []

    def fork() -> None:
        if (child := os.fork()) == 0:
            os._exit(0 if gc.isenabled() else 1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with collector_paused():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert not gc.isenabled()
    assert found == [0]
