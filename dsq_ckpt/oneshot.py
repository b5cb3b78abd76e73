"""`compress`: one checkpoint by itself, without a run: for transfer learning, for a hub, for the shelf."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from dsq_ckpt import chain
from dsq_ckpt.analysis import Sketches
from dsq_ckpt.api import ConfigLike, as_config, describe, finish_background, save_with
from dsq_ckpt.choice import Choice
from dsq_ckpt.chunk import Chunk
from dsq_ckpt.comm import Communicator
from dsq_ckpt.config import DSQConfig
from dsq_ckpt.dcp.writer import DSQStorageWriter
from dsq_ckpt.errors import ConfigError, SaveFailed
from dsq_ckpt.manifest import Manifest, local_path
from dsq_ckpt.search.manager import ConfigManager
from dsq_ckpt.sources import State, read_state
from dsq_ckpt.targets import refuse_checkpoint
from dsq_ckpt.trees import Tree, difference, merged, named_tree
from dsq_ckpt.workers import Workers

Evaluate = Callable[[], float]
Source = Mapping[str, Any] | nn.Module | str | os.PathLike[str]

_KINDS = ("weights", "exp_avg", "exp_avg_sq", "momentum")


def compress(
    source: Source,
    path: str | os.PathLike[str],
    *,
    config: ConfigLike = None,
    evaluate: Evaluate | None = None,
    max_degradation: float | None = None,
    model: nn.Module | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Compress one checkpoint: a keyframe that belongs to no run, written by this process alone.

    What was saved or loaded in the directory that `path` lies in is neither used nor remembered. The whole state is in
    memory, files of `torch.save` and safetensors are mapped.

    With `max_degradation`, the smallest configuration is searched whose base layer keeps `evaluate` to it; the
    refinement layer is left out, of moments too, unless `config` sets `refinement_bits`: what is loaded is then what
    was measured. If no configuration keeps to it, weights are stored exactly, unless `config` sets `search.otherwise`.
    With `evaluate` alone, the search is that of `config.search`; with neither, the configuration is taken as it is.

    Args:
        source: a state dict of whole tensors; a module, whose state dict is saved; or the path of a checkpoint: a
            `.safetensors` file, the index of several or a directory with them, a `torch.save` file of plain data, a
            dsq_ckpt checkpoint, or a plain DCP directory. Only the last is unpickled, by torch itself: give only DCP
            directories that you trust.
        path: the checkpoint directory to write.
        config: as for `dsq_ckpt.save`.
        evaluate: the metric of the model as it is now, as for `Compressor`.
        max_degradation: how much worse the metric may become, relative to that of the source: 0.01 is 1 %.
        model: the model that `evaluate` looks at, where `source` is not it. It is given the weights of the source
            first: the state dict, or the entry of it that has the model's keys. Without `evaluate`, its module tree
            tells layer types and nothing more.
        overwrite: replace a complete checkpoint at `path`.

    Returns:
        What `describe` tells, and `quality`: what the search measured, None where there was none.

    Raises:
        ConfigError: the configuration is wrong, or one for differences (`delta.against: values`, as in the systems lc,
            topn and scar), arguments contradict each other, or the model has other keys, shapes or dtypes than the
            source.
        CheckpointNotFound, CorruptCheckpoint, LoadFailed: the source cannot be read.
        CheckpointExists: `path` holds a complete checkpoint and `overwrite` was not given.
        SaveFailed: `path` is no directory.
        DSQError: what else failed, `evaluate` included; nothing was committed then.
    """
    target = local_path(path)
    refuse_checkpoint(target, overwrite)
    chosen = as_config(config) if max_degradation is None else _bounded(config, max_degradation)
    if chosen.delta.against == "values":
        raise ConfigError(
            f"system '{chosen.system}' with delta.against 'values' compresses differences to a parent, and a "
            "checkpoint by itself has none: all of it would be stored exactly. Choose a system that compresses weights "
            "themselves (dsq, inshrinkerator, uniform, adaptive, kmeans), or exact where that is meant; differences "
            "are for dsq_ckpt.save in a run"
        )
    if isinstance(source, nn.Module) and model not in (None, source):
        raise ConfigError("source is a module, and model another: a module is evaluated itself; leave model out")
    model = source if isinstance(source, nn.Module) else model
    if max_degradation is not None and evaluate is None:
        raise ConfigError("max_degradation needs evaluate: a function that gives the metric of the model as it is")
    if evaluate is not None and model is None:
        raise ConfigError("evaluate needs model: the module whose weights it looks at, to be given those of the source")
    state = _state(source, target)
    if evaluate is not None and model is not None:
        if not isinstance(source, nn.Module):
            state = _loaded_into(model, state)
        writer = DSQStorageWriter(
            target, chosen, parent=None, overwrite=overwrite, model=model, chooser=_search(model, evaluate)
        )
    else:
        writer = DSQStorageWriter(target, chosen, parent=None, overwrite=overwrite, model=model)
    finish_background()  # what it commits is for its run to remember
    with chain.apart(target):
        save_with(writer, state, no_dist=True)
    return {**describe(target), "quality": Manifest.read(target).quality}


def _state(source: Source, target: Path) -> State:
    """The state dict to save."""
    if isinstance(source, nn.Module):
        state = dict(source.state_dict())
    elif isinstance(source, Mapping):
        state = dict(source)
    else:
        if Path(source).absolute().resolve() == target.resolve():
            raise ConfigError(f"'{target}' is the source too; write the compressed checkpoint elsewhere")
        state = read_state(source)
    tensors = {fqn: value for fqn, value in flatten_state_dict(state)[0].items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ConfigError("the source holds no tensors: there is nothing to compress")
    for fqn, tensor in tensors.items():
        if isinstance(tensor, DTensor | ShardedTensor):
            raise ConfigError(
                f"'{fqn}' is a part of a distributed tensor; compress takes whole ones: use dsq_ckpt.save on all ranks"
            )
        if tensor.is_meta:
            raise ConfigError(f"'{fqn}' is on the meta device: it has no values to compress")
    return state


def _search(model: nn.Module, evaluate: Evaluate) -> Callable[..., Choice]:
    """A chooser that searches, and fails where `evaluate` does: nothing is gained by a snapshot of unknown quality."""
    failures: list[Exception] = []

    def guarded() -> float:
        try:
            return evaluate()
        except Exception as error:
            failures.append(error)
            raise

    manager = ConfigManager(model, guarded)

    def choose(
        sketches: Sketches, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
    ) -> Choice:
        choice = manager(sketches, local, config, comm, workers)
        if failures:
            raise SaveFailed(f"`evaluate` raised {type(failures[0]).__name__}: {failures[0]}") from failures[0]
        if choice.quality is not None and "metric" not in choice.quality:
            raise SaveFailed(str(choice.quality["reason"]))
        return choice

    return choose


def _bounded(config: ConfigLike, max_degradation: float) -> DSQConfig:
    """The configuration with a bound on the base layer, and without a refinement layer unless it asks for one."""
    if not 0 < max_degradation < 10:
        raise ConfigError(
            f"max_degradation is {max_degradation}; expected a number above 0 and below 10, such as 0.01 for 1 %; for "
            "no degradation at all take the preset 'exact'"
        )
    whole = as_config(config)  # says what is wrong with it, and where
    snapshot = {
        "quantize": {kind: {"refinement_bits": 0} for kind in _KINDS}, "search": {"otherwise": "exact"},
    }
    bound = {"system": whole.system, "search": {"bound": "relative", "epsilon": max_degradation}}
    return DSQConfig.create(merged(merged(snapshot, _said(config)), bound))


def _said(config: ConfigLike) -> Tree:
    """What a configuration says itself; of a `DSQConfig`, which has every key, what differs from the defaults."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    if not isinstance(config, DSQConfig):
        return named_tree(config)
    tree, usual = config.model_dump(), DSQConfig(system=config.system).model_dump()
    said = difference(tree, usual)
    if "groups" in said.get("quantize", {}):  # a group's defaults are what weights are set to
        weights = tree["quantize"]["weights"]
        said["quantize"]["groups"] = {
            name: difference(group, weights) for name, group in tree["quantize"]["groups"].items()
        }
    return said


def _loaded_into(model: nn.Module, state: State) -> State:
    """Give the model the weights of a state dict; returns that state dict with the model's tensors in their place.

    Raises:
        ConfigError: no entry has the model's keys, or a shape or dtype differs.
    """
    own = model.state_dict()
    path, entry = _entry(own, state)
    for name, value in entry.items():
        if not isinstance(value, torch.Tensor):
            continue
        expected = own[name]
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            raise ConfigError(
                f"'{'.'.join([*path, name])}' of the source is {_looks(value)}, but {_looks(expected)} in the model; "
                "evaluate a model of the same shapes and dtypes (model.to(dtype))"
            )
    try:
        model.load_state_dict(dict(entry), strict=False)  # keys were compared; of tied tensors one is enough
    except RuntimeError as error:
        raise ConfigError(f"the model does not take the source's weights: {error}") from error
    own = model.state_dict()
    adopted = {name: own[name] if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
    return _replaced(state, path, adopted)


def _entry(own: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """The part of a state dict that has the keys of a model's, `own`: where it is, and what it holds."""
    best: tuple[str, ...] = ()
    closest: Mapping[str, Any] = {}
    for path, entry in _entries((), state):
        missing = own.keys() - entry.keys()
        if entry.keys() <= own.keys() and _tied(missing, own):
            return path, entry
        if len(own.keys() & entry.keys()) > len(own.keys() & closest.keys()):
            best, closest = path, entry
    where = f"entry '{'.'.join(best)}' of the source" if best else "the source"
    if not closest:
        raise ConfigError(
            f"the source has none of the model's keys ({_some(own)}); it has {_some(state)}: give the model that these "
            "are of, or the state dict under the model's own names"
        )
    raise ConfigError(
        f"{where} has other keys than the model: missing are {_some(own.keys() - closest.keys())}; "
        f"not the model's are {_some(closest.keys() - own.keys())}"
    )


def _entries(path: tuple[str, ...], state: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """All dicts in a state dict, outer ones first."""
    yield path, state
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _entries((*path, str(key)), value)


def _tied(missing: set[str], own: Mapping[str, Any]) -> bool:
    """Whether all missing tensors share their memory with others, as a head does with its embedding."""
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    there = {value.data_ptr() for name, value in tensors.items() if name not in missing and value.numel()}
    return all(name in tensors and tensors[name].data_ptr() in there for name in missing)


def _replaced(state: Mapping[str, Any], path: tuple[str, ...], entry: State) -> State:
    if not path:
        return entry
    return {
        key: _replaced(value, path[1:], entry) if str(key) == path[0] and isinstance(value, Mapping) else value
        for key, value in state.items()
    }


def _looks(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _some(names: Iterable[str]) -> str:
    known = sorted(map(str, names))
    shown = ", ".join(f"'{name}'" for name in known[:3])
    return (shown + (f" and {len(known) - 3} more" if len(known) > 3 else "")) or "none"
