"""Saves and loads pause the garbage collector, never while they call the program, and never for longer."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import dsq_ckpt
from dsq_ckpt import DSQStorageReader
from dsq_ckpt.core import collector
from dsq_ckpt.engine import pipeline
from dsq_ckpt.errors import LoadFailed, SaveFailed


@pytest.fixture
def seen(monkeypatch):
    """Whether the collector was enabled, in each write and read; `seen.error` is raised by the next one."""
    class Seen(list[bool]):
        error: Exception | None = None

    seen = Seen()

    def watched(function):
        def run(*args, **kwargs):
            seen.append(gc.isenabled())
            if seen.error is not None:
                raise seen.error
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(pipeline, "write_rank", watched(pipeline.write_rank))
    monkeypatch.setattr(DSQStorageReader, "read_data", watched(DSQStorageReader.read_data))
    assert gc.isenabled()
    yield seen
    gc.enable()


def test_a_save_and_a_load_pause_it(tmp_path, seen):
    state = {"w": torch.randn(64, 64)}
    dsq_ckpt.save(state, tmp_path / "a")
    assert gc.isenabled()
    dsq_ckpt.load(state, tmp_path / "a")
    assert gc.isenabled() and seen == [False, False]
    dsq_ckpt.compress(state, tmp_path / "b")
    assert gc.isenabled() and seen == [False, False, False]


def test_it_goes_on_after_a_failure(tmp_path, seen):
    state = {"w": torch.randn(64, 64)}
    dsq_ckpt.save(state, tmp_path / "a")
    seen.error = MemoryError("no room")
    with pytest.raises(SaveFailed, match="no room"):
        dsq_ckpt.save(state, tmp_path / "b")
    assert gc.isenabled()
    with pytest.raises(LoadFailed, match="no room"):
        dsq_ckpt.load(state, tmp_path / "a")
    assert gc.isenabled() and seen == [False] * 3


def test_a_collector_that_is_off_stays_off(tmp_path, seen):
    gc.disable()
    state = {"w": torch.randn(64, 64)}
    dsq_ckpt.save(state, tmp_path / "a")
    dsq_ckpt.load(state, tmp_path / "a")
    assert not gc.isenabled()


def test_the_program_has_it_while_it_evaluates(tmp_path, seen):
    model = torch.nn.Linear(80, 80)
    inputs, evaluations = torch.randn(32, 80), []

    def evaluate():
        evaluations.append(gc.isenabled())
        return float((model(inputs) - inputs).detach().square().mean())

    compressor = dsq_ckpt.Compressor(model, torch.optim.AdamW(model.parameters()), evaluate=evaluate)
    compressor.save(tmp_path / "a")
    assert len(evaluations) > 1 and all(evaluations) and seen == [False]
    seen.clear(), evaluations.clear()
    dsq_ckpt.compress(model, tmp_path / "b", evaluate=evaluate, max_degradation=0.5)
    assert len(evaluations) > 1 and all(evaluations) and False in seen
    assert gc.isenabled()


def test_the_program_has_it_in_on_save(tmp_path, seen):
    """`on_save` may evaluate or upload for long, save again, fail, or turn the collector off for good."""
    state, enabled, path = {"w": torch.randn(64, 64)}, [], iter(range(9))

    def on_save(result):
        enabled.append(gc.isenabled())
        dsq_ckpt.save(state, tmp_path / "nested" / str(next(path)))
        enabled.append(gc.isenabled())
        raise RuntimeError("no logger")

    def turn_off(result):
        gc.disable()

    saves = [
        lambda on_save, path: dsq_ckpt.save(state, path, on_save=on_save),
        lambda on_save, path: dsq_ckpt.Compressor(torch.nn.Linear(64, 64), on_save=on_save).save(path),
    ]
    for number, save in enumerate(saves):
        with pytest.warns(UserWarning, match="no logger"):
            save(on_save, tmp_path / str(number))
        assert gc.isenabled() and enabled == [True, True] * (number + 1)
        save(turn_off, tmp_path / f"off{number}")
        assert not gc.isenabled()
        gc.enable()


def test_a_child_that_is_forked_in_a_pause_can_pause_it_itself():
    with collector.no_garbage_collection():
        assert not gc.isenabled()
        child = os.fork()
        if child == 0:
            states = [gc.isenabled()]
            with collector.garbage_collection_of_program():
                states.append(gc.isenabled())
            states.append(gc.isenabled())
            with collector.no_garbage_collection():
                states.append(gc.isenabled())
            os._exit(0 if [*states, gc.isenabled()] == [True, True, True, False, True] else 1)
        _, status = os.waitpid(child, 0)
        assert not gc.isenabled() and status == 0
    assert gc.isenabled()


def test_the_background_leaves_it_to_training(tmp_path, seen):
    dsq_ckpt.async_save({"w": torch.randn(64, 64)}, tmp_path / "a").result()
    assert gc.isenabled() and seen == [True]
