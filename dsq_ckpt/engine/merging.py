"""Merging of chains, which makes them faster to read. Values stay the same bit for bit, with and without refinement.

A checkpoint needs all records back to its keyframe. If codes are coded given the parent's codes, the merged checkpoint
holds the codes of each chunk given those of the keyframe, or without a parent if that is no larger (Inshrinkerator,
section 10: "intermediate compaction"). If differences of values are added up, it holds the combinations of their codes
as one record over the same keyframe, a super-step (LC-Checkpoint, section 3.2). A record holds at most 255
combinations, so several super-steps may be needed; as few as possible are written. The source is not changed.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.arguments import expect_flags
from dsq_ckpt.core.interrupts import propagate_handler_errors
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.rank_merger import RankMerger, find_parent_chain, find_residual_chain
from dsq_ckpt.errors import CheckpointExists, DSQError, SaveFailed, described
from dsq_ckpt.storage.atomic_io import make_directory
from dsq_ckpt.storage.attachments import list_attachments
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.companion_files import copy_other_files, flush_other_files, remove_trees
from dsq_ckpt.storage.container import FORMAT_VERSION, write_index
from dsq_ckpt.storage.links import explain_parent_errors, link_files
from dsq_ckpt.storage.manifest import GroupReport, Manifest, ManifestFile, is_complete
from dsq_ckpt.storage.packs import PackRef
from dsq_ckpt.storage.paths import resolve_local_path
from dsq_ckpt.storage.target_directory import TargetDirectory, refuse_target

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    Attributes:
        path: the new checkpoint.
        links_before, links: deltas in the longest chain of a chunk, in the source and in the new checkpoint.
        bytes: bytes of the written files; files of the keyframe, if needed, are linked.
    """

    path: Path
    links_before: int
    links: int
    bytes: int


@contextmanager
def _translate_errors(goal: StrPath) -> Iterator[None]:
    """Raise SaveFailed in place of an error of the operating system, as a save does."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DSQError):
            raise
        raise SaveFailed(f"'{goal}' was not written: {described(error)}") from error


@propagate_handler_errors()
def merge(source: StrPath, target: StrPath, *, keyframe: bool = False) -> Merged:
    """Write a copy of a checkpoint in which chains are merged.

    Runs in one process, whatever the number of ranks that saved. `target` does not need `source`, and may be the parent
    of further saves. In a run it is as old as `source`. Files of other programs in the directory of `source`, such as
    those of Trainer, are copied.

    Args:
        source: a checkpoint with a chain.
        target: the directory to create.
        keyframe: write a keyframe, which needs no file of another checkpoint; otherwise codes are written as one delta
            against the keyframe of their chain where that is smaller. Differences of values (`delta.against`) need
            their keyframe.

    Returns:
        The new checkpoint: its path, `links_before` and `links` (deltas in the longest chain of a chunk, in the source
        and in the new checkpoint), and `bytes` of the written files.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: `source` cannot be read.
        CheckpointExists: `target` holds a complete checkpoint.
        SaveFailed: there is nothing to merge, or `target` has other files or cannot be written, such as on a full disk.

    Example:
        >>> state = {"w": torch.randn(256, 256)}
        >>> for step in range(4):
        ...     state["w"] += 0.01 * torch.randn(256, 256)
        ...     result = dsq_ckpt.save(state, f"run/{step}")
        >>> merged = dsq_ckpt.merge("run/3", "run/merged")
        >>> merged.links_before, merged.links
        (3, 1)
    """
    expect_flags(keyframe=keyframe)
    with _translate_errors(target):
        return _merge(source, resolve_local_path(target), keyframe)


def _merge(source: StrPath, goal: Path, keyframe: bool) -> Merged:
    if is_complete(goal):
        raise CheckpointExists(f"'{goal}' holds a complete checkpoint, and a merge replaces none; name a new directory")
    refuse_target(goal, overwrite=False)
    started, storage = time.time(), StorageConfig()
    with Checkpoint(resolve_local_path(source)) as checkpoint, Workers(
        storage.thread_count(), storage.block_elements
    ) as workers:
        if list_attachments(checkpoint.manifest):
            raise SaveFailed(
                f"'{source}' is a tag of DeepSpeed, whose own files belong to this very save; tags are not merged"
            )
        refs = [ref for _, ref in checkpoint.iter_chunks()]
        added = max((len(find_residual_chain(checkpoint, ref)) - 1 for ref in refs), default=0)
        coded = max((len(find_parent_chain(checkpoint, ref)) - 1 for ref in refs), default=0)
        if keyframe and added:
            raise SaveFailed(
                f"'{source}' adds differences of values to its keyframe, and cannot do without it; merge without "
                "keyframe"
            )
        exact = max((len(chain) - 1 for chain in _iterate_pack_chains(checkpoint)), default=0)
        if added < 2 and max(coded, exact) < (1 if keyframe else 2):
            raise SaveFailed(
                f"'{source}' has nothing to merge: "
                + ("it is a keyframe" if keyframe else "no chain of a tensor has two deltas or more")
            )
        save_id, directory = uuid.uuid4().hex[:16], TargetDirectory(goal)
        directory.claim(save_id, checkpoint.manifest)
        others: list[Path] = []
        try:
            make_directory(goal, fsync=True)
            ranks = [RankMerger(checkpoint, name, goal, keyframe, workers) for name in checkpoint.index["files"]]
            files = [file for rank in ranks for file in rank.write(save_id)]
            names = {file.name for file in checkpoint.manifest.files}
            others.extend(copy_other_files(checkpoint.directory, goal, names))
            manifest = _commit(checkpoint, goal, save_id, ranks, files, started)
        except BaseException:
            remove_trees(others)
            directory.discard()
            raise
    written = manifest.sum_bytes("own", "index", "refinement")
    return Merged(goal, max(added, coded, exact), max(rank.links for rank in ranks), written)


def _iterate_pack_chains(checkpoint: Checkpoint) -> Iterator[list[PackRef]]:
    """Yield, for each pack, the chain of packs that it is decoded through, newest first."""
    for name in checkpoint.index["files"]:
        with checkpoint.translate_errors(name):
            chains = [
                checkpoint.pack_chain(PackRef(name, number))
                for number in range(len(checkpoint.open_reader(name).contents["packs"]))
            ]
        yield from chains


def _commit(
    checkpoint: Checkpoint, goal: Path, save_id: str, ranks: list[RankMerger], files: list[ManifestFile], started: float
) -> Manifest:
    old = checkpoint.manifest
    kinds = {kind: sizes.model_copy() for kind, sizes in old.kinds.items()}
    for rank in ranks:
        for kind, change in rank.size_changes.items():
            kinds[kind].base += change
        for kind, change in rank.refinement_changes.items():
            kinds[kind].refinement += change
    ancestors = frozenset[str]().union(*(rank.requires for rank in ranks))
    with explain_parent_errors(checkpoint.directory, old.save_id):
        link_files(checkpoint.directory, goal, ancestors, fsync=True)
    files = files + [file.model_copy(update={"role": "ancestor"}) for file in old.files if file.name in ancestors]
    index = {**checkpoint.index, "files": [f"{save_id}{name[16:]}" for name in checkpoint.index["files"]]}
    files.append(ManifestFile.from_info(write_index(goal, save_id, index, True), "index"))
    newest = max(ancestors, key=lambda name: (len(checkpoint.required_files(name)), name), default=None)
    siblings = goal.parent == checkpoint.directory.absolute().parent
    # It keeps the time of its source: a merged older checkpoint must not become the latest of the run.
    manifest = old.model_copy(update={
        "save_id": save_id, "version": FORMAT_VERSION, "files": files, "kinds": kinds,
        "groups": _update_group_reports(old, ranks),
        "parent": newest and newest[:16], "parent_name": None, "previous_name": old.previous_name if siblings else None,
        "depth": max(rank.depth for rank in ranks), "siblings": 0, "seconds": time.time() - started,
    })
    flush_other_files(goal, {file.name for file in files})
    manifest.write(goal, exclusive=True, fsync=True)
    with suppress(OSError):  # libraries that remove old checkpoints sort by this time
        shutil.copystat(checkpoint.directory, goal)
    return manifest


def _update_group_reports(old: Manifest, ranks: Sequence[RankMerger]) -> dict[str, GroupReport]:
    """Return the group reports of the manifest, updated for groups that were recoded."""
    reports = dict(old.groups)
    for name in {name for rank in ranks for name in rank.recodings} & reports.keys():
        group_sizes = [rank.group_sizes[name] for rank in ranks if name in rank.group_sizes]
        reports[name] = reports[name].model_copy(update={
            "delta": any(uses_parent for uses_parent, _ in group_sizes),
            "bits_per_element": 8 * sum(size for _, size in group_sizes) / max(reports[name].elements, 1),
        })
    return reports
