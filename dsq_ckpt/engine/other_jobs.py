"""Detection of another job that saves into the same run directory.

`latest` would return the checkpoints of either job, and a trainer that keeps the newest few could remove those of the
other. Timestamps are not compared, since the clocks of hosts differ. A checkpoint is foreign if this process neither
saved nor loaded it and it was not there at the first save. A single foreign checkpoint may be an export. Two foreign
checkpoints, one of which names the other as an earlier checkpoint, come from a job.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.distributed.job import get_job_size
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import Manifest, is_complete
from dsq_ckpt.storage.runs import get_run


@dataclass
class _RunWatch:
    """A run directory that this process saves to.

    Attributes:
        names: entries that are not checked: present at the first save, or saved by this process.
        foreign: save ids of foreign checkpoints.
        warned: whether the user was warned.
    """

    names: set[str]
    foreign: set[str] = field(default_factory=set)
    warned: bool = False


_own_save_ids: set[str] = set()  # of all histories of this process
_run_watches: dict[Path, _RunWatch] = {}
_shared_runs: set[Path] = set()  # checkpointing processes of this job save there too


def add_own(path: Path, save_id: str) -> None:
    """Record a checkpoint that this process saves."""
    _own_save_ids.add(save_id)
    if (watch := _run_watches.get(get_run(path))) is not None:
        watch.names.add(path.name)


def is_own(save_id: str) -> bool:
    """Return whether this process saved a checkpoint."""
    return save_id in _own_save_ids


def add_loaded(path: Path, save_id: str) -> None:
    """Record a checkpoint that this process loaded; if it is foreign, the run directory is watched anew."""
    if not is_own(save_id):
        _run_watches.pop(get_run(path), None)


def mark_shared(run: Path) -> None:
    """Record that checkpointing processes of this job save into a run directory too."""
    _shared_runs.add(get_run(run / "any"))


def forget_run_watches(run: Path | None = None) -> None:
    """Forget a run directory, or all."""
    for key in [run] if run is not None else list(_run_watches):
        _run_watches.pop(key, None)


def warn_of_other_job(path: Path, ranks: int) -> None:
    """Warn, once for a run directory, if another job saves there; on the coordinator, before a save.

    Args:
        path: directory of the new checkpoint.
        ranks: number of ranks that save; if they are not the whole job, its other processes may save by themselves.
    """
    run = get_run(path)
    watch = _run_watches.get(run)
    if ranks < get_job_size() or run in _shared_runs or (watch is not None and watch.warned):
        return
    try:
        names = _list_names(run)
    except OSError:
        return
    if watch is None:
        _run_watches[run] = _RunWatch(names | {path.name})
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
        watch.warned = True
        warn(
            f"another job saves into '{run}' too: its checkpoint '{later}' was not there when this process first "
            "saved, and was not loaded since. `latest` may return either job's, and a trainer that keeps the newest "
            "few may remove the other's: give each job a directory of its own"
        )


def _list_names(run: Path) -> set[str]:
    """Return the names of entries in a run directory; a local one is listed without a `stat` of each entry."""
    if is_remote(run):
        names = {entry.name for entry in get_storage(run).list_entries(run) if entry.is_directory}
    else:
        names = set(os.listdir(run)) if run.is_dir() else set()
    return {name for name in names if not is_hidden(name)}
