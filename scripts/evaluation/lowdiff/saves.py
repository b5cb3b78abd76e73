"""Full checkpoints with PyTorch's own means: `torch.save`, and `async_save` of its distributed checkpoints (DCP)."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from evaluation.lowdiff.base import OnDisk, keep_to, unwrapped
from evaluation.lowdiff.durable import bytes_below, replacing


class TorchSave(OnDisk):
    """`torch.save` on the training thread, to a file that is flushed and then takes the place of the one before."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Make the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path = self._directory / "checkpoint.pt"
        self._model, self._optimizer = unwrapped(model), optimizer

    def after_step(self, step: int) -> None:
        """Save, if it is time for it."""
        if step % self._every:
            return
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": step}
        with replacing(self._path) as temporary, temporary.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
            self._written += stream.tell()

    def wait(self) -> None:
        """Do nothing: saves are synchronous."""

    def finish(self) -> None:
        """Do nothing: saves are synchronous."""

    def recover(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the file."""
        path = self._directory / "checkpoint.pt"
        if not path.exists():
            return 0
        state: dict[str, Any] = torch.load(path, weights_only=True)
        unwrapped(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


class _Writer(dcp.FileSystemWriter):
    """DCP's own, on a CPU of its own: its thread would inherit that of the training thread."""

    def __init__(self, path: Path, core: int | None) -> None:
        super().__init__(path)
        self._core = core

    def set_up_storage_writer(self, *arguments: Any, **named: Any) -> None:
        """Bind the saving thread to its CPU: this is the first method that it calls."""
        keep_to(self._core)
        super().set_up_storage_writer(*arguments, **named)


class DCPAsyncSave(OnDisk):
    """`dcp.async_save`: the state is copied on the training thread, and written by a thread.

    Each checkpoint is a directory, and the newest two are kept. A checkpoint waits for the one before.
    """

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Make a group for DCP's collectives: those of training are not to mix with them."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._state = _live_state(model, optimizer)
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._saving: tuple[int, Future[Any]] | None = None

    def after_step(self, step: int) -> None:
        """Wait for the last checkpoint, copy the state, and have it written."""
        if step % self._every:
            return
        self.wait()
        saving = dcp.async_save(
            self._state, storage_writer=_Writer(self._path(step), self._core), process_group=self._group
        )
        assert isinstance(saving, Future)  # else staging is asynchronous, which the writer's is not
        self._saving = step, saving

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; the one before the last goes."""
        if self._saving is not None:
            step, saving = self._saving
            saving.result()
            self._saving = None
            self._written += bytes_below(self._path(step))
            for old in sorted(self._complete())[:-2]:
                shutil.rmtree(self._path(old))

    def finish(self) -> None:
        """Wait."""
        self.wait()

    def recover(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest complete directory into the tensors in use."""
        complete = self._complete()
        if not complete:
            return 0
        dcp.load(_live_state(model, optimizer), checkpoint_id=self._path(max(complete)))
        return max(complete)

    def _path(self, step: int) -> Path:
        return self._directory / f"{step:09d}"

    def _complete(self) -> list[int]:
        """Return the steps of directories that have metadata, which DCP writes last."""
        return [int(path.parent.name) for path in self._directory.glob("*/.metadata")]


def _live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of model and optimizer; its tensors are those in use."""
    weights, state = get_state_dict(unwrapped(model), optimizer)
    return {"model": weights, "optimizer": state}
