"""Attachments: files of another format, published together with the manifest and restored if the save fails.

DeepSpeed's files have fixed names, which a second save of a tag replaces. Before that, the old files are backed up as
hidden links whose names contain their save id. The backups are removed after the commit of the new manifest. If the
save fails or is killed before, `restore_backups` puts the old files back. DeepSpeed itself writes files of these names,
too, so a save lists its files with their checksums in a journal before it publishes them: only files listed in a
journal may be removed by `dsq gc` or replaced by a backup.

A tag that DeepSpeed wrote itself has no manifest. Its files are backed up before anything is written to its directory.
Backups with the mark `PLAIN` show that the directory, as long as it has no manifest, is that tag, and that all files of
this package in it belong to a save that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.core.regular_files import read_regular
from dsq_ckpt.core.strict_json import parse_strict_json
from dsq_ckpt.errors import CheckpointNotFound, DSQError, LoadFailed
from dsq_ckpt.storage.atomic_io import add_path_to_errors, flush, sync_directory
from dsq_ckpt.storage.container import FileInfo, checksum_file
from dsq_ckpt.storage.links import link_or_copy, replace_by_link
from dsq_ckpt.storage.manifest import Manifest, is_complete

JOURNAL = ".attachments"
PLAIN = "plain"
"""Mark in the names of backups of DeepSpeed's own files, in place of the save id."""
_MAX_JOURNAL_BYTES = 1 << 26


def write_journal(directory: Path, save_id: str, rank: int, files: Sequence[FileInfo], fsync: bool) -> None:
    """Write the journal of the files that a rank is about to publish, if there are any."""
    if files:
        with open(directory / f".{save_id}-{rank:05d}{JOURNAL}", "x") as stream:
            json.dump({file.name: [file.size, file.checksum] for file in files}, stream)
            flush(stream, fsync)
        if fsync:
            sync_directory(directory)


def find_journaled_files(directory: Path, save_id: str = "*") -> set[str]:
    """Return the unchanged files that an incomplete save published: the save `save_id`, or any by default.

    Raises:
        OSError: a file cannot be read, so that its origin is unknown.
    """
    names = set()
    for path in directory.glob(f".{save_id}-*{JOURNAL}"):
        # The save was killed before it published, or a file is gone.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, ValueError, AttributeError, DSQError):
            for name, recorded in parse_strict_json(read_regular(path, _MAX_JOURNAL_BYTES)).items():
                if "/" not in name and [*checksum_file(directory / name)] == recorded:
                    names.add(name)
    return names


class _ErrorRecorder:
    """Stream that records the error of a failed write, which `torch.save` does not report."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_attachment(path: Path, work: Callable[[IO[bytes]], None], fsync: bool) -> None:
    """Write a new file by `work` and, with `fsync`, flush it to the device.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    with add_path_to_errors(path, "while it was written"), open(path, "xb") as stream:
        noting = _ErrorRecorder(stream)
        try:
            work(cast(IO[bytes], noting))
        except Exception:
            if noting.failure is not None:
                raise noting.failure from None
            raise
        flush(stream, fsync)


def back_up_plain_tag(directory: Path, fsync: bool) -> None:
    """Back up the files of a tag written by DeepSpeed itself, before a save writes to its directory.

    Raises:
        OSError: a file cannot be linked or copied.
    """
    if not directory.is_dir():
        return
    restore_backups(directory)
    if is_complete(directory):  # `publish` backs up its files
        return
    of_a_save = find_journaled_files(directory)
    names = [path.name for path in directory.glob("[!.]*.pt") if path.name not in of_a_save]
    for name in names:
        link_or_copy(directory / name, _get_backup_path(directory, name, PLAIN), fsync)
    if names and fsync:
        sync_directory(directory)


def find_plain_backups(directory: Path) -> dict[str, Path]:
    """Return the backups of a tag written by DeepSpeed itself, by the names of its files."""
    return _find_backups(directory, PLAIN)


def _find_backups(directory: Path, mark: str) -> dict[str, Path]:
    end = f".{mark}.old"
    return {path.name[1 : -len(end)]: path for path in sorted(directory.glob(f".*{end}"))}


def find_replaced_plain(directory: Path) -> dict[str, Path]:
    """Return the backups of `find_plain_backups` whose files a save replaced, or no longer exist.

    Any other file of such a name was written since by DeepSpeed or a user, and belongs to the tag.

    Raises:
        OSError: a file cannot be read.
    """
    backups = find_plain_backups(directory)
    of_a_save = find_journaled_files(directory) if backups else set()
    return {name: path for name, path in backups.items() if name in of_a_save or not (directory / name).exists()}


def publish_attachments(directory: Path, hidden: Mapping[str, Path], fsync: bool) -> None:
    """Rename finished files to their final names. Back up files of these names in a complete checkpoint first."""
    try:
        save_id = Manifest.read(directory).save_id
    except LoadFailed:
        raise
    except DSQError:  # there is no checkpoint to restore
        save_id = None
    for name in hidden:
        if save_id is not None and (directory / name).exists():
            # Replace the backup of a killed save: DeepSpeed may have written the file since.
            replace_by_link(directory / name, _get_backup_path(directory, name, save_id))
    if fsync and save_id is not None:
        sync_directory(directory)
    for name, temporary in hidden.items():
        os.replace(temporary, directory / name)
    if fsync:
        sync_directory(directory)


def remove_backups(directory: Path, names: Iterable[str]) -> None:
    """Remove backups and journals after the commit of the new manifest."""
    for pattern in (*(f".{name}.*.old" for name in names), f".*.{PLAIN}.old", f".*{JOURNAL}"):
        for old in directory.glob(pattern):
            with contextlib.suppress(OSError):
                old.unlink()


def restore_backups(directory: Path, save_id: str = "*") -> None:
    """Restore the backups of an incomplete save: the save `save_id`, or any by default.

    A file that was written since under the name of a backup is newer and stays.

    Raises:
        OSError: a file cannot be read or renamed.
    """
    try:
        manifest = Manifest.read(directory)
    except CheckpointNotFound:
        _restore_plain(directory, save_id)
        return
    except DSQError:
        return
    # Including backups of files that DeepSpeed itself has overwritten, which the manifest does not list.
    backups = _find_backups(directory, manifest.save_id)
    of_a_save = find_journaled_files(directory, save_id) if backups else set()
    for name, backup in backups.items():
        if name in of_a_save or not (directory / name).exists():
            os.replace(backup, directory / name)
    if backups:
        sync_directory(directory)


def _restore_plain(directory: Path, save_id: str) -> None:
    replaced, newer = find_replaced_plain(directory), []
    others = find_journaled_files(directory) - find_journaled_files(directory, save_id) if replaced else set()
    for name, backup in find_plain_backups(directory).items():  # it stays, and marks the directory as DeepSpeed's tag
        target = directory / name
        if name in others:
            continue
        if name in replaced:
            replace_by_link(backup, target)
        elif not (backup.samefile(target) or checksum_file(backup) == checksum_file(target)):
            replace_by_link(target, backup)
            newer.append(name)
    if replaced or newer:
        sync_directory(directory)
    if newer:
        warn_safely(
            f"'{directory}' was written again after a save over it was killed: what is there now stays, such as "
            f"'{newer[0]}', and what was there before that save is gone"
        )


def _get_backup_path(directory: Path, name: str, save_id: str) -> Path:
    return directory / f".{name}.{save_id}.old"
