"""Whether another job saves into a run directory too.

`latest` would return the checkpoints of either, and what a trainer removes to keep the newest few may be the other's.
No clock is asked, since those of hosts differ: another job's are checkpoints that this process neither saved nor
loaded, and that were not there at its first save. Such may be somebody's exports; two of which one was saved after the
other, as each names those before it, are of a job.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.distributed.job import size_of_job
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import Manifest, is_complete
from dsq_ckpt.storage.runs import get_run


@dataclass
class _Watch:
    """A run directory that this process saves to.

    Attributes:
        names: names in it that need not be looked at: they were there at the first save, or are its own.
        foreign: save ids of others.
        told: a warning was given.
    """

    names: set[str]
    foreign: set[str] = field(default_factory=set)
    told: bool = False


_own: set[str] = set()  # save ids of this process, whichever history they are in
_watched: dict[Path, _Watch] = {}
_shared: set[Path] = set()  # where checkpointing processes of this job save too


def note_own(path: Path, save_id: str) -> None:
    """Note a checkpoint that this process saves."""
    _own.add(save_id)
    if (watch := _watched.get(get_run(path))) is not None:
        watch.names.add(path.name)


def is_own(save_id: str) -> bool:
    """Return whether this process made a checkpoint."""
    return save_id in _own


def note_loaded(path: Path, save_id: str) -> None:
    """Note a checkpoint that this process loaded; of another one, this process goes on from what is there now."""
    if not is_own(save_id):
        _watched.pop(get_run(path), None)


def share(run: Path) -> None:
    """Note that checkpointing processes of this job save into a run directory, too."""
    _shared.add(get_run(run / "any"))


def forget(run: Path | None = None) -> None:
    """Forget a run directory, or all."""
    for known in [run] if run is not None else list(_watched):
        _watched.pop(known, None)


def look(path: Path, ranks: int) -> None:
    """Warn, once for a run directory, if another job saves there; on the coordinator, before a save.

    Args:
        path: directory of the new checkpoint.
        ranks: number of ranks that save; where they are not the whole job, others of the job may save by themselves.
    """
    run = get_run(path)
    watch = _watched.get(run)
    if ranks < size_of_job() or run in _shared or (watch is not None and watch.told):
        return
    try:
        names = _names(run)
    except OSError:
        return
    if watch is None:
        _watched[run] = _Watch(names | {path.name})
        return
    others: dict[str, Manifest] = {}
    for name in sorted(names - watch.names):
        with suppress(DSQError):
            if not is_complete(run / name):
                continue
            manifest = Manifest.read(run / name)
            if is_own(manifest.save_id):  # renamed
                watch.names.add(name)
            else:
                others[name] = manifest
    watch.foreign.update(manifest.save_id for manifest in others.values())
    later = next((name for name, manifest in others.items() if manifest.get_older_save_ids() & watch.foreign), None)
    if later is not None:
        watch.told = True
        warn(
            f"another job saves into '{run}' too: its checkpoint '{later}' was not there when this process first "
            "saved, and was not loaded since. `latest` may return either job's, and a trainer that keeps the newest "
            "few may remove the other's: give each job a directory of its own"
        )


def _names(run: Path) -> set[str]:
    """Return the names in a run directory, of a local one without a look at each, which may take a round trip."""
    if is_remote(run):
        names = {entry.name for entry in get_storage(run).list_entries(run) if entry.is_directory}
    else:
        names = set(os.listdir(run)) if run.is_dir() else set()
    return {name for name in names if not is_hidden(name)}
