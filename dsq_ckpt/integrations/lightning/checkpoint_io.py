"""`DSQCheckpointIO`: Lightning's checkpoints of one device and of DDP, which rank 0 saves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch.utils._pytree import tree_map_only

from dsq_ckpt.api.loading import load
from dsq_ckpt.api.saving import ConfigLike, as_config, save
from dsq_ckpt.core.arguments import expect, expect_on_save
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.integrations.lightning import placing
from dsq_ckpt.integrations.lightning.layout import explained, rest_of, to_state
from dsq_ckpt.integrations.lightning.owner import Owner
from dsq_ckpt.integrations.lightning.placing import PathLike
from dsq_ckpt.integrations.lightning.removals import Removals
from dsq_ckpt.integrations.staged import settle
from dsq_ckpt.storage.paths import resolve_checkpoint_path


class DSQCheckpointIO(CheckpointIO):
    """A `CheckpointIO` of compressed checkpoints, for `Trainer(plugins=[DSQCheckpointIO()])`.

    It serves one device and DDP, where rank 0 saves and every rank loads, and may be wrapped by Lightning's
    `AsyncCheckpointIO`. A checkpoint is a directory of the name that Lightning gives it, and is coded against the one
    that was saved or loaded before in the same directory. Frozen weights and buffers of the module are exact. Files of
    Lightning's own are loaded as by Lightning, and the Tuner's, from which it takes back its trials, are saved so.

    Args:
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset; "exact": every
            restored bit is as it was saved.
        pinned: keep the refinement layer of every checkpoint that Lightning keeps; False: of the newest
            `refinement.keep_last`, so that a long history takes less space, and older ones are coarser.
        on_save: called with the `SaveResult` of each complete checkpoint, for a logger.

    Raises:
        ConfigError: the configuration is wrong.

    Example:
        >>> from dsq_ckpt.integrations.lightning import DSQCheckpointIO
        >>> io = DSQCheckpointIO(config="exact")  # for Trainer(plugins=[io]), which calls it
        >>> io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, "epoch": 1}, "checkpoints/epoch=1.ckpt")
        >>> io.load_checkpoint("checkpoints/epoch=1.ckpt")
        {'state_dict': {'w': tensor([1., 1.])}, 'epoch': 1}
    """

    def __init__(
        self, config: ConfigLike = None, *, pinned: bool = True, on_save: OnSave | None = None
    ) -> None:
        self.config = as_config(config)
        expect("pinned", pinned, bool, "True or False")
        expect_on_save(on_save)
        self.pinned, self.on_save = pinned, on_save
        self._removals, self._owner = Removals(), Owner(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a process that Lightning spawns is given."""
        return {name: value for name, value in vars(self).items() if name not in ("_removals", "_owner")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _removals=Removals(), _owner=Owner(self))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint dict; what is at `path` is replaced once the new checkpoint is complete.

        Raises:
            ConfigError: there are `storage_options`.
            SaveFailed: a value of the dict cannot be stored; the message names it.
            DSQError: what else failed. Earlier checkpoints are untouched.
        """
        if storage_options is not None:
            raise ConfigError(
                f"storage_options is {storage_options!r}, expected None: DSQCheckpointIO(config=...) has all settings"
            )
        if placing.is_of_tuner(path):
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
            return
        goal, fsync = resolve_checkpoint_path(path), self.config.storage.fsync
        with self._removals.saving(goal):
            target = placing.directory_for(goal)
            placing.make_parents(goal, fsync)
            state = to_state(checkpoint)
            result = save(
                state, target, config=self.config, overwrite=True, model=self._owner.module(), pinned=self.pinned,
                no_dist=True, on_save=self.on_save,
            )
            placing.put_in_place(target, goal, fsync)
        if target != goal:
            settle(result, goal, self.config, on_save=self.on_save)

    def load_checkpoint(
        self, path: PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint dict, with tensors on the CPU or on the device `map_location`.

        `weights_only` is for files of Lightning's own: nothing of a checkpoint of this package is unpickled but tensors
        and plain data.

        Raises:
            CheckpointNotFound: there is no complete checkpoint.
            LoadFailed: it was not saved by Lightning, or holds classes that are not allowed here.
            DSQError: what else failed, such as a damaged file.
        """
        if not placing.is_ours(path) and not Path(path).is_dir():
            location: Any = "cpu" if map_location is None else map_location
            return TorchCheckpointIO().load_checkpoint(path, location, weights_only)
        if not isinstance(map_location, str | torch.device | None):
            raise ConfigError(f"map_location is {map_location!r}, expected a device: other forms are for single files")
        found = _loaded(path)
        return found if map_location is None else tree_map_only(torch.Tensor, lambda one: one.to(map_location), found)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint; every other one stays complete.

        Where a thread saves (`AsyncCheckpointIO`), the newest complete checkpoint goes when the next one is complete.
        """
        self._removals.ask(resolve_checkpoint_path(path))


def checkpoint_file(path: PathLike) -> io.BytesIO:
    """Return a checkpoint as an open file of Lightning's own form, in memory, for functions that take a single file.

    Raises:
        DSQError: it cannot be loaded.

    Example:
        Model.load_from_checkpoint(checkpoint_file("checkpoints/last.ckpt"))
    """
    buffer = io.BytesIO()
    torch.save(_loaded(path), buffer)
    buffer.seek(0)
    return buffer


def _loaded(path: PathLike) -> dict[str, Any]:
    """Return the checkpoint dict of a checkpoint of ours, on the CPU."""
    state: dict[str, Any] = {}
    directory = placing.resolved(path)
    with explained(directory):
        load(state, directory, no_dist=True)
        return rest_of(state).filled(state)
