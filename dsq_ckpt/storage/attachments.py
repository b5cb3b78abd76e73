"""Files of another format in a checkpoint, which today are DeepSpeed's: tensors by name are not all that it holds.

What these files alone hold is not in the index. They are pickles, which no reader of named tensors opens.
"""

from __future__ import annotations

from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.manifest import Manifest, ManifestFile

ONLY_THERE = "buffers, frozen parameters, further names of tied parameters, client_state and all that is uncompressed"


def attachments(manifest: Manifest) -> list[ManifestFile]:
    """Return the files of another format."""
    return [file for file in manifest.files if file.role == "attachment"]


def refuse_without_tensors(checkpoint: CheckpointFiles, done: str, error: type[DSQError]) -> None:
    """Refuse a checkpoint that has all it holds in files of another format.

    Args:
        checkpoint: opened.
        done: participle of what was to be done to its tensors, such as "exported".
        error: class of the error.

    Raises:
        DSQError: of that class, if it is such a checkpoint.
    """
    if attachments(checkpoint.manifest) and not checkpoint.index["tensors"] and not checkpoint.index["objects"]:
        raise error(
            f"'{checkpoint.directory}' is a tag of DeepSpeed, and all that it holds is in DeepSpeed's own files, "
            f"uncompressed: nothing in it can be {done} by name. An engine of DeepSpeed loads it; "
            + _all_files(checkpoint.directory)
        )


def warn_of_attachments(checkpoint: CheckpointFiles, done: str, rank: int = 0) -> None:
    """Warn that tensors by name are not all of a checkpoint, if it has files of another format; on rank 0 alone."""
    if attachments(checkpoint.manifest):
        warn(
            f"'{checkpoint.directory}' is a tag of DeepSpeed, of which only the tensors that have names are {done}: "
            f"what is in DeepSpeed's own files alone is left out ({ONLY_THERE}). {_all_files(checkpoint.directory)}; "
            "`zero_to_fp32.py` in the run's directory converts weights and buffers (ZeRO stages 1 to 3; in stage 1 "
            "without frozen ones)", rank=rank,
        )


def hint_of_attachments(manifest: Manifest) -> str:
    """Return where else a name may be that a checkpoint does not have; empty where there is no such place."""
    hint = f" (the checkpoint is a tag of DeepSpeed, in whose own files alone are {ONLY_THERE})"
    return hint if attachments(manifest) else ""


def _all_files(directory: Path) -> str:
    return f"`dsq export {directory} TARGET --format deepspeed --allow-pickle` makes plain files of all of it"
