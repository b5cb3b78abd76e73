"""Disk space of removed checkpoints: their files stay as long as newer checkpoints are coded against them."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.description import compute_logical_size
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.predecessors import iter_predecessors

_MIN_GAIN = 1 << 20
"""Bytes beyond its own size that a keyframe must free at least."""


def should_write_keyframe(path: Path, manifest: Manifest) -> bool:
    """Return whether a keyframe would free twice its size, or its size and half of the state if that is less.

    If a trainer removes the other checkpoints of a chain, the chain would need many times the disk space of the
    remaining ones. The size of a keyframe is estimated by the largest save of the chain. On an object store it is
    unknown which checkpoints need a file, so no keyframe is written.

    Args:
        path: the checkpoint that the next one would be coded against.
        manifest: its manifest.
    """
    bytes_of, one_of = Counter[str](), dict[str, str]()
    for file in manifest.files:
        if file.role in ("own", "ancestor"):
            bytes_of[file.name[:16]] += file.size
            one_of[file.name[:16]] = file.name
    largest = max(bytes_of.values(), default=0)
    largest += max(_MIN_GAIN, min(largest, compute_logical_size(manifest) // 2))
    if is_remote(path) or bytes_of.total() <= largest:
        return False
    removed, remaining, freed = bytes_of.keys() - {manifest.save_id}, 1, bytes_of[manifest.save_id]
    with suppress(OSError):
        if max((path / name).stat().st_nlink for name in one_of.values()) >= len(bytes_of):
            return False  # the whole chain exists: each of its checkpoints links the files of the first
    with suppress(DSQError):
        for _, older in iter_predecessors(path):
            remaining += 1
            removed.discard(older.save_id)
            if not removed or older.save_id not in bytes_of:
                break
    with suppress(OSError):
        for file in manifest.files:
            only_here = file.name[:16] in removed and (path / file.name).stat().st_nlink <= remaining
            freed += file.size if only_here else 0
    return freed > largest
