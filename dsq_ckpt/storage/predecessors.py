"""Predecessors of a checkpoint in its run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.manifest import Manifest

_MAX_REPLACED = 32


def iter_predecessors(newest: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the predecessors of a checkpoint, newest first, with their manifests, as far as they can be read.

    A replaced checkpoint, such as `last`, is skipped: the manifest of its replacement records its predecessor.

    Raises:
        DSQError: the checkpoint itself cannot be read.
    """
    manifest, seen = Manifest.read(newest), set[str]()
    save_id, name = manifest.previous, manifest.previous_name
    while save_id is not None and name is not None and save_id not in seen:
        seen.add(save_id)
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
