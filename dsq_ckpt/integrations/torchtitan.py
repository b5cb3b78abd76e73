"""Compressed checkpoints for torchtitan: `DSQCheckpointManager.Config` in place of its `CheckpointManager.Config`.

    config.checkpoint = DSQCheckpointManager.Config(enable=True, interval=500)

Everything else is torchtitan's own: when and what it saves, names of directories, and export to safetensors.
"""

from __future__ import annotations

import queue
import re
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer import MODEL, OPTIMIZER, AsyncMode, CheckpointManager
from torchtitan.components.checkpointer.base import purge_thread
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from dsq_ckpt.api.joined_models import join_models
from dsq_ckpt.api.loading import load
from dsq_ckpt.api.saving import as_config, async_save, save
from dsq_ckpt.core.arguments import expect_flags
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.distributed.comm import communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.integrations.staged_checkpoint import is_compressed
from dsq_ckpt.storage import removal
from dsq_ckpt.storage.manifest import is_complete
from dsq_ckpt.storage.paths import resolve_checkpoint_path

__all__ = ["DSQCheckpointManager"]

_STEP = re.compile(r"step-(\d+)")


class DSQCheckpointManager(CheckpointManager):
    """A `CheckpointManager` of torchtitan with compressed checkpoints; created by `Config.build`.

    Torchtitan's own checkpoints are loaded too, so that a run may switch to this class at any step.

    Raises:
        ConfigError: the configuration is invalid.
        DSQError: a save or a load failed, on every rank; an error of a save in the background is raised by the next
            save, or by `close`.
    """

    save_future: Future[Any] | None

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Settings of `CheckpointManager.Config`, and settings of compression."""

        async_mode: Literal["disabled", "async"] = "disabled"
        """Whether a thread compresses and writes while training continues."""

        compression: str = "default"
        """Name of a preset, such as "exact", or path of a JSON or YAML file of a `DSQConfig`."""

        pinned: bool = True
        """Keep the refinement layer of every checkpoint; if False, of the newest `refinement.keep_last` only."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.async_mode not in ("disabled", "async"):
                raise ConfigError(
                    f"checkpoint.async_mode is {self.async_mode!r}, expected 'disabled' or 'async', which copies the "
                    "state into memory that is kept for the next save"
                )
            as_config(self.compression)
            expect_flags(pinned=self.pinned)

    def __init__(self, config: Config, **kwargs: Any) -> None:
        # torchtitan's thread would remove files that other checkpoints need.
        no_purging: Any = {"keep_latest_k": 0}
        super().__init__(replace(config, **no_purging), **kwargs)
        if not self.enable:
            return
        self._config, self._pinned, self._step = as_config(config.compression), config.pinned, 0
        self.keep_latest_k = config.keep_latest_k
        if self.keep_latest_k > 0:
            self.purge_queue: queue.Queue[str | None] = queue.Queue()
            self.purge_thread = threading.Thread(
                target=purge_thread, args=(self.purge_queue, _remove_checkpoint), daemon=True
            )
            self.purge_thread.start()

    @torch.no_grad()
    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode,
        enable_garbage_collection: bool = False, to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save a state dict, compressed, or as safetensors; collective.

        Args:
            state_dict: weights by name, and other states by key.
            checkpoint_id: directory; a complete checkpoint of this package in it is replaced.
            async_mode: `DISABLED`, or `ASYNC` to save in a thread.
            enable_garbage_collection: collect garbage after the save.
            to_hf: save as `CheckpointManager` does, in the format of Hugging Face.

        Returns:
            A future of a save in a thread, else None.

        Raises:
            DSQError: the save failed; earlier checkpoints are untouched.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        model = join_models([("", stage) for stage in self.states[MODEL].model])  # stages of a pipeline
        options: dict[str, Any] = {
            "config": self._config, "overwrite": True, "pinned": self._pinned, "model": model,
            "parent": "auto" if OPTIMIZER in state_dict else None,  # the final model needs no parent
        }
        future = None
        if async_mode == AsyncMode.DISABLED:
            save(state_dict, checkpoint_id, **options)
        else:
            future = async_save(state_dict, checkpoint_id, **options)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return future

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load into a state dict and the model, from a checkpoint of this package or of torchtitan; collective.

        Args:
            state_dict: tensors to load into, and states.
            checkpoint_id: directory.
            from_hf: the checkpoint is in the format of Hugging Face.
            from_quantized: its tensors are quantized, in the format of Hugging Face.

        Raises:
            DSQError: the checkpoint cannot be loaded.
        """
        comm = communicator(None)
        is_compressed_checkpoint = gather_from_all_ranks(
            comm, lambda: comm.rank == 0 and not from_hf and _is_package_checkpoint(checkpoint_id), LoadFailed
        )[0]
        if not is_compressed_checkpoint:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id)

        def apply_state() -> None:
            with in_user_code(loads_module=True):
                self.states[MODEL].load_state_dict(state_dict)

        run_on_all_ranks(comm, apply_state, LoadFailed)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._step = curr_step
        saved: bool = super()._save(curr_step, last_step)
        return saved

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None  # a failure is raised once, and `close` succeeds then
        assert future is not None
        future.result()

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()

    def _load(self, step: int = -1) -> bool:
        if step == -1:
            steps = gather_from_all_ranks(communicator(None), self._find_load_step, LoadFailed)
            if min(steps) != max(steps):
                raise LoadFailed(
                    f"'{self.folder}': ranks see other checkpoints; the newest is of step {max(steps)} for rank "
                    f"{steps.index(max(steps))}, and {min(steps) if min(steps) >= 0 else 'not there'} for rank "
                    f"{steps.index(min(steps))}: give a checkpoint.folder that all hosts share"
                )
            step = steps[0]
        loaded: bool = super()._load(step)
        return loaded

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest step with a complete checkpoint, or -1."""
        return max(_list_complete_checkpoints(folder or self.folder), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        """Remove all but the newest complete checkpoints up to the current step.

        Checkpoints of later steps are from before a restart from an earlier step. They stay until this run replaces
        them.
        """
        if self._should_purge():
            paths_by_step = _list_complete_checkpoints(self.folder)
            steps = sorted(step for step in paths_by_step if step <= self._step)
            for step in steps[: -self.keep_latest_k]:
                self.purge_queue.put(paths_by_step[step])


def _list_complete_checkpoints(folder: str) -> dict[int, str]:
    """Return the directories of complete checkpoints by step."""
    paths_by_step = {}
    for name in filesystem.listdir(folder) if filesystem.isdir(folder) else ():
        path = filesystem.join(folder, name)
        torchtitan_files = (".metadata", "model.safetensors.index.json")
        if (step := _STEP.fullmatch(name)) and (
            is_complete(resolve_checkpoint_path(path))
            or any(filesystem.isfile(filesystem.join(path, file_name)) for file_name in torchtitan_files)
        ):
            paths_by_step[int(step[1])] = path
    return paths_by_step


def _is_package_checkpoint(path: str) -> bool:
    """Return whether a directory is a checkpoint of this package.

    Raises:
        CheckpointNotFound: the directory has files of a compressed checkpoint, but no manifest.
    """
    directory = resolve_checkpoint_path(path)
    return is_complete(directory) if is_remote(directory) else is_compressed(directory)


def _remove_checkpoint(path: str) -> None:
    """Remove a checkpoint; all others stay complete."""
    directory = resolve_checkpoint_path(path)
    if is_complete(directory):
        removal.remove_checkpoint(directory)
    else:
        filesystem.rmtree(path)
