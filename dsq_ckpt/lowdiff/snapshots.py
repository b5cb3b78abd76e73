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
from torch import nn

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
from dsq_ckpt.lowdiff.plain_data import from_plain
from dsq_ckpt.lowdiff.train_state import OPTIMIZER
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.frozen_tensors import FrozenTensors, find_frozen
from dsq_ckpt.quantization.groups import is_lossy, layer_types
from dsq_ckpt.quantization.rounded_weights import find_rounded_weights
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


def add_residual_rule(config: DSQConfig) -> DSQConfig:
    """Return a configuration with a rule for residuals of error feedback, if it is lossy."""
    if not is_lossy(config):
        return config
    # Residuals have another distribution than weights, so they need their own codebooks.
    rules = [*(rule.model_dump() for rule in config.quantize.rules), _RESIDUALS]
    return DSQConfig.create({**config.model_dump(), "quantize": {**config.quantize.model_dump(), "rules": rules}})


def snapshot_directory(run: Path, step: int) -> Path:
    """Return the directory of the snapshot after `step` steps."""
    return run / f"step-{step:09d}"


def describe_model(model: nn.Module, config: DSQConfig) -> dict[str, Any]:
    """Return the properties of a model that decide which of its tensors are stored exactly, as plain data.

    To be called at each snapshot: frozen tensors are found by their changes. Exact snapshots need none.
    """
    if not is_lossy(config):
        return {}
    frozen = find_frozen(model)
    return {
        "layer_types": layer_types(model), "rounding": find_rounded_weights(model),
        "frozen": [frozen.has_trained, frozen.unchanged, frozen.changing],
    }


def save_snapshot(
    run: Path, step: int, tensors: Iterable[SnapshotTensor], meta: Mapping[str, Any] | None, config: DSQConfig,
    comm: Communicator, model: Mapping[str, Any] | None = None,
) -> Manifest:
    """Save a snapshot; collective. The snapshot appears complete or not at all.

    Args:
        run: directory of the run.
        step: steps done.
        tensors: tensors of this rank; names must not repeat on other ranks.
        meta: metadata as plain data on rank 0; None on other ranks.
        config: configuration; see `snapshot_config`.
        comm: communicator of the checkpointing processes.
        model: result of `describe_model`; None or empty if the model is unknown.

    Raises:
        DSQError: on all ranks, if any failed; earlier snapshots are untouched.
    """
    own_tensors = list(tensors)
    if meta is not None:
        text = json.dumps({"version": _VERSION, **meta}, separators=(",", ":")).encode()
        own_tensors.append(SnapshotTensor(META, torch.frombuffer(bytearray(text), dtype=torch.uint8)))
    path = snapshot_directory(run, step)
    state = LocalState(
        [_as_local_shard(item) for item in own_tensors], nesting={item.name: item.path for item in own_tensors},
        settings=_plain_settings(meta or {}) if is_lossy(config) else {},
    )
    parent = "auto" if is_lossy(config) else None
    model_options = {**model, "frozen": FrozenTensors(*model["frozen"])} if model else {}
    options = SaveOptions(config, parent=parent, overwrite=True, after=partial(_newest_parent, run), **model_options)
    save_collectively(path, lambda: state, options, comm)
    return Manifest.read(path)


def _newest_parent(run: Path) -> ParentRef | None:
    """Return the newest readable snapshot; None if there is none."""
    snapshots = (
        ParentRef(manifest.save_id, str(path), manifest.depth)
        for path, manifest in list_snapshots(run) if manifest is not None
    )
    return next(snapshots, None)


def _plain_settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters and plain state of the optimizer, by their fqns in a state dict."""
    settings = flatten_param_groups(OPTIMIZER, map(from_plain, meta.get("hyper", ())))
    for name, state in meta.get("plain", {}).items():
        settings |= {f"{OPTIMIZER}.state.{name}.{key}": from_plain(value) for key, value in state.items()}
    return settings


def _as_local_shard(item: SnapshotTensor) -> LocalShard:
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

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors become `DSQError` and name the snapshot."""
        return self._checkpoint.translate_errors()

    @property
    def lossy(self) -> bool:
        return self._checkpoint.manifest.lossy

    @property
    def lossy_kinds(self) -> set[str]:
        """Kinds of tensors that the snapshot stores lossy."""
        return self._checkpoint.manifest.lossy_kinds

    def find_damage(self) -> Iterator[tuple[str, str]]:
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
            # No segment would match the session, so that recovery would end at this snapshot silently.
            raise CorruptCheckpoint(f"'{self.path}': its session is {str(session)[:100]!r}; expected 16 hex digits")
        return dict(meta)


def list_snapshots(run: Path) -> list[tuple[Path, Manifest | None]]:
    """Return the complete checkpoints with names of snapshots, newest first, each with its manifest.

    The manifest is None if it cannot be read.
    """
    snapshots: list[tuple[Path, Manifest | None]] = []
    for path, manifest in iter_checkpoints(run, lambda *_: None):
        if _NAME.fullmatch(path.name):
            snapshots.insert(0, (path, manifest))
    readable = {path for path, _ in snapshots}
    for path in sorted(run.glob("step-*")):
        if _NAME.fullmatch(path.name) and is_complete(path) and path not in readable:
            older = (index for index, (other, _) in enumerate(snapshots) if other.name < path.name)
            snapshots.insert(next(older, len(snapshots)), (path, None))
    return snapshots


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Return the metadata of a snapshot; None if `path` is not a snapshot, or cannot be read."""
    with suppress(DSQError), Snapshot(path) as snapshot:
        return snapshot.meta
    return None


def list_sessions(run: Path) -> dict[str, Path]:
    """Return the sessions of the readable snapshots of a run, newest first, each with its newest snapshot."""
    sessions: dict[str, Path] = {}
    for path, _ in list_snapshots(run) if run.is_dir() else ():
        if (meta := read_metadata(path)) is not None:
            sessions.setdefault(meta["session"], path)
    return sessions


def check_sessions(run: Path, sessions: Collection[str], own_prefix: str = "-") -> None:
    """Check that a run has no snapshots of other logs, which this log would replace.

    Args:
        run: directory of the run.
        sessions: sessions that the log continues.
        own_prefix: prefix of the log's own sessions.

    Raises:
        CheckpointExists: the run has a snapshot of another session.
    """
    for session, path in list_sessions(run).items():
        if session not in sessions and not session.startswith(own_prefix):
            raise CheckpointExists(existing_log_message(run, path))


def existing_log_message(run: Path, newest: Path) -> str:
    """Return the error message for a run with snapshots that a log does not continue."""
    return (
        f"'{run}' has snapshots from which this log does not go on, the newest '{newest.name}': recover from them and "
        "pass what `recover` returned as resume=, or log into another directory"
    )


def remove_interrupted(run: Path) -> None:
    """Remove interrupted snapshots. No process may be saving a snapshot."""
    for path in run.iterdir():
        if _NAME.fullmatch(path.name) and path.is_dir() and not is_complete(path):
            gc.collect_garbage(path, 0)
            with suppress(OSError):  # not empty: the directory has foreign files
                path.rmdir()


def remove_old_snapshots(run: Path, keep: int, saved: int | None = None) -> None:
    """Remove all but the newest `keep` snapshots, and the segments that the remaining snapshots do not need.

    A manifest is removed first, so that a crash in between leaves garbage, never a checkpoint that does not load.

    Args:
        run: directory of the run.
        keep: number of snapshots to keep.
        saved: step of the snapshot that was saved last, which counts as the newest even if clocks of hosts differ; None
            to order all snapshots by time.
    """
    snapshots = [(path, meta) for path, manifest in list_snapshots(run)
                 if manifest is not None and not manifest.pinned and (meta := read_metadata(path)) is not None]
    if saved is not None:
        snapshots.sort(key=lambda snapshot: snapshot[0] != snapshot_directory(run, saved))
    oldest: dict[str, int] = {}
    for _, meta in snapshots[:keep]:
        step = int(meta["step"])
        oldest[meta["session"]] = min(step, oldest.get(meta["session"], step))
    for path, _ in snapshots[keep:]:
        (path / MANIFEST).unlink()
        sync_directory(path)
        shutil.rmtree(path)
    if oldest:
        for path in segments.find_superseded(run, oldest):
            path.unlink(missing_ok=True)
