"""State dicts in files of safetensors and `torch.save`, mapped: values are read from disk when they are looked at.

Nothing but plain data is unpickled. Files of torch before 1.6 cannot be mapped, and are read whole.
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
UNDERSTOOD = (
    "a .safetensors file or index, a torch.save file, or a directory with safetensors, a plain DCP or a dsq_ckpt "
    "checkpoint"
)


def torch_state(path: Path) -> State:
    """Return the state dict of a `torch.save` file.

    Raises:
        CorruptCheckpoint: it is damaged, or no such file.
        LoadFailed: it holds more than plain data, or no state dict.
    """
    try:
        mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and cannot be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        name = re.search(r"unsupported (?:global|class)\W+(?:GLOBAL )?([\w.]+)", str(error), re.I)
        if name is None:
            detail = re.search(r"Unpickler error:\s*(.+)", str(error))
            raise CorruptCheckpoint(
                f"'{path}' is not a torch.save file of plain data ({detail[1].strip() if detail else _first(error)})"
            ) from error
        raise LoadFailed(
            f"'{path}' holds more than plain data ('{name[1]}'); unpickling that can run code, and is not done. If you "
            "trust the file, torch.load(..., weights_only=False) it and compress the state dict in it"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # whatever the readers make of other bytes, EINVAL for a zip file cut short included
        if isinstance(error, OSError) and error.filename is not None:
            raise  # it cannot be opened
        raise CorruptCheckpoint(
            f"'{path}' is not a torch.save file of a state dict, or is damaged ({_first(error)}); a source is "
            f"{UNDERSTOOD}"
        ) from error
    if not isinstance(state, Mapping):
        raise LoadFailed(f"'{path}' holds {type(state).__name__}, expected a state dict")
    return dict(state)


def shards_of(index: Path) -> list[tuple[Path, list[str] | None]]:
    """Return the files of an index, and the tensors that each is to have.

    Raises:
        CorruptCheckpoint: it is no index, or names files elsewhere.
    """
    try:
        where = parse_strict_json(index.read_text())["weight_map"]
        files: dict[str, list[str]] = {}
        for fqn, name in where.items():
            files.setdefault(name, []).append(fqn)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"'{index}' is not an index of safetensors files (no weight_map in it)") from error
    for name in files:
        if Path(name).name != name or not name.endswith(SAFETENSORS):
            raise CorruptCheckpoint(f"'{index}' names '{name}', which is not a safetensors file beside it")
    return [(index.parent / name, files[name]) for name in sorted(files)]


def safetensors_state(shards: list[tuple[Path, list[str] | None]]) -> State:
    """Open tensors of one file or several; names None: all tensors of a file.

    Raises:
        CheckpointNotFound: a file is missing.
        CorruptCheckpoint: a file is damaged, lacks a tensor, or has one that another has too.
        LoadFailed: the package for it is not installed.
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
        with _damaged(path), safe_open(path, framework="pt") as file:
            held = list(file.keys())
            for fqn in held if names is None else names:
                if fqn not in held:
                    raise CorruptCheckpoint(f"'{path}' lacks '{fqn}', which the index says it has")
                if fqn in state:
                    raise CorruptCheckpoint(
                        f"'{fqn}' is both in '{origin[fqn].name}' and in '{path.name}' of '{path.parent}': these are "
                        "not parts of one checkpoint; name one of them"
                    )
                state[fqn], origin[fqn] = file.get_tensor(fqn), path
    return state


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise CorruptCheckpoint(f"'{path}' is damaged, or not a safetensors file: {error}") from error


def _first(error: BaseException) -> str:
    """Return the first line of a message that may be long."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
