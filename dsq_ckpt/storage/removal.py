"""Removal of a checkpoint: its manifest first, then the files that no other checkpoint of the run needs.

Locally every checkpoint has its own links to the files that it needs, so all files of the checkpoint are removed; the
space of a file is freed with its last link. On an object store files stay while other checkpoints refer to them
(`references`). Companion files of a library are removed, too; files of other programs stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import ConfigError, CorruptCheckpoint
from dsq_ckpt.storage import references
from dsq_ckpt.storage.backend import get_storage, read_sizes
from dsq_ckpt.storage.companion_files import list_other_files
from dsq_ckpt.storage.gc import is_dsq_file
from dsq_ckpt.storage.links import compute_freed_space
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from dsq_ckpt.storage.paths import require_checkpoint_path, to_absolute
from dsq_ckpt.storage.runs import canonicalize


class RemovalResult(NamedTuple):
    """Result of a removal, or of its dry run.

    Attributes:
        path: path of the checkpoint.
        files: its removed files, including companion files, without the manifest.
        bytes: freed bytes: those of `files` without `linked`.
        kept: its files that other checkpoints of the run need.
        linked: local files in `files` whose bytes stay because of other links, such as those of other checkpoints.
        others: files of other programs in its directory, which stay.
        save_id: its save id.
    """

    path: Path
    files: list[Path]
    bytes: int
    kept: list[Path]
    linked: list[Path]
    others: list[Path]
    save_id: str


def remove_checkpoint(path: Path, dry_run: bool = False, *, after: Sequence[RemovalResult] = ()) -> RemovalResult:
    """Remove a checkpoint. All other checkpoints stay complete.

    Its directory is removed unless it has files of other programs. The manifest is removed first, so that the rest
    cannot be loaded if the removal fails; companion files are next, since `dsq gc` removes all other files.

    Args:
        path: a complete checkpoint.
        dry_run: return the result without removing anything.
        after: results of earlier removals, in a dry run of several.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: there is no checkpoint, or its manifest cannot be read.
        ConfigError: DeepSpeed's file `latest` names it.
        DSQError: the manifest of another checkpoint of the run cannot be read, so any file may be needed.
        OSError: a file cannot be removed; `dsq gc` removes the remaining files.
    """
    path = canonicalize(require_checkpoint_path(path))
    if path.is_symlink():
        raise ConfigError(f"'{path}' is a link to a checkpoint; name the checkpoint itself")
    manifest, storage = _read_manifest(path), get_storage(path)
    _refuse_latest(path)
    if is_remote(path):
        references.collect_needed_files(path.parent)  # raise before the removal if a manifest is unreadable
    others = list_other_files(path, manifest)
    named_beside = {path / name for name in manifest.beside} & set(others)  # not below a linked directory
    library = {file: size for file, size in read_sizes(sorted(named_beside)).items() if isinstance(size, int)}
    if not dry_run:
        storage.remove(path / MANIFEST)
        storage.flush(path)
    named = {file.path_in(path): file.size for file in manifest.files}
    if is_remote(path):
        excluded = {(path, manifest.save_id), *((removal.path, removal.save_id) for removal in after)}
        needed = references.select_needed_files(path.parent, named, excluded)
    else:
        needed = {file for file in named if file.parent != path}
        needed |= {
            path / name for name in references.find_held_files(path, {removal.path for removal in after})
        } & set(named)
    gone = library | {file: size for file, size in named.items() if file not in needed}
    linked, freed = set[Path](), sum(gone.values())
    if not is_remote(path):
        linked, freed = compute_freed_space(gone, (file for removal in after for file in removal.files))
    if not dry_run:
        references.remove_files(library)
        _remove_empty(directory for file in library for directory in file.parents if path in directory.parents)
        references.remove_files(gone.keys() - library.keys())
        _remove_empty([path])
    stay = [file for file in others if file not in library]
    return RemovalResult(path, sorted(gone), freed, sorted(needed), sorted(linked), stay, manifest.save_id)


def _remove_empty(directories: Iterable[Path]) -> None:
    """Remove local directories that are empty."""
    for directory in sorted(set(directories), reverse=True):
        if not is_remote(directory):
            with suppress(OSError):  # not empty: something else lives there
                directory.rmdir()


def _read_manifest(path: Path) -> Manifest:
    """Return the manifest; if it is corrupt, raise an error that explains how to remove the checkpoint."""
    try:
        return Manifest.read(path)
    except CorruptCheckpoint as error:
        if is_remote(path) or not any(is_dsq_file(entry.name) for entry in get_storage(path).list_entries(path)):
            raise
        raise CorruptCheckpoint(
            f"{error}; if it is to go, delete the directory, '{to_absolute(path)}': other checkpoints have links of "
            "their own to the files that they need"
        ) from error


def _refuse_latest(path: Path) -> None:
    """Raise ConfigError for the tag that DeepSpeed would load next."""
    if is_remote(path):
        return
    with suppress(OSError):
        if (path.parent / "latest").read_text().strip() == path.name:
            raise ConfigError(f"'{path.parent / 'latest'}' names '{path.name}' for DeepSpeed to load; change it first")
