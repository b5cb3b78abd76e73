"""State dicts from files that others wrote: safetensors, `torch.save`, plain DCP directories, and our own checkpoints.

Read in one process, as whole tensors on the CPU. Where a format allows it, files are mapped and not read at once.
Nothing is unpickled, with one exception: torch reads the metadata and the objects of a plain DCP directory by
unpickling, which can run code of whoever wrote it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from dsq_ckpt import export
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, LoadFailed
from dsq_ckpt.manifest import Manifest, checkpoints, is_complete

State = dict[str, Any]

SAFETENSORS = ".safetensors"
INDEX = ".safetensors.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_UNDERSTOOD = (
    "a .safetensors file or index, a torch.save file, or a directory with safetensors, a plain DCP or a dsq_ckpt "
    "checkpoint"
)


def read_state(path: str | os.PathLike[str]) -> State:
    """The state dict of a checkpoint that somebody wrote.

    Args:
        path: a `.safetensors` file; the index of several (`*.safetensors.index.json`) or a directory with them; a
            `torch.save` file; a plain DCP directory, to be trusted (see above); or a dsq_ckpt checkpoint, with its
            refinement layer where that was kept.

    Raises:
        CheckpointNotFound: nothing is there, or nothing that is understood.
        CorruptCheckpoint: a file is damaged, or is not what its name says.
        LoadFailed: a file holds more than plain data, or is no state dict, or `safetensors` is not installed.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(f"source {text!r}: expected a file or directory of the local file system; download it first")
    path = Path(path)
    if path.is_dir():
        return _directory(path)
    if not path.is_file():
        raise CheckpointNotFound(f"'{path}' does not exist; name {_UNDERSTOOD}")
    if path.name.endswith(SAFETENSORS):
        return _safetensors([(path, None)])
    if path.suffix == ".json":
        return _safetensors(_shards(path))
    return _torch(path)


def _directory(path: Path) -> State:
    if is_complete(path):
        return _own(path)
    if (path / ".metadata").is_file():
        return _dcp(path)
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    indexes = [name for name in names if name.endswith(INDEX)]
    if f"model{INDEX}" in indexes:  # as on the hub; others beside it are variants of it
        indexes = [f"model{INDEX}"]
    if len(indexes) > 1:
        raise CheckpointNotFound(f"'{path}' holds several indexes: {', '.join(indexes)}; name one of them")
    if indexes:
        return _safetensors(_shards(path / indexes[0]))
    shards = [name for name in names if name.endswith(SAFETENSORS)]
    if shards:
        return _safetensors([(path / name, None) for name in shards])
    if next(checkpoints(path), None) is not None:
        Manifest.read(path)  # raises: it is a run, and which is its newest checkpoint
    pickled = [name for name in names if name.endswith(_TORCH_SUFFIXES)]
    found = f"; it holds {', '.join(pickled[:3])}: name the file" if pickled else ""
    raise CheckpointNotFound(f"'{path}' is not {_UNDERSTOOD}{found}")


def _own(path: Path) -> State:
    try:
        return export.read(path)
    except export.ExportError as error:
        raise LoadFailed(
            f"{error.args[0].partition(';')[0]}, and nothing is unpickled here; where you trust it, load it with "
            "dsq_ckpt.load and compress the state dict"
        ) from error


def _dcp(path: Path) -> State:
    """A plain DCP directory, by torch's own reader."""
    state: State = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "assuming a single process": that is so
            _load_state_dict(
                state, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
            )
    except (Exception, CheckpointException) as error:
        cause = export.cause_of(error)
        raise CorruptCheckpoint(
            f"'{path}' cannot be read as a plain DCP checkpoint: {type(cause).__name__}: {cause}"
        ) from error
    return state


def _torch(path: Path) -> State:
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
            f"{_UNDERSTOOD}"
        ) from error
    if not isinstance(state, Mapping):
        raise LoadFailed(f"'{path}' holds {type(state).__name__}, expected a state dict")
    return dict(state)


def _shards(index: Path) -> list[tuple[Path, list[str] | None]]:
    """Files of an index, and which tensors each is to have."""
    try:
        where = json.loads(index.read_text())["weight_map"]
        files: dict[str, list[str]] = {}
        for fqn, name in where.items():
            files.setdefault(name, []).append(fqn)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"'{index}' is not an index of safetensors files (no weight_map in it)") from error
    for name in files:
        if Path(name).name != name or not name.endswith(SAFETENSORS):
            raise CorruptCheckpoint(f"'{index}' names '{name}', which is not a safetensors file beside it")
    return [(index.parent / name, files[name]) for name in sorted(files)]


def _safetensors(shards: list[tuple[Path, list[str] | None]]) -> State:
    """Tensors of one file or several; names None: all that a file has."""
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
    """The first line of a message that may be a page."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
