"""Saves that wait for the one before, as of two threads, such as torchft's and the training's."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.api import background, saving
from dsq_ckpt.errors import SaveFailed


def test_another_thread_begins_a_save_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one still waits for that."""
    meanwhile: Future[Any] = Future()

    class Ending(Future):
        def exception(self, timeout: float | None = None) -> None:
            background._pending = meanwhile

    monkeypatch.setattr(background, "_pending", Ending())
    background.wait()
    assert background._pending is meanwhile


def test_a_save_that_is_cancelled_goes_on(tmp_path: Path) -> None:
    """As `asyncio.wait_for` cancels what takes too long; the next save waits for it as for any other."""
    state = {"w": torch.randn(80, 80)}
    future = dsq_ckpt.async_save(state, tmp_path / "1")
    assert not future.cancel()
    assert dsq_ckpt.save(state, tmp_path / "2").depth == 1
    assert future.result().depth == 0 and not future.cancelled()


@pytest.mark.timeout(100)
def test_an_error_after_a_failure_ends_the_save_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save waited for it without end."""
    def fails(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("dsq_ckpt.engine.pipeline.write_rank", fails)
    monkeypatch.setattr("dsq_ckpt.dcp.writer.SavePipeline.discard", fails)
    future = dsq_ckpt.async_save({"w": torch.ones(3)}, tmp_path / "1")
    assert "no such thing" in str(future.exception(60))
    monkeypatch.undo()
    dsq_ckpt.save({"w": torch.ones(3)}, tmp_path / "2")


@pytest.mark.parametrize("kind", ["save", "async_save"])
@pytest.mark.parametrize("instead", ["other", "nothing"])
def test_a_replacement_before_a_save_returns_is_not_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, instead: str
) -> None:
    """As a save of another thread to the same path, or a command that removes it."""
    state = {"w": torch.randn(80, 80)}
    other = dsq_ckpt.save(state, tmp_path / "other")
    told = f"another save, {other.save_id}, has repl" if instead == "other" else "is gone: another process has removed"
    committed = saving._read_result

    def replaced(path: Path, *arguments: Any) -> dsq_ckpt.SaveResult:
        shutil.rmtree(path)
        if instead == "other":
            shutil.copytree(tmp_path / "other", path)
        return committed(path, *arguments)

    with monkeypatch.context() as patched, pytest.raises(SaveFailed, match=told):
        patched.setattr(saving, "_read_result", replaced)
        if kind == "save":
            dsq_ckpt.save(state, tmp_path / "a")
        else:
            dsq_ckpt.async_save(state, tmp_path / "a").result()
    assert dsq_ckpt.save(state, tmp_path / "b").path == tmp_path / "b"
