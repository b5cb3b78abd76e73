"""Directories of checkpoints at the paths that Lightning chooses.

Lightning takes anything at the path of a checkpoint for a complete checkpoint. So a directory is saved under a hidden
name and renamed once it is complete. A complete checkpoint of this package is overwritten in place, since the save does
this atomically. Anything else at the path, such as a file of an earlier run, is removed after the rename.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from lightning.fabric.plugins import TorchCheckpointIO

from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage import removal
from dsq_ckpt.storage.atomic_io import hidden_name, make_directory, replace_directory
from dsq_ckpt.storage.manifest import MANIFEST, is_complete
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.target_directory import refuse_target

_SHARDED_METADATA = ".metadata"  # a file of Lightning's sharded checkpoints
_TUNER_PREFIXES = (".lr_find_", ".scale_batch_size_")
PathLike = str | Path


def has_complete_checkpoint(path: PathLike) -> bool:
    """Return whether a path holds a complete checkpoint of this package."""
    return not str(path).startswith(("http://", "https://")) and is_complete(resolve_checkpoint_path(path))


def is_tuner_path(path: PathLike) -> bool:
    """Return whether a path belongs to Lightning's Tuner, which restores this checkpoint after its trials."""
    return Path(path).name.startswith(_TUNER_PREFIXES)


def path_exists(path: Path) -> bool:
    """Return whether anything exists at a path; in an object store, whether a complete checkpoint does."""
    return is_complete(path) if is_remote(path) else os.path.lexists(path)


def resolve_link(path: PathLike) -> Path:
    """Return the path of a checkpoint; `path` may be a symbolic link to it (`save_last="link"`)."""
    checkpoint = resolve_checkpoint_path(path)
    if is_remote(checkpoint) or not checkpoint.is_symlink():
        return checkpoint
    target = checkpoint.resolve()  # in the same run, keep the path by which the run is known
    return checkpoint.parent / target.name if target.parent == checkpoint.parent.resolve() else target


def choose_save_directory(path: Path) -> Path:
    """Return the directory that a save for `path` writes: `path` itself, or a hidden name beside it.

    Raises:
        SaveFailed: `path` is a directory with other files.
    """
    if is_remote(path) or (is_complete(path) and not path.is_symlink()):
        return path
    if path.is_dir() and not path.is_symlink() and not (path / _SHARDED_METADATA).exists():
        refuse_target(path, overwrite=True)
    # Lightning takes digits after "hpc_ckpt_", anywhere in a name, for a version.
    return hidden_name(path.with_name(path.name.replace("_", "-")))


def publish_directory(source: Path, path: Path, fsync: bool) -> None:
    """Rename a complete checkpoint to its final path.

    Anything that exists at this path is first renamed to a name with "-replaced-", and removed at the end.

    Raises:
        OSError: a rename failed.
    """
    if source != path:
        # Not a hidden name: after a kill, Lightning finds the old checkpoint by it.
        backup = path.with_name(f"{path.stem}-replaced-{uuid.uuid4().hex[:8]}{path.suffix}")
        replace_directory(source, path, backup=backup, fsync=fsync)


def create_parent_directory(path: Path, fsync: bool) -> None:
    """Create the parent directory of a checkpoint."""
    if not is_remote(path):
        make_directory(path.parent, fsync)


def remove_checkpoint(path: PathLike) -> None:
    """Remove anything at a path, for Lightning's retention; files that other checkpoints need are kept.

    If the path is a symbolic link, only the link is removed.
    """
    checkpoint = resolve_checkpoint_path(path)
    if not is_remote(checkpoint) and checkpoint.is_symlink():
        checkpoint.unlink()
        return
    try:
        if is_complete(checkpoint):
            removal.remove_checkpoint(checkpoint)
            if not is_remote(checkpoint):
                with suppress(OSError):
                    checkpoint.rmdir()
            return
    except DSQError as error:
        if is_remote(checkpoint):  # other checkpoints may need its files
            warn(f"'{path}' was not removed: {error}")
            return
    if is_remote(checkpoint):
        TorchCheckpointIO().remove_checkpoint(str(path))
    elif any(checkpoint.glob(f"*/{MANIFEST}")):
        warn(f"'{path}' was not removed: it holds checkpoints itself")
    elif checkpoint.is_dir():
        shutil.rmtree(checkpoint)
    else:
        checkpoint.unlink(missing_ok=True)
