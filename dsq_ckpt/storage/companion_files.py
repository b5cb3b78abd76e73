"""Files of other programs in the directory of a checkpoint.

Companion files of a library such as Trainer belong to the checkpoint: the manifest lists them in `beside`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage.atomic_io import flush, is_hidden, sync_directory
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.gc import HARMLESS_NAMES, is_dsq_file
from dsq_ckpt.storage.manifest import MANIFEST, Manifest

LIBRARY_NAMES = re.compile(
    r"(?:pytorch_model|model|adapter_model|adapter_config|optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|"
    r"random_states|custom_checkpoint|trainer_state|training_args)"
    r"(?:[_-](?:fsdp|of|(?:rank)?\d+))*(?:\.(?:bin|pt|pth|pkl|safetensors|index|json))*"
)
"""Names of the state files of Trainer and Accelerate."""


def walk_files(directory: Path) -> Iterator[Path]:
    """Yield the files and the empty directories below a directory; on an object store only the files directly in it."""
    if is_remote(directory):
        entries = get_storage(directory).list_entries(directory)
        yield from (directory / entry.name for entry in entries if not entry.is_directory)
        return
    for entry in sorted(directory.iterdir()):
        if entry.is_symlink() or not entry.is_dir() or not any(entry.iterdir()):
            yield entry
        else:
            yield from walk_files(entry)


def list_other_files(directory: Path, manifest: Manifest) -> list[Path]:
    """Return the files below a checkpoint's directory that are neither dsq files nor listed in the manifest."""
    named = {MANIFEST, *(file.name for file in manifest.files)}
    return [
        file for file in walk_files(directory)
        if not HARMLESS_NAMES.fullmatch(file.name)
        and (file.parent != directory or not (file.name in named or is_dsq_file(file.name)))
    ]


def list_missing_files(directory: Path, manifest: Manifest, existing: Container[str]) -> list[str]:
    """Return the companion files of the manifest that are missing.

    Copies on an object store have no subdirectories, so companion files in these are not checked there. `dsq cp`
    reports them when it makes the copy.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        existing: names in its directory.
    """
    return [
        name for name in manifest.beside
        if (not is_remote(directory) and not (directory / name).exists() if "/" in name else name not in existing)
    ]


def has_lost_manifest(directory: Path) -> bool:
    """Return whether a local directory has dsq files and companion files, but no manifest.

    Such a directory was renamed when it was complete, so this is not a save in progress. False on an object store,
    where it may be a copy in progress.
    """
    if is_remote(directory) or is_hidden(directory.name):
        return False
    names = os.listdir(directory)
    return MANIFEST not in names and any(map(is_dsq_file, names)) and any(map(LIBRARY_NAMES.fullmatch, names))


def copy_other_files(source: Path, target: Path, excluded: Container[str]) -> Iterator[Path]:
    """Copy the files of other programs below `source` that `target` does not have.

    Args:
        source, target: the directories.
        excluded: relative paths, with slashes, that are not copied.

    Yields:
        Each file or top-level directory of the target, before it is created.
    """
    for file in walk_files(source):
        path = file.relative_to(source)
        first = path.parts[0]
        if first == MANIFEST or is_dsq_file(first) or is_hidden(first) or HARMLESS_NAMES.fullmatch(file.name):
            continue
        if path.as_posix() in excluded or os.path.lexists(target / path):
            continue
        yield target / first
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() and not file.is_symlink():
            (target / path).mkdir()
        else:
            shutil.copy2(file, target / path, follow_symlinks=False)


def remove_trees(paths: Iterable[Path]) -> None:
    """Remove files and directory trees, ignoring errors."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def flush_other_files(directory: Path, excluded: Container[str]) -> None:
    """Flush to the device all directories and files below a directory, except files named in `excluded`.

    Raises:
        OSError: a file or directory cannot be flushed.
    """
    for path, _, names in os.walk(directory):
        for name in names:
            if name not in excluded and not os.path.islink(file := os.path.join(path, name)):
                with open(file, "rb") as stream:
                    flush(stream, True)
        sync_directory(Path(path))
