"""Snapshots of a logged run: checkpoints of the engine with the metadata that replay needs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsq_ckpt.config.schema import DSQConfig, StorageConfig
from dsq_ckpt.core.strict_json import parse_strict_json
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.engine.collective import save_collectively
from dsq_ckpt.engine.history import ParentRef
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.errors import (
    CheckpointExists,
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    DSQError,
    UnsupportedFormat,
)
from dsq_ckpt.lowdiff import segments
from dsq_ckpt.lowdiff.plain import from_plain
from dsq_ckpt.lowdiff.train_state import OPTIMIZER
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import is_lossy
from dsq_ckpt.quantization.update_rules import flatten_param_groups
from dsq_ckpt.storage import gc
from dsq_ckpt.storage.atomic_io import sync_directory
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, is_complete, iter_checkpoints
from dsq_ckpt.storage.pickle_refs import read_flat
from dsq_ckpt.storage.record_fields import parse_dtype

META = ("lowdiff", "meta")
RESIDUAL = ("lowdiff", "residual")
_VERSION = 1
_NAME = re.compile(r"step-\d{9,}")
_RESIDUALS = {"pattern": f"{'.'.join(RESIDUAL)}.*", "group": "residual"}


class SnapshotTensor(NamedTuple):
    """A tensor of a snapshot: its path in the nested state dict, and the tensor."""

    path: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return ".".join(self.path)


def snapshot_config(base: str | Mapping[str, Any]) -> DSQConfig:
    """Return the configuration of snapshots.

    Args:
        base: "exact", "dsq" (the engine's defaults), or a configuration of the engine.

    Raises:
        ConfigError: `base` is no valid configuration.
    """
    if isinstance(base, str) and base in ("exact", "dsq"):
        tree: Mapping[str, Any] = {"system": base}
    else:
        tree = dict(base) if isinstance(base, Mapping) else {"system": base}
    try:
        return DSQConfig.create(dict(tree))
    except ConfigError as error:
        raise ConfigError(f"base is {base!r}; expected 'exact', 'dsq' or a configuration. {error}") from None


def with_residuals(config: DSQConfig) -> DSQConfig:
    """Return the configuration of snapshots that contain residuals of error feedback."""
    if not is_lossy(config):
        return config
    # Residuals are distributed unlike weights, so they have codebooks of their own.
    rules = [*(rule.model_dump() for rule in config.quantize.rules), _RESIDUALS]
    return DSQConfig.create({**config.model_dump(), "quantize": {**config.quantize.model_dump(), "rules": rules}})


def snapshot_directory(run: Path, step: int) -> Path:
    """Return the directory of the snapshot after `step` steps."""
    return run / f"step-{step:09d}"


def save(
    run: Path, step: int, tensors: Iterable[SnapshotTensor], meta: Mapping[str, Any] | None, config: DSQConfig,
    comm: Communicator,
) -> Manifest:
    """Save a snapshot; collective. It is complete on return, or was never there.

    Args:
        run: directory of the run.
        step: steps done.
        tensors: tensors of this rank; names must not repeat on other ranks.
        meta: metadata as plain data on rank 0; None on other ranks.
        config: configuration; see `snapshot_config`.
        comm: communicator of the checkpointing processes.

    Raises:
        DSQError: on all ranks, if any failed; earlier snapshots are untouched.
    """
    own = list(tensors)
    if meta is not None:
        text = json.dumps({"version": _VERSION, **meta}, separators=(",", ":")).encode()
        own.append(SnapshotTensor(META, torch.frombuffer(bytearray(text), dtype=torch.uint8)))
    path = snapshot_directory(run, step)
    state = LocalState(
        [_shard(item) for item in own], nesting={item.name: item.path for item in own},
        settings=_settings(meta or {}) if is_lossy(config) else {},
    )
    parent = "auto" if is_lossy(config) else None
    options = SaveOptions(config, parent=parent, overwrite=True, after=partial(_newest, run))
    save_collectively(path, lambda: state, options, comm)
    return Manifest.read(path)


def _newest(run: Path) -> ParentRef | None:
    """Return the snapshot that the next one comes after, also the first one of a process, which knows no others."""
    found = (ParentRef(one.save_id, str(path), one.depth) for path, one in newest_first(run) if one is not None)
    return next(found, None)


def _settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer keeps that is no tensor, by the names that it has in a state dict."""
    found = flatten_param_groups(OPTIMIZER, map(from_plain, meta.get("hyper", ())))
    for name, state in meta.get("plain", {}).items():
        found |= {f"{OPTIMIZER}.state.{name}.{key}": from_plain(value) for key, value in state.items()}
    return found


def _shard(item: SnapshotTensor) -> LocalShard:
    shape = tuple(item.tensor.shape)
    return LocalShard(ChunkKey(item.name, (0,) * len(shape), shape), shape, item.tensor.dtype, lambda: item.tensor)


class Snapshot:
    """A snapshot opened for reading; a context manager.

    Attributes:
        meta: metadata of the log.

    Raises:
        CheckpointNotFound: the checkpoint is not a snapshot of a log.
        CorruptCheckpoint, UnsupportedFormat: the checkpoint cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoint = Checkpoint(path)
        self._workers = Workers(StorageConfig().thread_count(), StorageConfig().block_elements)
        try:
            if ".".join(META) not in self._checkpoint.index["tensors"]:
                raise CheckpointNotFound(f"'{path}' is a checkpoint, but not a snapshot of a gradient log")
            self.meta: dict[str, Any] = self._read_meta()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()
        self._workers.__exit__()

    def naming(self) -> AbstractContextManager[None]:
        """Return a context in which errors become `DSQError` and name the snapshot; see `CheckpointFiles.naming`."""
        return self._checkpoint.translate_errors()

    @property
    def lossy(self) -> bool:
        return self._checkpoint.manifest.lossy

    @property
    def lossy_kinds(self) -> set[str]:
        """Kinds of lossy tensors in it."""
        return self._checkpoint.manifest.lossy_kinds

    def damaged(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the problem of each damaged file."""
        for name, _, problem in self._checkpoint.verify():
            if problem is not None:
                yield name, problem

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._checkpoint.index["tensors"])

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor."""
        tensor = self._checkpoint.index["tensors"][name]
        return tuple(tensor["shape"]), parse_dtype(tensor["dtype"])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU.

        Raises:
            CorruptCheckpoint: the tensor is missing or damaged.
        """
        if name not in self._checkpoint.index["tensors"]:
            raise CorruptCheckpoint(f"'{self.path}' has no '{name}'")
        shape, dtype = self.shape(name)
        out = torch.empty(shape, dtype=dtype)
        read_flat(self._checkpoint, [(name, 0, out.view(-1))], True, self._workers)
        return out

    def _read_meta(self) -> dict[str, Any]:
        try:
            meta = parse_strict_json(self.tensor(".".join(META)).numpy().tobytes())
            version = int(meta["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"'{self.path}': what belongs to the log does not parse: {error!r}") from error
        if version > _VERSION:
            raise UnsupportedFormat(f"'{self.path}' is of a log of version {version}, this reads {_VERSION}; upgrade")
        session = meta.get("session")
        if not (isinstance(session, str) and segments.SESSION.fullmatch(session)):
            # No segment would be of it, so that the log would end here without a word.
            raise CorruptCheckpoint(f"'{self.path}': its session is {str(session)[:100]!r}; expected 16 hex digits")
        return dict(meta)


def newest_first(run: Path) -> list[tuple[Path, Manifest | None]]:
    """Return the complete checkpoints with names of snapshots, newest first, each with its manifest or, if that cannot
    be read, None.
    """
    found: list[tuple[Path, Manifest | None]] = []
    for path, manifest in iter_checkpoints(run, lambda *_: None):
        if _NAME.fullmatch(path.name):
            found.insert(0, (path, manifest))
    known = {path for path, _ in found}
    for path in sorted(run.glob("step-*")):
        if _NAME.fullmatch(path.name) and is_complete(path) and path not in known:
            older = (place for place, (other, _) in enumerate(found) if other.name < path.name)
            found.insert(next(older, len(found)), (path, None))
    return found


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Return the metadata of a snapshot; None if `path` is no snapshot, or cannot be read."""
    with suppress(DSQError), Snapshot(path) as snapshot:
        return snapshot.meta
    return None


def sessions(run: Path) -> dict[str, Path]:
    """Return the sessions that the readable snapshots of a run are of, each with its newest snapshot, newest first."""
    found: dict[str, Path] = {}
    for path, _ in newest_first(run) if run.is_dir() else ():
        if (meta := read_metadata(path)) is not None:
            found.setdefault(meta["session"], path)
    return found


def refuse_others(run: Path, known: Collection[str], own: str = "-") -> None:
    """Refuse a run with snapshots of sessions that are not `known` and do not begin with `own`.

    Raises:
        CheckpointExists: there is such a snapshot, which the log would replace.
    """
    for session, path in sessions(run).items():
        if session not in known and not session.startswith(own):
            raise CheckpointExists(exists(run, path))


def exists(run: Path, newest: Path) -> str:
    """Return the text of an error for a run that has snapshots from which a log does not go on."""
    return (
        f"'{run}' has snapshots from which this log does not go on, the newest '{newest.name}': recover from them and "
        "pass what `recover` returned as resume=, or log into another directory"
    )


def clear_interrupted(run: Path) -> None:
    """Remove interrupted snapshots; no process may be saving one."""
    for path in run.iterdir():
        if _NAME.fullmatch(path.name) and path.is_dir() and not is_complete(path):
            gc.collect_garbage(path, 0)
            with suppress(OSError):  # not empty: something else lives there
                path.rmdir()


def retire(run: Path, keep: int, saved: int | None = None) -> None:
    """Remove all but the newest `keep` snapshots, and the segments that the remaining snapshots do not need.

    A manifest is removed first, so that a crash in between leaves garbage, never a checkpoint that does not load.

    Args:
        run: directory of the run.
        keep: number of snapshots to keep.
        saved: step of the snapshot that was just saved, which is the newest whatever the clocks of hosts say; None to
            order all snapshots by time.
    """
    found = [(path, meta) for path, manifest in newest_first(run)
             if manifest is not None and not manifest.pinned and (meta := read_metadata(path)) is not None]
    if saved is not None:
        found.sort(key=lambda one: one[0] != snapshot_directory(run, saved))
    oldest: dict[str, int] = {}
    for _, meta in found[:keep]:
        step = int(meta["step"])
        oldest[meta["session"]] = min(step, oldest.get(meta["session"], step))
    for path, _ in found[keep:]:
        (path / MANIFEST).unlink()
        sync_directory(path)
        shutil.rmtree(path)
    if oldest:
        for path in segments.superseded(run, oldest):
            path.unlink(missing_ok=True)
