"""Files of another format in a checkpoint: published together with its manifest, put back where that does not happen.

DeepSpeed's files have names of their own, which a second save of a tag gives to other files. The old ones step aside
before, as links that name the save they belong to, and go when the new manifest is there. If it never comes, because
the save fails or is killed in between, `restore` brings them back. Such names are not ours alone, so before they are
given a journal tells which files they are: by it, and by nothing else, `dsq gc` may remove them, and what stepped
aside may replace them.

A tag that DeepSpeed wrote itself has no manifest. Its files step aside before anything is written to its directory:
links with this mark say that without a manifest it is that tag, and all that is ours in it is of a save that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.core.regular import read_regular
from dsq_ckpt.errors import CheckpointNotFound, DSQError, LoadFailed
from dsq_ckpt.storage.atomic_io import flush, naming, sync_directory
from dsq_ckpt.storage.container import FileInfo, file_checksum
from dsq_ckpt.storage.links import link_or_copy, replace_by_link
from dsq_ckpt.storage.manifest import Manifest, is_complete

JOURNAL = ".attachments"
PLAIN = "plain"
"""In the names of files that stepped aside, in place of the save id: of no save of ours."""
_MOST = 1 << 26


def journal(directory: Path, save_id: str, rank: int, files: Sequence[FileInfo], fsync: bool) -> None:
    """Note what files are about to be given their names by a rank of a save; nothing for none."""
    if files:
        with open(directory / f".{save_id}-{rank:05d}{JOURNAL}", "x") as stream:
            json.dump({file.name: [file.size, file.checksum] for file in files}, stream)
            flush(stream, fsync)
        if fsync:
            sync_directory(directory)


def journaled(directory: Path, save_id: str = "*") -> set[str]:
    """Return names of files that a save which did not complete gave, this one or any, and that are still what it wrote.

    Raises:
        OSError: a file cannot be read, so that nobody knows whose it is.
    """
    found = set()
    for path in directory.glob(f".{save_id}-*{JOURNAL}"):
        # Of a save that was killed before it gave names, or of a file that is gone.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, ValueError, AttributeError, DSQError):
            for name, told in json.loads(read_regular(path, _MOST)).items():
                if "/" not in name and [*file_checksum(directory / name)] == told:
                    found.add(name)
    return found


class _Noting:
    """A stream that remembers why it could not be written to: `torch.save` only says that something is missing."""

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


def write(path: Path, work: Callable[[IO[bytes]], None], fsync: bool) -> None:
    """Write a new file by `work`, and flush it to the device if `fsync`.

    Raises:
        OSError: the file cannot be written; it is named.
    """
    with naming(path, "while it was written"), open(path, "xb") as stream:
        noting = _Noting(stream)
        try:
            work(cast(IO[bytes], noting))
        except Exception:
            if noting.failure is not None:
                raise noting.failure from None
            raise
        flush(stream, fsync)


def keep_plain(directory: Path, fsync: bool) -> None:
    """Let the files of a tag that DeepSpeed wrote itself step aside, before a save writes to its directory.

    Raises:
        OSError: a file cannot be given another name.
    """
    if not directory.is_dir():
        return
    restore(directory)
    if is_complete(directory):  # its files step aside when others take their names
        return
    of_a_save = journaled(directory)
    names = [path.name for path in directory.glob("[!.]*.pt") if path.name not in of_a_save]
    for name in names:
        link_or_copy(directory / name, _aside(directory, name, PLAIN), fsync)
    if names and fsync:
        sync_directory(directory)


def plain_aside(directory: Path) -> dict[str, Path]:
    """Return the files of a tag that DeepSpeed wrote itself, by their names, which a save let step aside."""
    return _set_aside(directory, PLAIN)


def _set_aside(directory: Path, mark: str) -> dict[str, Path]:
    end = f".{mark}.old"
    return {path.name[1 : -len(end)]: path for path in sorted(directory.glob(f".*{end}"))}


def replaced_plain(directory: Path) -> dict[str, Path]:
    """Return those of `plain_aside` that are the tag's files: a save gave their names to others, or nothing has them.

    Any other file of such a name was put there since, by DeepSpeed or by hand, and is the tag's.

    Raises:
        OSError: a file cannot be read.
    """
    aside = plain_aside(directory)
    of_a_save = journaled(directory) if aside else set()
    return {name: path for name, path in aside.items() if name in of_a_save or not (directory / name).exists()}


def publish(directory: Path, hidden: Mapping[str, Path], fsync: bool) -> None:
    """Give finished files their names; what had such a name in the checkpoint that is there steps aside first."""
    try:
        save_id = Manifest.read(directory).save_id
    except LoadFailed:
        raise
    except DSQError:  # nothing to go back to
        save_id = None
    for name in hidden:
        if save_id is not None and (directory / name).exists():
            # Not what stepped aside for a save that was killed, if DeepSpeed wrote the file since.
            replace_by_link(directory / name, _aside(directory, name, save_id))
    if fsync and save_id is not None:
        sync_directory(directory)
    for name, temporary in hidden.items():
        os.replace(temporary, directory / name)
    if fsync:
        sync_directory(directory)


def forget(directory: Path, names: Iterable[str]) -> None:
    """Remove the files that stepped aside, and journals, after the new manifest has appeared."""
    for pattern in (*(f".{name}.*.old" for name in names), f".*.{PLAIN}.old", f".*{JOURNAL}"):
        for old in directory.glob(pattern):
            with contextlib.suppress(OSError):
                old.unlink()


def restore(directory: Path, save_id: str = "*") -> None:
    """Bring back files that stepped aside for a save whose manifest never came: this one, or any.

    A file that was put in their place since is newer: it stays.

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
    # Not only what the manifest names, as it names it: DeepSpeed may have written over the checkpoint itself.
    asides = _set_aside(directory, manifest.save_id)
    of_a_save = journaled(directory, save_id) if asides else set()
    for name, aside in asides.items():
        if name in of_a_save or not (directory / name).exists():
            os.replace(aside, directory / name)
    if asides:
        sync_directory(directory)


def _restore_plain(directory: Path, save_id: str) -> None:
    replaced, newer = replaced_plain(directory), []
    others = journaled(directory) - journaled(directory, save_id) if replaced else set()
    for name, aside in plain_aside(directory).items():  # which stays, and says what is here
        target = directory / name
        if name in others:
            continue
        if name in replaced:
            replace_by_link(aside, target)
        elif not (aside.samefile(target) or file_checksum(aside) == file_checksum(target)):
            replace_by_link(target, aside)
            newer.append(name)
    if replaced or newer:
        sync_directory(directory)
    if newer:
        warn_safely(
            f"'{directory}' was written again after a save over it was killed: what is there now stays, such as "
            f"'{newer[0]}', and what was there before that save is gone"
        )


def _aside(directory: Path, name: str, save_id: str) -> Path:
    return directory / f".{name}.{save_id}.old"
