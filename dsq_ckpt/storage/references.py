"""References to files of ancestors on object stores: commit, removal, and the files that are still needed.

There are no locks. Two rules keep every file that a complete checkpoint needs:

* A save writes its manifest, and then checks that the manifest of its parent is still the one it was coded against.
* A removal or replacement first removes or replaces the manifest, then reads which files the manifests of the run
  list, and deletes the others.

In either order of the two, the save finds its parent gone and removes its manifest, or the removal finds the save's
manifest and keeps the files. Ancestors before the parent are listed in the parent's manifest. Every data key belongs to
one save and is never overwritten. Listings must be strongly consistent, as those of S3, Google Cloud Storage and Azure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.core.workers import map_concurrently
from dsq_ckpt.errors import CheckpointExists, DSQError, SaveFailed
from dsq_ckpt.storage.backend import MAX_REQUESTS, get_storage
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, iter_checkpoints
from dsq_ckpt.storage.runs import get_run

_MAX_MANIFEST_BYTES = 1 << 28


def format_concurrent_save(path: Path) -> str:
    """Return the error message for a checkpoint that another save committed first."""
    return (
        f"another save completed a checkpoint in '{path}' while this one was written; choose another path, or "
        "overwrite it (overwrite=True)"
    )


def commit_manifest(path: Path, manifest: Manifest, overwrite: bool, parent: tuple[Path, str] | None) -> None:
    """Commit a checkpoint on an object store, and remove files of a replaced checkpoint that no other one needs.

    Args:
        path: path of the checkpoint.
        manifest: its manifest.
        overwrite: replace a checkpoint at `path`.
        parent: path and save id of its parent.

    Raises:
        CheckpointExists: another save committed a checkpoint here meanwhile.
        SaveFailed: the parent, which may be at `path` itself, was removed or replaced meanwhile.
    """
    before = try_read_manifest(path) if overwrite else None
    if parent is not None and parent[0] == path and (before is None or before.save_id != parent[1]):
        raise SaveFailed(
            f"the checkpoint that was at '{path}', which the new one was coded against, was removed or replaced "
            "meanwhile, and with it files may be gone that the new one needs: it was not committed; save again"
        )
    try:
        manifest.write(path, exclusive=not overwrite, fsync=False)
    except FileExistsError as error:
        raise CheckpointExists(format_concurrent_save(path)) from error
    except OSError:
        replaced = try_read_manifest(path)
        if replaced is None or replaced.save_id != manifest.save_id:  # otherwise only the response was lost
            raise
    if parent is not None and parent[0] != path:
        try:
            replaced_id = Manifest.read(parent[0]).save_id
            problem = None if replaced_id == parent[1] else f"was replaced by save {replaced_id}"
        except DSQError as error:
            problem = f"cannot be read any more ({error})"
        if problem is not None:
            if before is None:
                get_storage(path).remove(path / MANIFEST)
            else:
                before.write(path, exclusive=False, fsync=False)
            raise SaveFailed(
                f"the parent checkpoint '{parent[0]}' {problem} while '{path}' was saved, and with it files may be "
                "gone that this one needs: it was not committed; save again"
            )
    if before is not None:
        remove_unneeded_files(path, {file.path_in(path) for file in before.files})


def try_read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None if there is none that can be read."""
    with suppress(DSQError):  # files of an unreadable checkpoint are for `dsq gc`
        return Manifest.read(path)
    return None


def collect_needed_files(run: Path) -> dict[str, set[str]]:
    """Return the names of the files that the complete checkpoints of a run need, by the directory that holds them.

    Raises:
        DSQError: a manifest cannot be read, so any file may be needed.
    """
    needed: dict[str, set[str]] = defaultdict(set)
    for path, manifest in iter_checkpoints(run):
        for file in manifest.files:
            needed[file.held_by or path.name].add(file.name)
    return needed


def select_needed_files(run: Path, files: Iterable[Path], excluded: Container[tuple[Path, str]]) -> set[Path]:
    """Return the files that complete checkpoints of a run need, except the checkpoints in `excluded`.

    Args:
        run: run directory.
        files: files to select from.
        excluded: path and save id of each checkpoint to ignore; another save at the same path is not ignored.

    Raises:
        DSQError: a manifest cannot be read, so any file may be needed.
    """
    others = {
        file.path_in(path) for path, manifest in iter_checkpoints(run) if (path, manifest.save_id) not in excluded
        for file in manifest.files
    }
    return others & set(files)


def find_held_files(directory: Path, excluded: Container[Path] = ()) -> set[str]:
    """Return the names of files in a local checkpoint's directory that other manifests of the run refer to.

    There are such files only in a run copied from an object store by other programs. Unreadable manifests, and the
    checkpoints in `excluded`, are ignored.
    """
    names: set[str] = set()
    storage, run = get_storage(directory), directory.absolute().parent
    for entry in storage.list_entries(run):
        if entry.is_directory and entry.name != directory.name and run / entry.name not in excluded:
            with suppress(OSError, DSQError):
                if b'"held_by"' in storage.read(run / entry.name / MANIFEST, _MAX_MANIFEST_BYTES):
                    files = Manifest.read(run / entry.name).files
                    names |= {file.name for file in files if file.held_by == directory.name}
    return names


def remove_files(files: Iterable[Path]) -> None:
    """Remove files by concurrent requests.

    Raises:
        OSError: a file cannot be removed.
    """
    map_concurrently(lambda file: get_storage(file).remove(file), files, MAX_REQUESTS)


def remove_unneeded_files(path: Path, files: Iterable[Path]) -> None:
    """Remove the files of a replaced checkpoint, also those of removed ancestors, that no checkpoint of the run needs.

    Files that cannot be removed, or all of them if a manifest is unreadable, are left to `dsq gc` with a warning.
    """
    try:
        needed = collect_needed_files(get_run(path))
        remove_files(file for file in sorted(files) if file.name not in needed[file.parent.name])
    except (DSQError, OSError) as error:
        warn_safely(f"files of '{path}' that are not needed any more were not deleted: {error}")
