"""Runs and files at any path or URL."""

from __future__ import annotations

import functools

import torch

import dsq_ckpt
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST
from dsq_ckpt.storage.paths import resolve_checkpoint_path


def state_of(step: int) -> dict:
    """Return a state that moves away from the same weights with each step."""
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    moved = torch.randn(256, 256, generator=torch.Generator().manual_seed(step))
    return {"w": values + 0.01 * step * moved, "step": step}


def chain(run: str, length: int) -> list:
    """Save a keyframe and deltas; return their paths."""
    for step in range(1, length + 1):
        dsq_ckpt.save(state_of(step), f"{run}/step-{step}")
    return [resolve_checkpoint_path(f"{run}/step-{step}") for step in range(1, length + 1)]


def stored_chain(run: str, length: int) -> list:
    """Return the paths of a run as `chain` saves it.

    On a store, the files of a run that was saved in memory are put there: of three checkpoints, 12 requests, not 84.
    This process then knows nothing of these checkpoints, and codes a save as a delta only after a load.
    """
    paths = [resolve_checkpoint_path(f"{run}/step-{step}") for step in range(1, length + 1)]
    if not is_remote(paths[0]):
        return chain(run, length)
    for path in paths:
        for name, data in _chain_files(length)[path.name].items():
            put(path / name, data)
    return paths


@functools.cache
def _chain_files(length: int) -> dict[str, dict[str, bytes]]:
    """Return what `chain` writes to a store, by checkpoint, manifests last."""
    files = {}
    for path in chain(f"memory://chain-of-{length}/run", length):
        names = sorted(names_in(path), key=MANIFEST.__eq__)
        files[path.name] = {name: get_storage(path).read(path / name, 1 << 28) for name in names}
    return files


def loaded(path) -> dict:
    """Return the base layer of a checkpoint."""
    target: dict = {}
    dsq_ckpt.load(target, path, refinement=False)
    return target


def names_in(path) -> set[str]:
    """Return the names of a directory's entries."""
    return {entry.name for entry in get_storage(path).list_entries(path)}


def put(path, data: bytes = b"x") -> None:
    """Write a file."""
    with get_storage(path).create(path, fsync=False) as file:
        file.stream.write(data)
        file.publish()
