"""`DSQCheckpointIO` for one device and DDP, where rank 0 saves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch.utils._pytree import tree_map_only

from dsq_ckpt.api.loading import load
from dsq_ckpt.api.saving import ConfigLike, as_config, save
from dsq_ckpt.core.arguments import expect_flags, expect_on_save
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.integrations.lightning import checkpoint_paths
from dsq_ckpt.integrations.lightning.checkpoint_paths import PathLike
from dsq_ckpt.integrations.lightning.deferred_removals import DeferredRemovals
from dsq_ckpt.integrations.lightning.layout import explain_load_errors, pop_skeleton, to_state_dict
from dsq_ckpt.integrations.lightning.module_lookup import ModuleLookup
from dsq_ckpt.integrations.staged_checkpoint import finalize_save
from dsq_ckpt.storage.paths import resolve_checkpoint_path


class DSQCheckpointIO(CheckpointIO):
    """A `CheckpointIO` of compressed checkpoints, for `Trainer(plugins=[DSQCheckpointIO()])`.

    It supports one device and DDP, where rank 0 saves and every rank loads, and may be wrapped by Lightning's
    `AsyncCheckpointIO`. A checkpoint is a directory at the path that Lightning chooses. Its parent is the checkpoint
    that was saved or loaded before in the same directory. Frozen weights and buffers of the module are exact. Files of
    Lightning's own are loaded as by Lightning. Lightning itself saves the Tuner's temporary checkpoints.

    Args:
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset; with "exact" every
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
        expect_flags(pinned=pinned)
        expect_on_save(on_save)
        self.pinned, self.on_save = pinned, on_save
        self._removals, self._module_lookup = DeferredRemovals(), ModuleLookup(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the picklable state, for processes that Lightning spawns."""
        return {name: value for name, value in vars(self).items() if name not in ("_removals", "_module_lookup")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _removals=DeferredRemovals(), _module_lookup=ModuleLookup(self))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint dict; anything at `path` is replaced once the new checkpoint is complete.

        Raises:
            ConfigError: `storage_options` is not None.
            SaveFailed: a value of the dict cannot be stored; the message names it.
            DSQError: any other failure. Earlier checkpoints are untouched.
        """
        if storage_options is not None:
            raise ConfigError(
                f"storage_options is {storage_options!r}, expected None: DSQCheckpointIO(config=...) has all settings"
            )
        if checkpoint_paths.is_tuner_path(path):
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
            return
        target, fsync = resolve_checkpoint_path(path), self.config.storage.fsync
        with self._removals.defer_during_save(target):
            save_directory = checkpoint_paths.choose_save_directory(target)
            checkpoint_paths.create_parent_directory(target, fsync)
            state, model = to_state_dict(checkpoint), self._module_lookup.find_module()
            result = save(
                state, save_directory, config=self.config, overwrite=True, model=model, pinned=self.pinned,
                no_dist=True, on_save=self.on_save,
            )
            checkpoint_paths.publish_directory(save_directory, target, fsync)
        if save_directory != target:
            finalize_save(result, target, self.config, on_save=self.on_save)

    def load_checkpoint(
        self, path: PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint dict, with tensors on the CPU or on the device `map_location`.

        `weights_only` is used for files of Lightning's own only. From a checkpoint of this package, only tensors and
        plain data are unpickled.

        Raises:
            CheckpointNotFound: there is no complete checkpoint.
            LoadFailed: it was not saved by Lightning, or holds classes that are not allowed here.
            DSQError: any other failure, such as a damaged file.
        """
        if not checkpoint_paths.has_complete_checkpoint(path) and not Path(path).is_dir():
            location: Any = "cpu" if map_location is None else map_location
            return TorchCheckpointIO().load_checkpoint(path, location, weights_only)
        if not isinstance(map_location, str | torch.device | None):
            raise ConfigError(f"map_location is {map_location!r}, expected a device: other forms are for single files")
        checkpoint = _load_checkpoint_dict(path)
        if map_location is None:
            return checkpoint
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(map_location), checkpoint)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint; all others stay complete.

        If a thread saves (`AsyncCheckpointIO`), the newest complete checkpoint is kept until the next one is complete.
        """
        self._removals.remove(resolve_checkpoint_path(path))


def checkpoint_file(path: PathLike) -> io.BytesIO:
    """Return a checkpoint as an in-memory file in Lightning's own format, for functions that take a single file.

    Raises:
        DSQError: the checkpoint cannot be loaded.

    Example:
        Model.load_from_checkpoint(checkpoint_file("checkpoints/last.ckpt"))
    """
    buffer = io.BytesIO()
    torch.save(_load_checkpoint_dict(path), buffer)
    buffer.seek(0)
    return buffer


def _load_checkpoint_dict(path: PathLike) -> dict[str, Any]:
    """Return the checkpoint dict of a checkpoint of this package, on the CPU."""
    state: dict[str, Any] = {}
    directory = checkpoint_paths.resolve_link(path)
    with explain_load_errors(directory):
        load(state, directory, no_dist=True)
        return pop_skeleton(state).fill(state)
