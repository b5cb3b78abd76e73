"""Export of compressed tags to DeepSpeed's own files with plain tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from dsq_ckpt.convert.export import Exported, ExportError, OpenedCheckpoint, Progress, StrPath
from dsq_ckpt.core.arguments import expect_flags
from dsq_ckpt.errors import CorruptCheckpoint, LoadFailed
from dsq_ckpt.storage import pickle_refs
from dsq_ckpt.storage.atomic_io import create_directory, flush, sync_directory
from dsq_ckpt.storage.attachments import list_attachments
from dsq_ckpt.storage.container import checksum_file
from dsq_ckpt.storage.paths import expand_path, resolve_local_path
from dsq_ckpt.storage.refinement import RefinementOption
from dsq_ckpt.storage.target_directory import refuse_existing


def export_deepspeed(
    source: StrPath, target: StrPath, *, refinement: RefinementOption = "auto", overwrite: bool = False,
    allow_pickle: bool = False, progress: Progress | None = None,
) -> Exported:
    """Write the files of a compressed tag as DeepSpeed writes them, for machines without `dsq_ckpt`.

    The files are pickles with objects of DeepSpeed, Python and the user, and have to be unpickled.

    Args:
        source: tag directory that was saved through `dsq_ckpt.deepspeed`.
        target: directory to create.
        refinement: see `dsq_ckpt.load`.
        overwrite: replace a directory at `target` that holds only files of a tag.
        allow_pickle: must be True, since unpickling can run code of the checkpoint's author.
        progress: function that is called after every file, with the bytes of its tensors.

    Raises:
        CheckpointExists: `target` exists.
        ExportError: `source` is no tag, `allow_pickle` is False, or `target` holds other files than a tag's.
        LoadFailed: a file needs a module that is not installed.
        CorruptCheckpoint: a file does not match its checksum.
        OSError: `target` cannot be written, such as on a full disk; nothing of it is left.
    """
    expect_flags(allow_pickle=allow_pickle)
    source, target_directory = expand_path(source), Path(os.path.normpath(resolve_local_path(target)))
    refuse_existing(target_directory, overwrite)
    if overwrite and os.path.lexists(target_directory) and not _is_plain_tag(target_directory):
        raise ExportError(
            f"'{target_directory}' holds more than files of DeepSpeed and is not overwritten; choose another target"
        )
    with OpenedCheckpoint(source, refinement, None) as opened:
        files = list_attachments(opened.checkpoint.manifest)
        if not files:
            raise ExportError(f"'{source}' was not saved by DeepSpeed; choose another format")
        if not allow_pickle:
            raise ExportError(
                f"'{source}' has files of DeepSpeed, which are pickles: reading them can run code of whoever wrote it; "
                "pass allow_pickle=True for a checkpoint that you trust"
            )
        refined, count, total = opened.refined, 0, 0
    with create_directory(target_directory, overwrite) as staging_directory:
        staging_directory.mkdir()
        for file in files:
            path = source / file.name
            if checksum_file(path) != (file.size, file.checksum):
                raise CorruptCheckpoint(f"'{path}' does not have the checksum {file.checksum}: it was altered")
            with pickle_refs.stored_in(source, refined):
                try:
                    state = torch.load(path, map_location="cpu", weights_only=False)
                except ImportError as error:
                    raise LoadFailed(f"'{path}' holds objects of '{error.name}', which is not installed") from error
            with open(staging_directory / file.name, "xb") as stream:
                torch.save(state, stream)
                flush(stream, True)
            sizes = list(_list_tensor_sizes(state))
            count, total = count + len(sizes), total + sum(sizes)
            if progress is not None:
                progress(sum(sizes))
        sync_directory(staging_directory)
    pickle_refs.close_last_checkpoint()
    return Exported(target_directory, count, total, refined)


def _list_tensor_sizes(node: Any) -> list[int]:
    if isinstance(node, torch.Tensor):
        return [node.nbytes]
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [size for value in inner for size in _list_tensor_sizes(value)]


def _is_plain_tag(directory: Path) -> bool:
    return directory.is_dir() and all(
        entry.is_file() and entry.name.endswith("states.pt") for entry in directory.iterdir()
    )
