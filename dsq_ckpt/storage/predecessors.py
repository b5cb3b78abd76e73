"""Predecessors of a checkpoint in its run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.manifest import MAX_CREATED, Manifest, iter_checkpoints

_MAX_REPLACED = 32
_INTERVAL = 1e-3  # seconds from the newest checkpoint of a run to the first of a process whose clock is behind


def iter_predecessors(newest: Path, manifest: Manifest | None = None) -> Iterator[tuple[Path, Manifest]]:
    """Yield the predecessors of a checkpoint, newest first, with their manifests, as far as they can be read.

    A replaced checkpoint, such as `last`, is skipped: the manifest of its replacement records its predecessor.

    Args:
        newest: directory of the checkpoint.
        manifest: its manifest; None: read it.

    Raises:
        DSQError: the checkpoint itself cannot be read.
    """
    manifest, save_ids = manifest or Manifest.read(newest), set[str]()
    save_id, name = manifest.previous, manifest.previous_name
    while save_id is not None and name is not None and save_id not in save_ids:
        save_ids.add(save_id)
        directory = newest.parent / name
        try:
            manifest = Manifest.read(directory)
        except DSQError:
            return
        if manifest.save_id == save_id:
            yield directory, manifest
            save_id, name = manifest.previous, manifest.previous_name
        else:
            links = {old: (previous, name) for old, previous, name in manifest.replaced[::-1]}
            save_id, name = links.get(save_id, (None, None))


def list_replaced(directory: Path) -> list[tuple[str, str | None, str | None]]:
    """Return the manifest field `replaced` for a save that replaces the checkpoint in a directory, if there is one."""
    try:
        old = Manifest.read(directory)
    except DSQError:
        return []
    return [(old.save_id, old.previous, old.previous_name), *old.replaced][:_MAX_REPLACED]


def choose_creation_time(run: Path, follows_newest: bool) -> float:
    """Return the manifest field `created` for a save that is committed now.

    Where it does not follow the newest checkpoint of the run, only its time tells that it is newer. The clocks of the
    others may be ahead of this one, so it is later than the times of all others, and of what this process saved there.

    Args:
        run: run directory.
        follows_newest: whether the manifest names a previous checkpoint there, which this process saved.
    """
    newest = _last_times.get(run, 0.0)
    if not follows_newest:
        with suppress(DSQError, OSError):  # of the listing; the save does not need it
            newest = max([newest, *(manifest.created for _, manifest in iter_checkpoints(run, lambda *_: None))])
    _last_times[run] = min(max(time.time(), newest + _INTERVAL), MAX_CREATED)
    return _last_times[run]


_last_times: dict[Path, float] = {}
"""Time of the newest checkpoint that this process saved in a run directory."""
