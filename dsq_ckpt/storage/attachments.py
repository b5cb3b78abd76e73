"""Attachments: files of another format, at present DeepSpeed's, that are part of a checkpoint.

The index does not list their contents. They are pickles, and readers of named tensors do not open them.
"""

from __future__ import annotations

from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.manifest import Manifest, ManifestFile

ONLY_ATTACHED = (
    "buffers, frozen parameters, further names of tied parameters, client_state and all that is uncompressed"
)


def list_attachments(manifest: Manifest) -> list[ManifestFile]:
    """Return the attachments of a checkpoint."""
    return [file for file in manifest.files if file.role == "attachment"]


def refuse_without_tensors(checkpoint: CheckpointFiles, done: str, error: type[DSQError]) -> None:
    """Raise an error if a checkpoint has attachments, and neither tensors nor objects.

    Args:
        checkpoint: opened checkpoint.
        done: participle of the operation on its tensors, such as "exported".
        error: class of the error.

    Raises:
        DSQError: of class `error`.
    """
    if list_attachments(checkpoint.manifest) and not checkpoint.index["tensors"] and not checkpoint.index["objects"]:
        raise error(
            f"'{checkpoint.directory}' is a tag of DeepSpeed, and all that it holds is in DeepSpeed's own files, "
            f"uncompressed: nothing in it can be {done} by name. An engine of DeepSpeed loads it; "
            + _format_export_hint(checkpoint.directory)
        )


def warn_about_attachments(checkpoint: CheckpointFiles, done: str, rank: int = 0) -> None:
    """Warn on rank 0 that an operation on named tensors leaves out the attachments, if there are any."""
    if list_attachments(checkpoint.manifest):
        warn(
            f"'{checkpoint.directory}' is a tag of DeepSpeed, of which only the tensors that have names are {done}: "
            f"what is in DeepSpeed's own files alone is left out ({ONLY_ATTACHED}). "
            f"{_format_export_hint(checkpoint.directory)}; `zero_to_fp32.py` in the run's directory converts weights "
            "and buffers (ZeRO stages 1 to 3; in stage 1 without frozen ones)", rank=rank,
        )


def format_attachment_hint(manifest: Manifest) -> str:
    """Return a hint, for an error about a missing name, that attachments may contain it; empty without attachments."""
    hint = f" (the checkpoint is a tag of DeepSpeed, in whose own files alone are {ONLY_ATTACHED})"
    return hint if list_attachments(manifest) else ""


def _format_export_hint(directory: Path) -> str:
    return f"`dsq export {directory} TARGET --format deepspeed --allow-pickle` makes plain files of all of it"
