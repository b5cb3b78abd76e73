"""Memory-mapped state dicts in files of safetensors and `torch.save`: values are read from disk on access.

Only plain data is unpickled. Files of torch before 1.6 cannot be mapped, and are read completely.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dsq_ckpt.core.strict_json import parse_strict_json
from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, LoadFailed

State = dict[str, Any]

SAFETENSORS = ".safetensors"
INDEX = ".safetensors.index.json"
SUPPORTED_SOURCES = (
    "a .safetensors file or index, a torch.save file, or a directory with safetensors, a plain DCP or a dsq_ckpt "
    "checkpoint"
)


def open_torch_file(path: Path) -> State:
    """Return the state dict of a `torch.save` file.

    Raises:
        CorruptCheckpoint: the file is damaged, or is not a `torch.save` file.
        LoadFailed: the file holds more than plain data, or no state dict.
    """
    try:
        mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not zip files
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        name = re.search(r"unsupported (?:global|class)\W+(?:GLOBAL )?([\w.]+)", str(error), re.I)
        if name is None:
            detail = re.search(r"Unpickler error:\s*(.+)", str(error))
            raise CorruptCheckpoint(
                f"'{path}' is not a torch.save file of plain data "
                f"({detail[1].strip() if detail else _first_line(error)})"
            ) from error
        raise LoadFailed(
            f"'{path}' holds more than plain data ('{name[1]}'); unpickling that can run code, and is not done. If you "
            "trust the file, torch.load(..., weights_only=False) it and compress the state dict in it"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # any error of the readers for other bytes, such as EINVAL for a truncated zip file
        if isinstance(error, OSError) and error.filename is not None:
            raise  # the file cannot be opened
        raise CorruptCheckpoint(
            f"'{path}' is not a torch.save file of a state dict, or is damaged ({_first_line(error)}); a source is "
            f"{SUPPORTED_SOURCES}"
        ) from error
    if not isinstance(state, Mapping):
        raise LoadFailed(f"'{path}' holds {type(state).__name__}, expected a state dict")
    return dict(state)


def read_safetensors_index(index: Path) -> list[tuple[Path, list[str] | None]]:
    """Return the files in an index of safetensors files, and the names of the tensors in each.

    Raises:
        CorruptCheckpoint: it is not an index, or it names files in other directories.
    """
    try:
        weight_map = parse_strict_json(index.read_text())["weight_map"]
        files: dict[str, list[str]] = {}
        for fqn, name in weight_map.items():
            files.setdefault(name, []).append(fqn)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"'{index}' is not an index of safetensors files (no weight_map in it)") from error
    for name in files:
        if Path(name).name != name or not name.endswith(SAFETENSORS):
            raise CorruptCheckpoint(f"'{index}' names '{name}', which is not a safetensors file beside it")
    return [(index.parent / name, files[name]) for name in sorted(files)]


def open_safetensors(shards: list[tuple[Path, list[str] | None]]) -> State:
    """Open tensors of safetensors files.

    Args:
        shards: files, and the names of the tensors to open in each; None: all tensors of the file.

    Raises:
        CheckpointNotFound: a file is missing.
        CorruptCheckpoint: a file is damaged or lacks a tensor, or two files have the same tensor.
        LoadFailed: the `safetensors` package is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise LoadFailed("reading .safetensors needs the safetensors package: pip install safetensors") from error
    state: State = {}
    origin: dict[str, Path] = {}
    for path, names in shards:
        if not path.is_file():
            raise CheckpointNotFound(f"'{path}' is missing, which the index beside it names")
        with _translate_errors(path), safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            for fqn in keys if names is None else names:
                if fqn not in keys:
                    raise CorruptCheckpoint(f"'{path}' lacks '{fqn}', which the index says it has")
                if fqn in state:
                    raise CorruptCheckpoint(
                        f"'{fqn}' is both in '{origin[fqn].name}' and in '{path.name}' of '{path.parent}': these are "
                        "not parts of one checkpoint; name one of them"
                    )
                state[fqn], origin[fqn] = file.get_tensor(fqn), path
    return state


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise CorruptCheckpoint(f"'{path}' is damaged, or not a safetensors file: {error}") from error


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened to 200 characters."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
