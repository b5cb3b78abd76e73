"""Warnings of entries that a load skips without an error, though the user may expect them to be loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dsq_ckpt.codebooks.registry import CODEBOOKS
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.hints import wrapped_hint
from dsq_ckpt.core.nesting import Nesting, empty_dicts
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.dcp.nested_planners import NestedLoadPlanner
from dsq_ckpt.storage.checkpoint import Checkpoint


def warn_of_unloaded(planner: DefaultLoadPlanner, checkpoint: Checkpoint, rank: int, is_alone: bool) -> None:
    """Warn of all kinds of entries that a load skips.

    Args:
        planner: planner of the load.
        checkpoint: the checkpoint to load.
        rank: rank of this process; only rank 0 prints.
        is_alone: whether no other rank requests other entries.
    """
    if not isinstance(planner, NestedLoadPlanner):
        warn_of_empty_dicts(planner.original_state_dict, checkpoint, rank)
    warn_of_linear_moments(checkpoint, rank)
    if planner.allow_partial_load:
        warn_of_unfilled_keys(planner, checkpoint, rank)
    if is_alone:
        state_dict = getattr(planner, "caller_state_dict", None) or planner.original_state_dict
        warn_of_extra_modules(state_dict, checkpoint)


def warn_of_linear_moments(checkpoint: Checkpoint, rank: int) -> None:
    """Warn of second moments on a linear axis, which former versions stored: small ones come back as zero."""
    try:
        block = checkpoint.manifest.config["quantize"]["exp_avg_sq"]
        codebook = CODEBOOKS[block["codebook"]["fit"]].model_validate(block["codebook"])
        in_use = block["method"] == "quantize" and "exp_avg_sq" in checkpoint.manifest.lossy_kinds
    except (KeyError, TypeError, ValueError):  # a configuration of another version; no load needs it
        return
    if codebook.explain_misfit("exp_avg_sq", in_use) is not None:
        warn(
            f"'{checkpoint.directory}' has second moments of fit '{codebook.fit}' on a linear axis, of which small "
            "ones may have become zero: Adam's next update can be thousands of times too large. Load the keyframe of "
            "its run, or leave the optimizer out", rank=rank,
        )


def warn_of_empty_dicts(state_dict: Mapping[str, Any], checkpoint: Checkpoint, rank: int) -> None:
    """Warn of empty dicts below which a checkpoint has tensors: DCP's planner loads named entries only, so none there.

    An example is the `state` of an optimizer's own state dict before its first step.
    """
    empty = [path for path, _ in empty_dicts(state_dict) if path]
    if not empty:
        return
    with checkpoint.translate_errors():
        nesting, tensors = Nesting.from_json(checkpoint.index) or Nesting({}), checkpoint.index["tensors"]
    for path in empty:
        count = sum(name in tensors and full_path[: len(path)] == path for name, full_path in nesting.items())
        if count:
            name = ".".join(map(str, path))
            warn(
                f"'{name}' is an empty dict, and DCP loads nothing into it, though '{checkpoint.directory}' has {count}"
                f" tensors below '{name}'. Load into what has them, as get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict makes it, or by dsq_ckpt.load, which fills empty dicts",
                rank=rank,
            )


def warn_of_unfilled_keys(planner: DefaultLoadPlanner, checkpoint: Checkpoint, rank: int) -> None:
    """Warn of top-level keys below which a partial load fills no tensor, though the checkpoint has tensors there.

    An example is a model whose names have a prefix that the saved names lack: training would continue from fresh
    weights with the loaded moments and steps.
    """
    with checkpoint.translate_errors():
        tensors = checkpoint.index["tensors"]
    requested: dict[str, list[str]] = {}
    for name, value in planner.state_dict.items():
        if isinstance(value, torch.Tensor | ShardedTensor):
            requested.setdefault(name.partition(".")[0], []).append(name)
    for key, names in requested.items():
        stored = [name for name in tensors if name.partition(".")[0] == key]
        if stored and not any(name in tensors for name in names):
            warn(
                f"nothing below '{key}' is loaded from '{checkpoint.directory}': it has none of the {len(names)} "
                f"tensors there, such as '{names[0]}', and {len(stored)} of other names, such as '{stored[0]}'"
                f"{wrapped_hint(names, names, tensors)}", rank=rank,
            )


def warn_of_extra_modules(state_dict: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Warn of module state dicts for which a checkpoint has more modules, such as six layers for a model with four.

    A state dict made by `Module.state_dict` names all modules of its model, so entries of others are not skipped on
    purpose. Nor are those of an extra state, which a module needs as a whole. Missing entries of an existing module,
    and of plain dicts, may be skipped on purpose.
    """
    mappings = list(_iterate_mappings((), state_dict))
    module_dicts = {path: value for path, value in mappings if value and _get_modules(value)}
    extra = {
        (*path, name): value for path, entries in mappings for name, value in entries.items()
        if isinstance(value, Mapping) and value and str(name).rpartition(".")[2] == "_extra_state"
    }
    if not module_dicts and not extra:
        return
    with checkpoint.translate_errors():
        nesting = Nesting.from_json(checkpoint.index) or Nesting({})
    _warn_of_extra_states(extra, nesting)
    for path, entries in module_dicts.items():
        modules = {strip_wrappers(name) for name in _get_modules(entries)}
        if "" not in modules or not all(_get_module_name(name) in modules for name in entries):
            continue  # the state dict of a submodule, with a prefix, or entries are not named by their modules
        saved_names = [str(key_path[-1]) for key_path in nesting.values() if key_path[:-1] == path]
        names = [name for name in saved_names if name not in entries and _get_module_name(name) not in modules]
        if names:
            location = f"'{'.'.join(path)}' in '{checkpoint.directory}'" if path else f"'{checkpoint.directory}'"
            warn(
                f"{location} has {quote(names)} of modules that the model does not have, which is not loaded: is "
                "it the same model? If a part is meant, give a plain dict in place of the model's state dict: "
                "dict(...) of it"
            )


def _warn_of_extra_states(extra: Mapping[tuple[str, ...], Mapping[Any, Any]], nesting: Nesting) -> None:
    """Warn of extra states, by their paths, with fewer entries than were saved; the planner warns of lists."""
    requested = {
        (*parent, *nested_path[1:])
        for parent, value in extra.items() for nested_path in flatten_state_dict({"": value})[1].values()
    }
    names = [
        name for name, path in nesting.items()
        if extra and any(path[:end] in extra for end in range(1, len(path)))
        and not any(path[:end] in requested for end in range(1, len(path) + 1))
        and not any(type(part) is int for part in path)
    ]
    if names:
        warn(
            f"{quote(names)} was saved of an extra state and is not loaded, since the state dict does not name "
            "it: give the module in place of its state dict, dsq_ckpt.load({'model': model}, path), or an empty dict "
            "in place of the extra state"
        )


def _iterate_mappings(path: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a dict and those below it, with their paths."""
    yield path, node
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _iterate_mappings((*path, str(key)), value)


def _get_modules(state_dict: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of the modules in the `_metadata` of a module's state dict; empty for other mappings."""
    metadata = vars(state_dict).get("_metadata") if isinstance(state_dict, OrderedDict) else None
    return metadata if isinstance(metadata, dict) else ()


def _get_module_name(name: str) -> str:
    """Return the name of the module of an entry of a state dict."""
    return strip_wrappers(name.rpartition(".")[0])
