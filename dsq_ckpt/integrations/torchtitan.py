"""Compressed checkpoints for torchtitan: `DSQCheckpointManager.Config` in place of its `CheckpointManager.Config`.

    config.checkpoint = DSQCheckpointManager.Config(enable=True, interval=500)

All else is torchtitan's own: when it saves, what it saves, names of directories, and export to safetensors.
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
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.distributed.comm import communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.integrations.staged import is_compressed
from dsq_ckpt.storage import removal
from dsq_ckpt.storage.manifest import is_complete
from dsq_ckpt.storage.paths import resolve_checkpoint_path

_STEP = re.compile(r"step-(\d+)")


class DSQCheckpointManager(CheckpointManager):
    """torchtitan's `CheckpointManager`, whose checkpoints are compressed; `Config.build` makes it.

    Checkpoints of torchtitan's own are loaded too, so that a run may change over at any step.

    Raises:
        ConfigError: the configuration is wrong.
        DSQError: a save or a load failed, on every rank; a save in the background raises it from the next save, or
            from `close`.
    """

    save_future: Future[Any] | None

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Settings of `CheckpointManager.Config`, and those of compression."""

        async_mode: Literal["disabled", "async"] = "disabled"
        """Whether a thread compresses and writes, while training goes on."""

        compression: str = "default"
        """Name of a preset, such as "exact", or path of a JSON or YAML file of a `DSQConfig`."""

        pinned: bool = True
        """Keep the refinement layer of every checkpoint; False: of the newest `refinement.keep_last`."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.async_mode not in ("disabled", "async"):
                raise ConfigError(
                    f"checkpoint.async_mode is {self.async_mode!r}, expected 'disabled' or 'async', which copies the "
                    "state into memory that is kept for the next save"
                )
            as_config(self.compression)

    def __init__(self, config: Config, **parts: Any) -> None:
        # Its thread would remove directories without regard to files that other checkpoints need.
        without_thread: Any = {"keep_latest_k": 0}
        super().__init__(replace(config, **without_thread), **parts)
        if not self.enable:
            return
        self._config, self._pinned, self._step = as_config(config.compression), config.pinned, 0
        self.keep_latest_k = config.keep_latest_k
        if self.keep_latest_k > 0:
            self.purge_queue: queue.Queue[str | None] = queue.Queue()
            self.purge_thread = threading.Thread(target=purge_thread, args=(self.purge_queue, _remove), daemon=True)
            self.purge_thread.start()

    @torch.no_grad()
    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode,
        enable_garbage_collection: bool = False, to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save a state dict, compressed, or as safetensors; collective.

        Args:
            state_dict: weights by their names, and other states by their keys.
            checkpoint_id: the directory; a complete checkpoint of this package there is replaced.
            async_mode: `DISABLED`, or `ASYNC` for a thread.
            enable_garbage_collection: collect garbage after the save.
            to_hf: save as `CheckpointManager` does, in the format of Hugging Face.

        Returns:
            A future of the save, if it is in a thread.

        Raises:
            DSQError: the save failed; earlier checkpoints are untouched.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        model = join_models([("", part) for part in self.states[MODEL].model])  # stages of a pipeline
        options: dict[str, Any] = {
            "config": self._config, "overwrite": True, "pinned": self._pinned, "model": model,
            "parent": "auto" if OPTIMIZER in state_dict else None,  # the model alone, at the end: needs no other
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
            checkpoint_id: the directory.
            from_hf: it is in the format of Hugging Face.
            from_quantized: its tensors are quantized, in that format.

        Raises:
            DSQError: the checkpoint cannot be loaded.
        """
        comm = communicator(None)
        ours = gather_from_all_ranks(
            comm, lambda: comm.rank == 0 and not from_hf and _is_ours(checkpoint_id), LoadFailed
        )[0]
        if not ours:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id)

        def give() -> None:
            with in_user_code(loads_module=True):
                self.states[MODEL].load_state_dict(state_dict)

        run_on_all_ranks(comm, give, LoadFailed)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._step = curr_step
        saved: bool = super()._save(curr_step, last_step)
        return saved

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None  # a failure is told once, and `close` after it succeeds
        assert future is not None
        future.result()

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()

    def _load(self, step: int = -1) -> bool:
        if step == -1:
            found = gather_from_all_ranks(communicator(None), self._find_load_step, LoadFailed)
            if min(found) != max(found):
                raise LoadFailed(
                    f"'{self.folder}': ranks see other checkpoints; the newest is of step {max(found)} for rank "
                    f"{found.index(max(found))}, and {min(found) if min(found) >= 0 else 'not there'} for rank "
                    f"{found.index(min(found))}: give a checkpoint.folder that all hosts share"
                )
            step = found[0]
        loaded: bool = super()._load(step)
        return loaded

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest step that has a complete checkpoint; -1: there is none."""
        return max(_complete(folder or self.folder), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        """Remove all but the newest complete checkpoints up to the present step.

        Those of later steps are of a run that was ended before its restart from an earlier one; they stay until this
        run replaces them.
        """
        if self._should_purge():
            found = {step: path for step, path in _complete(self.folder).items() if step <= self._step}
            for step in sorted(found)[: -self.keep_latest_k]:
                self.purge_queue.put(found[step])


def _complete(folder: str) -> dict[int, str]:
    """Return the directories of complete checkpoints, by their step."""
    found = {}
    for name in filesystem.listdir(folder) if filesystem.isdir(folder) else ():
        path = filesystem.join(folder, name)
        theirs = (".metadata", "model.safetensors.index.json")
        if (step := _STEP.fullmatch(name)) and (
            is_complete(resolve_checkpoint_path(path))
            or any(filesystem.isfile(filesystem.join(path, one)) for one in theirs)
        ):
            found[int(step[1])] = path
    return found


def _is_ours(path: str) -> bool:
    """Return whether a directory is a checkpoint of this package.

    Raises:
        CheckpointNotFound: it is one without a manifest.
    """
    directory = resolve_checkpoint_path(path)
    return is_complete(directory) if is_remote(directory) else is_compressed(directory)


def _remove(path: str) -> None:
    """Remove a checkpoint; every other one stays complete."""
    directory = resolve_checkpoint_path(path)
    if is_complete(directory):
        removal.remove_checkpoint(directory)
    else:
        filesystem.rmtree(path)
