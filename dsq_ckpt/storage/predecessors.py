"""The checkpoints that a checkpoint came after in its run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.manifest import Manifest

_MAX_REPLACED = 32


def iter_predecessors(newest: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the checkpoints that one came after, newest first, with their manifests, as far as they can be read.

    One that was replaced, as `last` is by each save, is passed over: what replaced it tells what it came after.

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
            links = {old: (previous, beside) for old, previous, beside in manifest.replaced[::-1]}
            save_id, name = links.get(save_id, (None, None))


def list_replaced(directory: Path) -> list[tuple[str, str | None, str | None]]:
    """Return the field `replaced` of a checkpoint that is to replace the one in a directory, if there is one."""
    try:
        old = Manifest.read(directory)
    except DSQError:
        return []
    return [(old.save_id, old.previous, old.previous_name), *old.replaced][:_MAX_REPLACED]
