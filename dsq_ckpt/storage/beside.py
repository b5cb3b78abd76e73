"""Files beside a checkpoint: those of a library that belong to it, which its manifest names, and those of others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage.atomic_io import flush, is_hidden, sync_directory
from dsq_ckpt.storage.backend import storage_of
from dsq_ckpt.storage.gc import HARMLESS, is_ours
from dsq_ckpt.storage.manifest import MANIFEST, Manifest

LIBRARY = re.compile(
    r"(?:pytorch_model|model|adapter_model|adapter_config|optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|"
    r"random_states|custom_checkpoint|trainer_state|training_args)"
    r"(?:[_-](?:fsdp|of|(?:rank)?\d+))*(?:\.(?:bin|pt|pth|pkl|safetensors|index|json))*"
)
"""Names of state that Trainer and Accelerate write and load."""


def files_below(directory: Path) -> Iterator[Path]:
    """Yield the files in a directory and below it, and directories that are empty; on an object store those in it."""
    if is_remote(directory):
        yield from (directory / one.name for one in storage_of(directory).entries(directory) if not one.directory)
        return
    for entry in sorted(directory.iterdir()):
        if entry.is_symlink() or not entry.is_dir() or not any(entry.iterdir()):
            yield entry
        else:
            yield from files_below(entry)


def of_others(directory: Path, manifest: Manifest) -> list[Path]:
    """Return what is in a checkpoint's directory, or below it, and is neither ours nor named by the manifest."""
    named = {MANIFEST, *(file.name for file in manifest.files)}
    return [
        file for file in files_below(directory)
        if not HARMLESS.fullmatch(file.name)
        and (file.parent != directory or not (file.name in named or is_ours(file.name)))
    ]


def missing(directory: Path, manifest: Manifest, there: Container[str]) -> list[str]:
    """Return which files of a library are not there, given the names in the directory of the checkpoint.

    Copies on an object store have none of the files in directories below; `dsq cp` says so when it makes them.
    """
    return [
        name for name in manifest.beside
        if (not is_remote(directory) and not (directory / name).exists() if "/" in name else name not in there)
    ]


def lost_its_manifest(directory: Path) -> bool:
    """Return whether a directory has files of ours and of a library, and no manifest.

    Such a directory got its name when it was complete, so this is no save under way. On an object store it may be a
    copy under way.
    """
    if is_remote(directory) or is_hidden(directory.name):
        return False
    names = os.listdir(directory)
    return MANIFEST not in names and any(map(is_ours, names)) and any(map(LIBRARY.fullmatch, names))


def copy_others(source: Path, target: Path, but: Container[str]) -> Iterator[Path]:
    """Copy what others wrote into a checkpoint's directory, and below it, where no such file is; yield what is made.

    Args:
        source, target: the directories.
        but: paths in the directory, with slashes, that are not copied.

    Yields:
        What will be made in the target, before it is: files, and directories with all that is in them.
    """
    for file in files_below(source):
        path = file.relative_to(source)
        first = path.parts[0]
        if first == MANIFEST or is_ours(first) or is_hidden(first) or HARMLESS.fullmatch(file.name):
            continue
        if path.as_posix() in but or os.path.lexists(target / path):
            continue
        yield target / first
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() and not file.is_symlink():
            (target / path).mkdir()
        else:
            shutil.copy2(file, target / path, follow_symlinks=False)


def remove_trees(paths: Iterable[Path]) -> None:
    """Remove files and directories with all that is in them, as far as that can be done."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def flush_others(directory: Path, but: Container[str]) -> None:
    """Flush all files in a directory and below it, but for some names, and the directories.

    Raises:
        OSError: one cannot be flushed.
    """
    for place, _, names in os.walk(directory):
        for name in names:
            if name not in but and not os.path.islink(file := os.path.join(place, name)):
                with open(file, "rb") as stream:
                    flush(stream, True)
        sync_directory(Path(place))
