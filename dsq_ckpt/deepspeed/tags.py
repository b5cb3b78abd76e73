"""Tags of DeepSpeed: agreement of all ranks on one tag, and the files that lie beside tags."""

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

_RESERVED_NAMES = frozenset({"latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py"})
"""Files that DeepSpeed writes beside tags."""
_MAX_LISTED_TAGS = 8
_warned_directories = set[str]()  # directories for which a warning of different tags was issued


def agree_on_tag(
    comm: Communicator, save_dir: str, tag: str, deepspeed_refuses: bool, directory_error: OSError | None = None
) -> str:
    """Return the tag of rank 0, which all ranks save to; collective.

    A checkpoint is one directory. DeepSpeed itself writes different tags, such as times of day, to several directories,
    and `latest` names only one of them.

    Args:
        comm: communicator of all ranks.
        save_dir: directory for checkpoints of this rank.
        tag: tag of this rank.
        deepspeed_refuses: True if DeepSpeed raises an error for different tags (`"tag_validation": "FAIL"`).
        directory_error: error of creating the directory on this rank.

    Raises:
        ConfigError: on all ranks, if the directory is a URL.
        SaveFailed: on all ranks, if any rank cannot create the directory, if directories differ on one host, or if the
            tag is no valid name of a subdirectory.
    """
    def prepare_tag() -> tuple[str, str, str]:
        _refuse_url(save_dir)
        if directory_error is not None:
            raise SaveFailed(f"rank {comm.rank}: the directory for checkpoints cannot be made: {directory_error}")
        return str(tag), platform.node(), os.path.realpath(save_dir)

    gathered = gather_from_all_ranks(comm, prepare_tag)
    tag_of_rank_0, host, directory = gathered[0]
    if any(path != directory for _, name, path in gathered if name == host):
        paths = _format_by_rank([path for *_, path in gathered])
        raise SaveFailed(
            f"save_dir differs by rank ({paths}): a checkpoint is one directory; pass the same one on all ranks. "
            "Nothing was written"
        )
    if problem := _find_tag_problem(tag_of_rank_0):
        raise SaveFailed(f"the tag {tag_of_rank_0!r} {problem}; choose another tag. Nothing was written")
    tags = [name for name, *_ in gathered]
    if set(tags) != {tag_of_rank_0} and not deepspeed_refuses and directory not in _warned_directories:
        _warned_directories.add(directory)
        warn(
            f"the tag differs by rank ({_format_by_rank(tags)}): a checkpoint is one directory, so all ranks save to "
            f"'{tag_of_rank_0}', the tag of rank 0; pass the same tag on all ranks", rank=comm.rank,
        )
    return tag_of_rank_0


def resolve_tag(comm: Communicator, load_dir: str, latest: str, tag: str | None) -> str | None:
    """Return the tag to load: the argument, or else the content of the file `latest`; collective.

    Args:
        comm: communicator of all ranks.
        load_dir: directory for checkpoints.
        latest: name of the file with the latest tag in `load_dir`.
        tag: tag that was passed on this rank, or None.

    Returns:
        The tag; None on all ranks if none was passed and the file does not exist.

    Raises:
        ConfigError: on all ranks, if the directory is a URL.
        LoadFailed: on all ranks, if any rank cannot read the file, or only some ranks have a tag or see the file.
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

    tags = gather_from_all_ranks(comm, lambda: (read(), platform.node()), LoadFailed)
    has_tag = [tag_value is not None for tag_value, _ in tags]
    if any(has_tag) and not all(has_tag):
        rank, other = has_tag.index(False), has_tag.index(True)
        raise LoadFailed(
            f"rank {rank} on host {tags[rank][1]} was given no tag and does not see '{file}', and rank {other} on host "
            f"{tags[other][1]} loads '{tags[other][0]}': pass the same tag on all ranks, and let all hosts share one "
            "directory"
        )
    return tags[comm.rank][0]


def write_latest(save_dir: str, tag: str, fsync: bool) -> None:
    """Write a tag to `latest`, atomically.

    The file is a new one, since a copy of the run by `cp -al` shares the old one.

    Raises:
        SaveFailed: the file cannot be written.
    """
    try:
        encoding = locale.getpreferredencoding(False)  # DeepSpeed reads with it
        _replace_file(Path(save_dir, "latest"), tag.encode(encoding), fsync)
    except OSError as error:
        raise SaveFailed(
            f"rank 0: the tag '{tag}' is complete, but 'latest' could not be written: {error}; mend that and save "
            f"again, or load it by tag='{tag}'"
        ) from error


def copy_scripts(scripts: Sequence[tuple[Callable[[str], None], str]], fsync: bool) -> None:
    """Copy the scripts that DeepSpeed puts beside tags, each atomically; unchanged scripts are skipped.

    Args:
        scripts: functions that write scripts to a directory, each with the target directory of its scripts.
        fsync: flush the scripts to the device.
    """
    for write_to, directory in scripts:
        hidden = hidden_name(Path(directory, "scripts"))
        hidden.mkdir()
        try:
            write_to(str(hidden))
            for script in hidden.iterdir():
                _replace_file(Path(directory, script.name), script.read_bytes(), fsync, script.stat().st_mode)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _replace_file(file: Path, content: bytes, fsync: bool, mode: int | None = None) -> None:
    """Write a file or the target of a symbolic link, atomically; keep the mode of an existing file, else set `mode`."""
    target = Path(os.path.realpath(file))
    if target.is_file():
        if target.stat().st_nlink == 1 and target.read_bytes() == content:
            return
        mode = target.stat().st_mode
    with AtomicFile(target, fsync) as atomic_file:
        atomic_file.stream.write(content)
        if mode is not None:
            os.fchmod(atomic_file.stream.fileno(), stat.S_IMODE(mode))
        atomic_file.publish()
    if fsync:
        sync_directory(target.parent)


def find_tag_directory(comm: Communicator, load_dir: str, tag: str) -> Path:
    """Return the directory of a tag, after a check that all ranks load this tag and see the directory; collective.

    Raises:
        LoadFailed: on all ranks, if tags differ by rank, or only some ranks see the directory.
        CheckpointNotFound: on all ranks, if the directory is missing or has no checkpoint; the message lists the tags.
    """
    directory = Path(load_dir, tag).absolute()
    gathered = gather_from_all_ranks(
        comm, lambda: (tag, platform.node(), tag != "" and _has_checkpoint(directory)), LoadFailed
    )
    tags = [name for name, *_ in gathered]
    if len(set(tags)) > 1:
        raise LoadFailed(
            f"the tag to load differs by rank ({_format_by_rank(tags)}), and parts of two checkpoints are no state of "
            f"a run; pass the same tag on all ranks{_describe_tags(load_dir)}"
        )
    has_checkpoint = [found for *_, found in gathered]
    if not any(has_checkpoint):
        state = "is empty" if directory.is_dir() and not any(directory.iterdir()) else "holds no checkpoint"
        message = f"'{directory}' {state if directory.is_dir() else 'does not exist'}"
        if not tag:
            message = f"'{Path(load_dir, 'latest')}' is empty"
        raise CheckpointNotFound(message + _describe_tags(load_dir))
    if not all(has_checkpoint):
        rank, other = has_checkpoint.index(False), has_checkpoint.index(True)
        raise LoadFailed(
            f"rank {rank} on host {gathered[rank][1]} does not see the checkpoint '{directory}', which rank {other} on "
            f"host {gathered[other][1]} sees: all hosts need one shared directory"
        )
    return directory


def list_tags(load_dir: str | os.PathLike[str]) -> list[str]:
    """Return the names of subdirectories with a compressed or plain checkpoint, oldest first."""
    try:
        with os.scandir(load_dir) as entries:
            tags = [
                (entry.stat().st_mtime, entry.name) for entry in entries
                if entry.is_dir() and _has_checkpoint(Path(entry.path))
            ]
    except OSError:
        return []
    return [name for _, name in sorted(tags)]


def _has_checkpoint(directory: Path) -> bool:
    return is_complete(directory) or any(directory.glob("*.pt")) or any(directory.glob("*.dsq"))


def _describe_tags(load_dir: str) -> str:
    """Return the end of a message that lists the existing tags."""
    if not os.path.isdir(load_dir):
        return f"; '{load_dir}' is no directory"
    latest = Path(load_dir, "latest")
    says = f", and 'latest' says '{latest.read_text().strip()}'" if latest.is_file() else ", and there is no 'latest'"
    tags = list_tags(load_dir)
    older = f" and {len(tags) - _MAX_LISTED_TAGS} older" if len(tags) > _MAX_LISTED_TAGS else ""
    listed = ", ".join(f"'{name}'" for name in tags[-_MAX_LISTED_TAGS:]) + older
    return f"; '{load_dir}' has {'the tags ' + listed if tags else 'no tags'}{says}"


def _refuse_url(directory: str | os.PathLike[str]) -> None:
    """Refuse a URL, which DeepSpeed would take for a path below the working directory.

    Raises:
        ConfigError: `directory` is a URL, including the URL of a local file.
    """
    if is_url(directory):
        raise ConfigError(
            f"path {os.fspath(directory)!r}: expected a directory of the local file system, as DeepSpeed writes to no "
            "other; `dsq cp` copies a run to an object store and back"
        )


def _find_tag_problem(tag: str) -> str | None:
    """Return why a tag cannot name a directory below `save_dir`, or None if it can."""
    if tag in _RESERVED_NAMES:
        return "is the name of a file that DeepSpeed writes beside tags"
    if not tag or set(tag.split("/")) & {"", ".", ".."}:
        return "is not the name of a directory below save_dir"
    if tag != tag.strip() or not tag.isprintable():
        return "does not come back from the file 'latest', which is read without blanks and with one line"
    return None


def _format_by_rank(values: list[str]) -> str:
    shown: Mapping[int, str] = dict(enumerate(values[:4]))
    ellipsis = ", ..." if len(values) > 4 else ""
    return ", ".join(f"rank {rank}: '{value}'" for rank, value in shown.items()) + ellipsis
