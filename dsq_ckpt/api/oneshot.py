"""`compress`: one checkpoint by itself, outside of a training run: for transfer learning, a model hub or an archive."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from xxhash import xxh3_128_hexdigest

from dsq_ckpt.api import background
from dsq_ckpt.api.oneshot_config import oneshot_config, quantize_small_weights
from dsq_ckpt.api.saving import ConfigLike
from dsq_ckpt.api.stateful import expand_stateful, get_state_dict
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.convert.mapped_files import State
from dsq_ckpt.convert.partitioner import partition_source
from dsq_ckpt.convert.sources import InMemory, Source, open_source, read_state_dict
from dsq_ckpt.core.arguments import expect, expect_folds
from dsq_ckpt.core.flat_names import flatten
from dsq_ckpt.core.interrupts import in_user_code, propagate_handler_errors
from dsq_ckpt.core.tensor_subclasses import replace_subclasses
from dsq_ckpt.core.urls import is_url
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, SingleProcess, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.collective import save_collectively
from dsq_ckpt.engine.consistency import RankSettings, check_same_settings
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.errors import ConfigError, SaveFailed
from dsq_ckpt.quantization.analysis import GlobalSketch
from dsq_ckpt.quantization.chunk import Chunk
from dsq_ckpt.quantization.groups import layer_types
from dsq_ckpt.quantization.plan import QuantizationPlan, plan_as_configured
from dsq_ckpt.quantization.rounded_weights import find_rounded_weights
from dsq_ckpt.search.manager import ConfigManager
from dsq_ckpt.storage.description import describe
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.paths import expand_path, resolve_local_path
from dsq_ckpt.storage.target_directory import refuse_target

Evaluate = Callable[[], float]
StateLike = Mapping[str, Any] | nn.Module | str | os.PathLike[str]


@propagate_handler_errors()
def compress(
    source: StateLike,
    path: str | os.PathLike[str],
    *,
    config: ConfigLike = None,
    evaluate: Evaluate | None = None,
    check: Evaluate | None = None,
    max_degradation: float | None = None,
    probes: int = 64,
    model: nn.Module | None = None,
    overwrite: bool = False,
    communicator: Communicator | None = None,
) -> dict[str, Any]:
    """Compress one checkpoint into a keyframe outside of any run; in one process, or collective over `communicator`.

    Other checkpoints in the parent directory of `path` are neither used nor remembered. The state, or a rank's share of
    it, is held in memory; files of `torch.save` and safetensors are memory-mapped.

    With `max_degradation`, the search finds the smallest configuration whose base layer is within that bound. There is
    no refinement layer, also of moments, unless `config` sets `refinement_bits`, so a load has exactly the values that
    were measured. If no configuration is within the bound, weights are stored exactly, unless `config` sets
    `search.fallback`. With `evaluate` alone, the search uses the bound of `config.search`; with neither, `config` is
    used unchanged.

    With `communicator`, all ranks pass the same arguments and each reads and writes its share. The decoded values are
    those of a single process, bit for bit. A search needs a single process.

    Args:
        source: a state dict of whole tensors; a module, whose state dict is saved; or the path of a checkpoint: a
            `.safetensors` file, the index of several or a directory with them, a `torch.save` file of plain data, a
            dsq_ckpt checkpoint, or a plain DCP directory. Only the last is unpickled, by torch itself: pass only DCP
            directories that you trust.
        path: the checkpoint directory to write, on storage that all ranks share.
        config: as for `dsq_ckpt.save`.
        evaluate: returns the metric of the model in its current state, as for `Compressor`.
        check: returns the same metric on other batches, as for `Compressor`: both must be within the bound.
        max_degradation: bound of the metric's degradation, relative to the metric of the source: 0.01 is 1 %.
        probes: with `max_degradation`, the number of calls of `evaluate` besides those of the search: one records the
            inputs of layers, so that rounding errors cancel out in their outputs; the others measure the sensitivity of
            classes of tensors, so that each gets its own step. 0: nearest codes, and one step for all.
        model: the model that `evaluate` uses, if it is not `source`. The weights of the source are loaded into it
            first: the state dict, or the entry of it that has the model's keys. Without `evaluate`, it only provides
            the types of layers.
        overwrite: replace a complete checkpoint at `path`.
        communicator: communicator of the ranks that compress together, such as
            `dsq_ckpt.distributed.mpi.MPICommunicator()` or `dsq_ckpt.distributed.comm.TorchCommunicator()`; None: this
            process alone.

    Returns:
        The result of `describe`, and `quality`: the measurements of the search, None without one.

    Raises:
        ConfigError: the configuration is invalid, or is one for differences (`delta.against: values`, as in the systems
            lc, topn and scar); arguments contradict each other or those of another rank; or the model has other keys,
            shapes or dtypes than the source.
        CheckpointNotFound, CorruptCheckpoint, LoadFailed: the source cannot be read.
        CheckpointExists: a complete checkpoint is at `path`, without `overwrite`.
        SaveFailed: `path` is not a directory.
        DSQError: any other failure, also of `evaluate`, of `check` or of another rank; all ranks raise it, and nothing
            is committed.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> torch.save(model.state_dict(), "model.pt")
        >>> sizes = dsq_ckpt.compress("model.pt", "compressed/model")
        >>> sizes["bytes_written"] < sizes["bytes_logical"]
        True
    """
    comm = communicator or SingleProcess()

    def prepare() -> tuple[Path, DSQConfig, Source]:
        target = resolve_local_path(path)
        expect("source", source, Mapping | nn.Module | str | os.PathLike, "a state dict, a module, or a path")
        refuse_target(target, overwrite)
        if evaluate is not None and comm.size > 1:
            raise ConfigError("evaluate looks at the model of one process: leave it out, or communicator")
        expect_folds(evaluate, check)
        resolved = oneshot_config(config, max_degradation, evaluate is not None, probes)
        opened = _open(source, target, model, evaluate)
        if max_degradation is not None and probes:
            resolved = quantize_small_weights(resolved, config, opened.tensors)
        return target, resolved, opened

    target, resolved, opened = run_on_all_ranks(comm, prepare)
    evaluated = source if isinstance(source, nn.Module) else model

    def write_checkpoint() -> None:
        background.wait()  # the pending save must record its commit first
        _check_ranks_agree(comm, RankSettings.of(target, resolved), {"overwrite": overwrite, "source": [
            (name, stored._replace(memory=None)) for name, stored in opened.tensors.items()
        ]})
        options = SaveOptions(
            resolved, parent=None, overwrite=overwrite,
            layer_types=None if evaluated is None else layer_types(evaluated), rounding=find_rounded_weights(evaluated),
            policy=(
                plan_as_configured if evaluated is None or evaluate is None
                else _search_policy(evaluated, evaluate, check, 0 if max_degradation is None else probes)
            ),
            history=SaveHistory(),
        )
        save_collectively(target, lambda: _local_share(opened, comm), options, comm)

    with closing(opened):
        run_on_all_ranks(comm, write_checkpoint)

    def describe_checkpoint() -> dict[str, Any] | None:
        if comm.rank != 0:
            return None
        return {**describe(target), "quality": copy.deepcopy(Manifest.read(target).quality)}

    result = gather_from_all_ranks(comm, describe_checkpoint)[0]
    assert result is not None
    return result


def _open(source: StateLike, target: Path, model: nn.Module | None, evaluate: Evaluate | None) -> Source:
    """Open the source; with `evaluate` and `model`, load it into the model and open the model's tensors."""
    if isinstance(source, nn.Module) and model not in (None, source):
        raise ConfigError("source is a module, and model another: a module is evaluated itself; leave model out")
    if evaluate is not None and model is None and not isinstance(source, nn.Module):
        raise ConfigError("evaluate needs model: the module whose weights it looks at, to be given those of the source")
    opened: Source
    if isinstance(source, nn.Module | Mapping):
        state = get_state_dict(source) if isinstance(source, nn.Module) else expand_stateful(dict(source))
        opened = _open_state_dict(dict(state))
    elif not is_url(source) and expand_path(source).resolve() == target.resolve():
        raise ConfigError(f"'{target}' is the source too; write the compressed checkpoint elsewhere")
    else:
        opened = open_source(source)
    if not opened.tensors:
        location = "the module" if isinstance(source, nn.Module) else "the state dict"
        location = location if isinstance(source, nn.Module | Mapping) else f"'{os.fspath(source)}'"
        raise ConfigError(
            f"{location} holds no tensors (its keys: {_format_names(opened.nesting)}): there is nothing to compress"
        )
    if evaluate is not None and model is not None and not isinstance(source, nn.Module):
        with closing(opened):
            opened = InMemory(_load_model(model, read_state_dict(opened)))
    return opened


def _open_state_dict(state: State) -> InMemory:
    """Open a state dict of the user; all its tensors must be whole and have values.

    Raises:
        ConfigError: a tensor is distributed or on the meta device.
        SaveFailed: a tensor cannot be stored for another reason.
    """
    state = replace_subclasses(state)
    for fqn, value in flatten(state)[0].items():
        if isinstance(value, DTensor | ShardedTensor):
            raise ConfigError(
                f"'{fqn}' is a part of a distributed tensor; compress takes whole ones: use dsq_ckpt.save on all ranks"
            )
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ConfigError(f"'{fqn}' is on the meta device: it has no values to compress")
    return InMemory(state)


def _check_ranks_agree(comm: Communicator, settings: RankSettings, arguments: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings and arguments; collective.

    Raises:
        ConfigError: they differ; on all ranks.
    """
    # Hashes keep the messages small, since there may be many tensors.
    hashes = {name: xxh3_128_hexdigest(repr(value).encode()) for name, value in arguments.items()}
    gathered = gather_from_all_ranks(comm, lambda: (settings, hashes))
    check_same_settings([settings for settings, _ in gathered])
    for rank, (_, hashes) in enumerate(gathered):
        if differing := [name for name in hashes if hashes[name] != gathered[0][1][name]]:
            raise ConfigError(f"rank {rank} was given another {differing[0]} than rank 0; all ranks need the same")


def _local_share(opened: Source, comm: Communicator) -> LocalState:
    """Return the shards that this rank reads and writes; rank 0 also has the values that are not tensors."""
    values = opened.read(partition_source(opened, comm.size)[comm.rank])
    parts = [
        LocalShard(key, opened.tensors[key.fqn].shape, opened.tensors[key.fqn].dtype, partial(values.__getitem__, key))
        for key in values
    ]
    if comm.rank:
        return LocalState(parts)
    objects = opened.objects()
    return LocalState(
        parts, objects={name: _pickle_object(value) for name, value in objects.items()}, nesting=opened.nesting,
        settings=objects,
    )


def _pickle_object(value: Any) -> bytes:
    """Return an object as DCP serializes it."""
    stream = io.BytesIO()
    with in_user_code():
        torch.save(value, stream)
    return stream.getvalue()


def _search_policy(
    model: nn.Module, evaluate: Evaluate, check: Evaluate | None, probes: int
) -> Callable[..., QuantizationPlan]:
    """Return a policy that searches, and fails if `evaluate` or `check` fails, since the quality would be unknown."""
    failures: list[tuple[str, Exception]] = []

    def guarded(name: str, original: Evaluate) -> Evaluate:
        def call() -> float:
            try:
                metric = original()
            except Exception as error:
                failures.append((name, error))
                raise
            failures.clear()  # the search continued after the failure
            return metric

        return call

    manager = ConfigManager(
        model, guarded("evaluate", evaluate), check=None if check is None else guarded("check", check), probes=probes
    )

    def choose(
        sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
    ) -> QuantizationPlan:
        choice = manager(sketches, local, config, comm, workers)
        if failures:
            name, error = failures[0]
            raise SaveFailed(f"`{name}` raised {type(error).__name__}: {error}") from error
        if choice.quality is not None and not {fold.key for fold in manager.folds} <= set(choice.quality):
            raise SaveFailed(str(choice.quality["reason"]))
        return choice

    return choose


def _load_model(model: nn.Module, state: State) -> State:
    """Load the weights of a state dict into the model; return the state dict with the model's tensors in their place.

    Raises:
        ConfigError: no entry has the model's keys, or a shape or dtype differs.
    """
    model_state = get_state_dict(model)
    path, entry = _find_model_entry(model_state, state)
    for name, value in entry.items():
        if not isinstance(value, torch.Tensor):
            continue
        expected = model_state[name]
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            raise ConfigError(
                f"'{'.'.join([*path, name])}' of the source is {_format_tensor(value)}, but "
                f"{_format_tensor(expected)} in the model; evaluate a model of the same shapes and dtypes "
                "(model.to(dtype))"
            )
    try:
        with in_user_code(loads_module=True):
            model.load_state_dict(dict(entry), strict=False)  # keys were compared before; one of tied tensors suffices
    except RuntimeError as error:
        raise ConfigError(f"the model does not take the source's weights: {error}") from error
    model_state = get_state_dict(model)
    adopted = {name: model_state[name] if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
    return _replace_entry(state, path, adopted)


def _find_model_entry(model: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the path and the entries of the dict in `state` that has the keys of a model's state dict `model`."""
    best: tuple[str, ...] = ()
    closest: Mapping[str, Any] = {}
    for path, entry in _iter_dicts((), state):
        missing = model.keys() - entry.keys()
        if entry.keys() <= model.keys() and _are_tied(missing, model):
            return path, entry
        if len(model.keys() & entry.keys()) > len(model.keys() & closest.keys()):
            best, closest = path, entry
    location = f"entry '{'.'.join(best)}' of the source" if best else "the source"
    if not closest:
        raise ConfigError(
            f"the source has none of the model's keys ({_format_names(model)}); it has {_format_names(state)}: give "
            "the model that these are of, or the state dict under the model's own names"
        )
    raise ConfigError(
        f"{location} has other keys than the model: missing are {_format_names(model.keys() - closest.keys())}; "
        f"not the model's are {_format_names(closest.keys() - model.keys())}"
    )


def _iter_dicts(path: tuple[str, ...], state: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield all dicts in a state dict, outer ones first."""
    yield path, state
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _iter_dicts((*path, str(key)), value)


def _are_tied(missing: set[str], model: Mapping[str, Any]) -> bool:
    """Return whether all missing tensors share memory with others, as an output layer does with its embedding."""
    tensors = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    present = {value.data_ptr() for name, value in tensors.items() if name not in missing and value.numel()}
    return all(name in tensors and tensors[name].data_ptr() in present for name in missing)


def _replace_entry(state: Mapping[str, Any], path: tuple[str, ...], entry: State) -> State:
    if not path:
        return entry
    return {
        key: _replace_entry(value, path[1:], entry) if str(key) == path[0] and isinstance(value, Mapping) else value
        for key, value in state.items()
    }


def _format_tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _format_names(names: Iterable[str]) -> str:
    texts = sorted(map(str, names))
    text = ", ".join(f"'{name}'" for name in texts[:3])
    return (text + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")) or "none"
