"""Error messages for checkpoints of other formats at a path where a dsq_ckpt checkpoint was expected."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage.backend import get_storage

_MODEL_STATES, _ZERO_STATES = "_model_states.pt", "_optim_states.pt"
"""Suffixes of DeepSpeed's files; `dsq compress` does not read the weights in those of ZeRO."""


def describe_other_format(path: Path) -> str | None:
    """Describe a path without a manifest in another format, and how to read it, as the end of a sentence.

    None if the format is unknown, or if the path has dsq files.
    """
    with suppress(OSError):  # not a file
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
