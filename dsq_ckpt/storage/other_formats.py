"""Checkpoints of other formats at a path where one of ours was expected: how to tell a user that it is one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage.backend import get_storage

_MODEL_STATES, _ZERO_STATES = "_model_states.pt", "_optim_states.pt"
"""Ends of names of DeepSpeed's files; those of ZeRO have weights that `dsq compress` does not read."""


def describe_other_format(path: Path) -> str | None:
    """Return what a path without a manifest is in another format, and what reads it: the end of a sentence.

    None: it is nothing that is known, or has files of a checkpoint of ours.
    """
    with suppress(OSError):  # it is no file, or nothing
        get_storage(path).size(path)
        if path.name == "manifest.json" or path.suffix == ".dsq":
            return f"is a file of a checkpoint; name its directory, '{path.parent}'"
        return (
            "is a file, and a dsq_ckpt checkpoint is a directory; torch.load reads files of torch.save, "
            "safetensors.torch.load_file those of safetensors, and `dsq compress` compresses both"
        )
    names = sorted(entry.name for entry in get_storage(path).list_entries(path) if not entry.is_directory)
    if ".metadata" in names:
        reader = "torch.distributed.checkpoint"
        if is_remote(path):
            return f"is a plain DCP checkpoint; load it with {reader}"
        return f"is a plain DCP checkpoint; load it with {reader}.FileSystemReader, or compress it by `dsq compress`"
    if any(name.endswith(".dsq") for name in names):
        return None
    if any(name.endswith(".distcp") for name in names):
        return "has .distcp files of a plain DCP checkpoint, but no .metadata: it is not complete"
    states = [name for name in names if name.endswith(_MODEL_STATES)]
    if states:
        zero = any(name.endswith(_ZERO_STATES) for name in names)
        file = "the file that zero_to_fp32.py makes of it" if zero else f"its '{states[0]}'"
        return (
            f"is a tag that DeepSpeed wrote; load it with DeepSpeed's load_checkpoint, or compress {file} by "
            "`dsq compress`"
        )
    if any(name.endswith(".safetensors") for name in names):
        return "holds safetensors; read them with safetensors.torch.load_file, or compress them by `dsq compress`"
    return None
