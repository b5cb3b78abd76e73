"""Tags: agreement of all ranks on one, before a save and before a load, and the files that lie beside tags."""

from __future__ import annotations

import locale
import os
import platform
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_url
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, LoadFailed, SaveFailed
from dsq_ckpt.storage.atomic_io import AtomicFile, hidden_name, sync_directory
from dsq_ckpt.storage.manifest import is_complete

_TAKEN = frozenset({"latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py"})
"""Files that DeepSpeed writes beside tags."""
_SHOWN = 8
_told = set[str]()  # directories in which tags that differ by rank were warned of


def agreed_tag(
    comm: Communicator, save_dir: str, tag: str, refused_later: bool, unusable: OSError | None = None
) -> str:
    """Return the tag that all ranks save to: that of rank 0; collective.

    A checkpoint is one directory. DeepSpeed itself spreads tags that differ, such as times of day, over several, of
    which `latest` names one.

    Args:
        comm: communicator of all ranks.
        save_dir: directory for checkpoints of this rank.
        tag: tag of this rank.
        refused_later: True if DeepSpeed raises an error for different tags (`"tag_validation": "FAIL"`).
        unusable: error of creating the directory on this rank.

    Raises:
        ConfigError: on all ranks, if the directory is a URL.
        SaveFailed: on all ranks, if any cannot create the directory, if directories differ on one host, or if the tag
            is no valid name of a subdirectory.
    """
    def own() -> tuple[str, str, str]:
        _refuse_url(save_dir)
        if unusable is not None:
            raise SaveFailed(f"rank {comm.rank}: the directory for checkpoints cannot be made: {unusable}")
        return str(tag), platform.node(), os.path.realpath(save_dir)

    gathered = gather_from_all_ranks(comm, own)
    first, host, directory = gathered[0]
    if any(other != directory for _, name, other in gathered if name == host):
        places = _by_rank([place for *_, place in gathered])
        raise SaveFailed(
            f"save_dir differs by rank ({places}): a checkpoint is one directory; pass the same one on all ranks. "
            "Nothing was written"
        )
    if wrong := _wrong(first):
        raise SaveFailed(f"the tag {first!r} {wrong}; choose another tag. Nothing was written")
    tags = [one for one, *_ in gathered]
    if set(tags) != {first} and not refused_later and directory not in _told:
        _told.add(directory)
        warn(
            f"the tag differs by rank ({_by_rank(tags)}): a checkpoint is one directory, so all ranks save to "
            f"'{first}', the tag of rank 0; pass the same tag on all ranks", rank=comm.rank,
        )
    return first


def tag_to_load(comm: Communicator, load_dir: str, latest: str, tag: str | None) -> str | None:
    """Return this rank's tag, or the one that a file names if none was given; collective.

    Args:
        comm: communicator of all ranks.
        load_dir: directory for checkpoints.
        latest: name of the file in it.
        tag: tag of this rank.

    Returns:
        The tag; None on all ranks if none was given and the file does not exist.

    Raises:
        ConfigError: on all ranks, if the directory is a URL.
        LoadFailed: on all ranks, if any cannot read the file, or only some of them have a tag or see the file.
    """
    file = Path(load_dir, latest)

    def read() -> str | None:
        _refuse_url(load_dir)
        if tag is not None:
            return str(tag)
        try:
            return file.read_text().strip()
        except FileNotFoundError:
            return None

    seen = gather_from_all_ranks(comm, lambda: (read(), platform.node()), LoadFailed)
    there = [found is not None for found, _ in seen]
    if any(there) and not all(there):
        rank, other = there.index(False), there.index(True)
        raise LoadFailed(
            f"rank {rank} on host {seen[rank][1]} was given no tag and does not see '{file}', and rank {other} on host "
            f"{seen[other][1]} loads '{seen[other][0]}': pass the same tag on all ranks, and let all hosts share one "
            "directory"
        )
    return seen[comm.rank][0]


def write_latest(save_dir: str, tag: str, fsync: bool) -> None:
    """Write a tag to `latest`, atomically and as a new file, since a copy of the run by `cp -al` has the old one.

    Raises:
        SaveFailed: it cannot be written.
    """
    try:
        _replace(Path(save_dir, "latest"), tag.encode(locale.getpreferredencoding(False)), fsync)  # as DeepSpeed reads
    except OSError as error:
        raise SaveFailed(
            f"rank 0: the tag '{tag}' is complete, but 'latest' could not be written: {error}; mend that and save "
            f"again, or load it by tag='{tag}'"
        ) from error


def copy_scripts(scripts: Sequence[tuple[Callable[[str], None], str]], fsync: bool) -> None:
    """Copy the scripts that DeepSpeed puts beside tags, each atomically, unless they are there.

    Args:
        scripts: functions that write scripts to a directory, each with the directory where the scripts belong.
        fsync: flush them to the device.
    """
    for write_to, directory in scripts:
        hidden = hidden_name(Path(directory, "scripts"))
        hidden.mkdir()
        try:
            write_to(str(hidden))
            for script in hidden.iterdir():
                _replace(Path(directory, script.name), script.read_bytes(), fsync, script.stat().st_mode)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _replace(file: Path, content: bytes, fsync: bool, mode: int | None = None) -> None:
    """Write a file atomically, where a symbolic link leads; keep the mode of a file that is there, else set `mode`."""
    goal = Path(os.path.realpath(file))
    if goal.is_file():
        if goal.stat().st_nlink == 1 and goal.read_bytes() == content:
            return
        mode = goal.stat().st_mode
    with AtomicFile(goal, fsync) as new:
        new.stream.write(content)
        if mode is not None:
            os.fchmod(new.stream.fileno(), stat.S_IMODE(mode))
        new.publish()
    if fsync:
        sync_directory(goal.parent)


def find_tag(comm: Communicator, load_dir: str, tag: str) -> Path:
    """Return the directory of a tag that all ranks load; collective.

    Raises:
        LoadFailed: on all ranks, if tags differ by rank, or some ranks do not see the directory.
        CheckpointNotFound: on all ranks, if the directory is missing or has no checkpoint; the message lists the tags.
    """
    directory = Path(load_dir, tag).absolute()
    gathered = gather_from_all_ranks(
        comm, lambda: (tag, platform.node(), tag != "" and _holds_checkpoint(directory)), LoadFailed
    )
    tags = [one for one, *_ in gathered]
    if len(set(tags)) > 1:
        raise LoadFailed(
            f"the tag to load differs by rank ({_by_rank(tags)}), and parts of two checkpoints are no state of a run; "
            f"pass the same tag on all ranks{_there(load_dir)}"
        )
    seen = [found for *_, found in gathered]
    if not any(seen):
        what = "is empty" if directory.is_dir() and not any(directory.iterdir()) else "holds no checkpoint"
        where = f"'{directory}' {what if directory.is_dir() else 'does not exist'}"
        if not tag:
            where = f"'{Path(load_dir, 'latest')}' is empty"
        raise CheckpointNotFound(where + _there(load_dir))
    if not all(seen):
        rank = seen.index(False)
        raise LoadFailed(
            f"rank {rank} on host {gathered[rank][1]} does not see the checkpoint '{directory}', which rank "
            f"{seen.index(True)} on host {gathered[seen.index(True)][1]} sees: all hosts need one shared directory"
        )
    return directory


def tags_in(load_dir: str | os.PathLike[str]) -> list[str]:
    """Return the names of directories with a compressed or plain checkpoint, oldest first."""
    try:
        with os.scandir(load_dir) as entries:
            found = [(entry.stat().st_mtime, entry.name) for entry in entries
                     if entry.is_dir() and _holds_checkpoint(Path(entry.path))]
    except OSError:
        return []
    return [name for _, name in sorted(found)]


def _holds_checkpoint(directory: Path) -> bool:
    return is_complete(directory) or any(directory.glob("*.pt")) or any(directory.glob("*.dsq"))


def _there(load_dir: str) -> str:
    """Return the end of a message that lists the existing tags."""
    if not os.path.isdir(load_dir):
        return f"; '{load_dir}' is no directory"
    latest = Path(load_dir, "latest")
    says = f", and 'latest' says '{latest.read_text().strip()}'" if latest.is_file() else ", and there is no 'latest'"
    found = tags_in(load_dir)
    more = f" and {len(found) - _SHOWN} older" if len(found) > _SHOWN else ""
    named = ", ".join(f"'{name}'" for name in found[-_SHOWN:]) + more
    return f"; '{load_dir}' has {'the tags ' + named if found else 'no tags'}{says}"


def _refuse_url(directory: str | os.PathLike[str]) -> None:
    """Refuse what DeepSpeed would take for a path below the working directory.

    Raises:
        ConfigError: it is a URL, also one of a local file.
    """
    if is_url(directory):
        raise ConfigError(
            f"path {os.fspath(directory)!r}: expected a directory of the local file system, as DeepSpeed writes to no "
            "other; `dsq cp` copies a run to an object store and back"
        )


def _wrong(tag: str) -> str | None:
    """Return why a tag cannot name a directory below `save_dir`, or None if it can."""
    if tag in _TAKEN:
        return "is the name of a file that DeepSpeed writes beside tags"
    if not tag or set(tag.split("/")) & {"", ".", ".."}:
        return "is not the name of a directory below save_dir"
    if tag != tag.strip() or not tag.isprintable():
        return "does not come back from the file 'latest', which is read without blanks and with one line"
    return None


def _by_rank(values: list[str]) -> str:
    shown: Mapping[int, str] = dict(enumerate(values[:4]))
    more = ", ..." if len(values) > 4 else ""
    return ", ".join(f"rank {rank}: '{value}'" for rank, value in shown.items()) + more
