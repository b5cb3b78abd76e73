"""Directories of checkpoints under the names that Lightning chooses.

Lightning takes whatever has the name of a checkpoint for one, as it writes files. So a directory is saved under a
hidden name, and gets its own once it is complete. A complete checkpoint of ours is overwritten in its place, which the
save does at once. What else has the name, such as a file of a run before, gives way when the new one is there.
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
from dsq_ckpt.storage.atomic_io import hidden_name, make_directory, sync_directory
from dsq_ckpt.storage.manifest import MANIFEST, is_complete
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.target_directory import refuse_target

_SHARDS = ".metadata"  # in directories of Lightning's sharded checkpoints
_TUNERS = (".lr_find_", ".scale_batch_size_")
PathLike = str | Path


def is_ours(path: PathLike) -> bool:
    """Return whether a complete checkpoint of this package is at a path."""
    return not str(path).startswith(("http://", "https://")) and is_complete(resolve_checkpoint_path(path))


def is_of_tuner(path: PathLike) -> bool:
    """Return whether Lightning's Tuner saves here, which tries rates or batch sizes, and then takes all of it back."""
    return Path(path).name.startswith(_TUNERS)


def is_there(path: Path) -> bool:
    """Return whether anything is at a path."""
    return is_complete(path) if is_remote(path) else os.path.lexists(path)


def resolved(path: PathLike) -> Path:
    """Return the path of a checkpoint itself, where `path` may be a link to it (`save_last="link"`)."""
    found = resolve_checkpoint_path(path)
    if is_remote(found) or not found.is_symlink():
        return found
    target = found.resolve()  # whose directory keeps the name that the run is known by
    return found.parent / target.name if target.parent == found.parent.resolve() else target


def directory_for(path: Path) -> Path:
    """Return where a save for `path` writes: there, or under a hidden name beside it.

    Raises:
        SaveFailed: a directory with other files is there.
    """
    if is_remote(path) or (is_complete(path) and not path.is_symlink()):
        return path
    if path.is_dir() and not path.is_symlink() and not (path / _SHARDS).exists():
        refuse_target(path, overwrite=True)
    # Lightning takes digits after "hpc_ckpt_", anywhere in a name, for a version.
    return hidden_name(path.with_name(path.name.replace("_", "-")))


def put_in_place(saved: Path, path: Path, fsync: bool) -> None:
    """Give a complete checkpoint its name; what had it before stays beside it until then, under a name that tells.

    Raises:
        OSError: it cannot be renamed.
    """
    if saved == path:
        return
    before = None
    if path.is_symlink():
        path.unlink()  # what it leads to stays
    elif path.exists():
        before = path.with_name(f"{path.stem}-replaced-{uuid.uuid4().hex[:8]}{path.suffix}")
        os.rename(path, before)
    try:
        os.rename(saved, path)
    except BaseException:
        if before is not None:
            os.rename(before, path)
        raise
    if fsync:
        sync_directory(path.parent)
    if before is not None:
        TorchCheckpointIO().remove_checkpoint(str(before))


def make_parents(path: Path, fsync: bool) -> None:
    """Make the directory that a checkpoint lies in."""
    if not is_remote(path):
        make_directory(path.parent, fsync)


def remove(path: PathLike) -> None:
    """Remove whatever is at a path, as Lightning's retention asks; files that other checkpoints need stay.

    Of a link, the link alone is removed.
    """
    found = resolve_checkpoint_path(path)
    if not is_remote(found) and found.is_symlink():
        found.unlink()
        return
    try:
        if is_complete(found):
            removal.remove_checkpoint(found)
            if not is_remote(found):
                with suppress(OSError):
                    found.rmdir()
            return
    except DSQError as error:
        if is_remote(found):  # others may need its files, which cannot be told now
            warn(f"'{path}' was not removed: {error}")
            return
    if is_remote(found):
        TorchCheckpointIO().remove_checkpoint(str(path))
    elif any(found.glob(f"*/{MANIFEST}")):
        warn(f"'{path}' was not removed: it holds checkpoints itself")
    elif found.is_dir():
        shutil.rmtree(found)
    else:
        found.unlink(missing_ok=True)
