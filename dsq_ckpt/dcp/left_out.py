"""Warnings of what a load leaves out without an error, though it may have been meant to be loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.hints import wrapped_hint
from dsq_ckpt.core.nesting import Nesting, empty_dicts
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.dcp.nested import NestedLoadPlanner
from dsq_ckpt.storage.checkpoint import Checkpoint


def warn_of_left_out(planner: DefaultLoadPlanner, checkpoint: Checkpoint, rank: int, alone: bool) -> None:
    """Warn of all that this module knows.

    Args:
        planner: planner of the load.
        checkpoint: what it loads.
        rank: of this process, or any but 0 for those that are to say nothing.
        alone: whether no other rank asks for anything else.
    """
    if not isinstance(planner, NestedLoadPlanner):
        warn_of_empty(planner.original_state_dict, checkpoint, rank)
    if planner.allow_partial_load:
        warn_of_unfilled(planner, checkpoint, rank)
    if alone:
        warn_of_more(getattr(planner, "given", None) or planner.original_state_dict, checkpoint)


def warn_of_empty(state_dict: Mapping[str, Any], checkpoint: Checkpoint, rank: int) -> None:
    """Warn of empty dicts below which a checkpoint has tensors: a planner of DCP loads what is named, so nothing there.

    Such is the `state` of an optimizer's own state dict before its first step.
    """
    empty = [path for path, _ in empty_dicts(state_dict) if path]
    if not empty:
        return
    with checkpoint.translate_errors():
        nesting, tensors = Nesting.from_json(checkpoint.index) or Nesting({}), checkpoint.index["tensors"]
    for path in empty:
        below = sum(name in tensors and own[: len(path)] == path for name, own in nesting.items())
        if below:
            name = ".".join(map(str, path))
            warn(
                f"'{name}' is an empty dict, and DCP loads nothing into it, though '{checkpoint.directory}' has {below}"
                f" tensors below '{name}'. Load into what has them, as get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict makes it, or by dsq_ckpt.load, which fills empty dicts",
                rank=rank,
            )


def warn_of_unfilled(planner: DefaultLoadPlanner, checkpoint: Checkpoint, rank: int) -> None:
    """Warn of keys below which a load that may be partial fills no tensor, though the checkpoint has some there.

    So it is with a model whose names have a prefix that those of the saved one have not: training would go on from
    fresh weights, with the moments and steps that were loaded.
    """
    with checkpoint.translate_errors():
        known = checkpoint.index["tensors"]
    asked: dict[str, list[str]] = {}
    for name, value in planner.state_dict.items():
        if isinstance(value, torch.Tensor | ShardedTensor):
            asked.setdefault(name.partition(".")[0], []).append(name)
    for key, names in asked.items():
        stored = [name for name in known if name.partition(".")[0] == key]
        if stored and not any(name in known for name in names):
            warn(
                f"nothing below '{key}' is loaded from '{checkpoint.directory}': it has none of the {len(names)} "
                f"tensors there, such as '{names[0]}', and {len(stored)} of other names, such as '{stored[0]}'"
                f"{wrapped_hint(names, names, known)}", rank=rank,
            )


def warn_of_more(state_dict: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Warn of state dicts of modules of which a checkpoint has more, as of six layers where a model has four.

    A state dict that `Module.state_dict` made names all modules of its model, so entries of others are not left out on
    purpose; nor are those of an extra state, which a module takes as a whole. Of other entries that are missing where
    their module is there, and of plain dicts, that is not known.
    """
    mappings = list(_mappings((), state_dict))
    told = {path: value for path, value in mappings if value and _modules_of(value)}
    extra = {
        (*path, name): value for path, own in mappings for name, value in own.items()
        if isinstance(value, Mapping) and value and str(name).rpartition(".")[2] == "_extra_state"
    }
    if not told and not extra:
        return
    with checkpoint.translate_errors():
        nesting = Nesting.from_json(checkpoint.index) or Nesting({})
    _warn_of_extra_states(extra, nesting)
    for path, own in told.items():
        modules = {strip_wrappers(name) for name in _modules_of(own)}
        if "" not in modules or not all(_module_of(name) in modules for name in own):
            continue  # it is of a submodule, with a prefix, or entries are named otherwise than their modules
        saved = [str(found[-1]) for found in nesting.values() if found[:-1] == path]
        more = [name for name in saved if name not in own and _module_of(name) not in modules]
        if more:
            place = f"'{'.'.join(path)}' in '{checkpoint.directory}'" if path else f"'{checkpoint.directory}'"
            warn(
                f"{place} has {quote(more)} of modules that the model does not have, which is not loaded: is it the "
                "same model? If a part is meant, give a plain dict in place of the model's state dict: dict(...) of it"
            )


def _warn_of_extra_states(extra: Mapping[tuple[str, ...], Mapping[Any, Any]], nesting: Nesting) -> None:
    """Warn of extra states, by their paths, that have fewer entries than were saved; of lists the planner warns."""
    told = {
        (*above, *below[1:])
        for above, value in extra.items() for below in flatten_state_dict({"": value})[1].values()
    }
    more = [
        name for name, path in nesting.items()
        if extra and any(path[:end] in extra for end in range(1, len(path)))
        and not any(path[:end] in told for end in range(1, len(path) + 1))
        and not any(type(part) is int for part in path)
    ]
    if more:
        warn(
            f"{quote(more)} was saved of an extra state and is not loaded, since the state dict does not name it: give "
            "the module in place of its state dict, dsq_ckpt.load({'model': model}, path), or an empty dict in place "
            "of the extra state"
        )


def _mappings(path: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a dict and those below it, with their paths."""
    yield path, node
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _mappings((*path, str(key)), value)


def _modules_of(state_dict: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of the modules that made a state dict; other mappings may raise an error for `_metadata`."""
    metadata = vars(state_dict).get("_metadata") if isinstance(state_dict, OrderedDict) else None
    return metadata if isinstance(metadata, dict) else ()


def _module_of(name: str) -> str:
    """Return the name of the module that an entry of its state dict belongs to."""
    return strip_wrappers(name.rpartition(".")[0])
