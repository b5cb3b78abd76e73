"""Matching of the state dict of a `Compressor` with a checkpoint, so that a load fills exactly what was saved.

The state dict of an optimizer rarely has the saved keys. An optimizer has no state for parameters without a gradient
so far; one that torch initializes for a load has state for all parameters; one that has stepped may have state for
others. A save, or a load that fails, leaves the optimizer unchanged.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dsq_ckpt.api import background
from dsq_ckpt.api.checks import has_state, reset_on_failure, without_gradients
from dsq_ckpt.api.module_placeholders import select_custom_loaded, unexpected_keys_error, unexpected_keys_warning
from dsq_ckpt.api.optimizer_placeholders import OptimizerPlaceholders, fit_placeholders
from dsq_ckpt.api.optimizer_state import PARAMETERLESS_STATE, extra_entries
from dsq_ckpt.api.parameter_groups import (
    GroupMatch,
    compare_options,
    option_placeholders,
    read_saved_groups,
    warn_of_other_optimizer,
)
from dsq_ckpt.api.stateful import refuse_meta
from dsq_ckpt.api.unsaved_state import find_unsaved_keys, warn_of_unsaved_state
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.nesting import Nesting, set_entry
from dsq_ckpt.core.nesting import Path as Keys
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.tensor_subclasses import refuse_cycles
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import DSQError, LoadFailed
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.paths import require_checkpoint_path

_gradient_lock = threading.RLock()  # reentrant: a signal handler or a hook of a module may save during a save


@contextmanager
def keep_uninitialized(optimizer: Optimizer | None) -> Iterator[None]:
    """Keep torch from initializing the state of an optimizer while its state dict is created.

    torch initializes it by a step with zero gradients, which counts as a step: Adam's next step would have another bias
    correction. It skips that if a parameter has a gradient, so one gets a zero gradient meanwhile. A lock allows one
    thread at a time, since gradients are shared.
    """
    if optimizer is None or has_state(optimizer):  # without the lock: creating a state dict may wait for other ranks
        yield
        return
    with _gradient_lock:
        parameter = None if has_state(optimizer) else _find_parameter_without_gradient(optimizer)
        if parameter is not None:
            parameter.grad = torch.zeros_like(parameter)
        try:
            yield
        finally:
            if parameter is not None:
                parameter.grad = None


@contextmanager
def initialize_for_load(optimizer: Optimizer | None) -> Iterator[None]:
    """Let torch initialize an optimizer without state, whatever its gradients; remove the state if the load fails."""
    if optimizer is None or has_state(optimizer):
        yield
        return
    with without_gradients(optimizer), reset_on_failure(optimizer):
        yield


def _find_parameter_without_gradient(optimizer: Optimizer) -> torch.Tensor | None:
    """Return the smallest parameter that requires a gradient; None if a parameter has a gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        return None
    trained = (parameter for parameter in parameters if parameter.requires_grad and not is_lazy(parameter))
    return min(trained, key=torch.Tensor.numel, default=None)


def match_saved_state(
    path: str | os.PathLike[str], state: dict[str, Any], model: nn.Module, optimizer: Optimizer | None,
    parameters: Mapping[str, nn.Parameter], strict: bool, comm: Communicator,
) -> StateMatch:
    """Change a state dict in place so that it has the saved keys of the optimizer; warn of keys that are not loaded.

    Collective over `comm`.

    Args:
        path: the checkpoint.
        state: as from `Compressor.state`; an optimizer's state has names of parameters as keys.
        model: module of `state["model"]`, whose custom loading code may accept further keys.
        optimizer: optimizer of `state["optimizer"]`.
        parameters: parameters of the model, by name.
        strict: raise an error for saved keys of the model that it does not have.
        comm: communicator of the ranks that load.

    Raises:
        CheckpointNotFound: there is no checkpoint at `path`, or `path` is None.
        LoadFailed: the model lacks saved keys, or is on the meta device; the optimizer has other parameter groups; or
            the checkpoint has the state of a sharded parameter, and the optimizer has none whose sharding it can use.
        DSQError: any other failure, on every rank.
    """
    background.wait()

    match = StateMatch(Path())

    def match_rank() -> _KeyMismatches:
        nonlocal match
        directory = require_checkpoint_path(path)
        refuse_meta(state["model"])
        with CheckpointFiles(directory) as files, files.translate_errors():
            nesting, tensors = Nesting.from_json(files.index), files.index["tensors"]
            saved_groups = [] if nesting is None or "optimizer" not in state else read_saved_groups(files, nesting)
        match = StateMatch(directory)
        if nesting is None:
            return _KeyMismatches()
        if optimizer is not None and saved_groups:
            warn_of_other_optimizer("optimizer", optimizer, nesting, comm.rank)
        unexpected_parameters, missing_parameters, frozen = set[str](), set[str](), set[str]()
        optimizer_parameters = parameters
        if saved_groups:
            with_state = {str(path[2]) for path in nesting.values() if path[:2] == ("optimizer", "state")}
            own_groups = state["optimizer"]["param_groups"]
            names = [group["params"] for group in own_groups]
            groups = GroupMatch(names, saved_groups, parameters, with_state, directory)
            state["optimizer"]["param_groups"] = groups.to_saved_order(
                own_groups, option_placeholders(nesting, tensors)
            )
            option_paths = [("optimizer", "param_groups", *option) for option in groups.unexpected_options]
            match, optimizer_parameters = match._replace(groups=groups, plain_paths=option_paths), groups.parameters
            unexpected_parameters = (groups.saved_names - groups.names) & with_state
            if with_state:
                without_grad = {name for name, parameter in optimizer_parameters.items() if not parameter.requires_grad}
                missing_parameters = groups.names - groups.saved_names - with_state - without_grad
        missing_extra, unsaved, stateless = set[str](), set[str](), set[str]()
        if optimizer is not None:
            trained_flat = _find_trained_flat_names(parameters)
            is_other_class = any(compare_options("optimizer", optimizer, nesting))
            new_paths, missing_extra, frozen, unsaved = _match_optimizer_state(
                state["optimizer"], optimizer_parameters, directory, nesting, tensors, is_other_class, trained_flat
            )
            match = match._replace(plain_paths=[*match.plain_paths, *new_paths])
            if match.groups is not None:
                matched_state = state["optimizer"]["state"]
                without = {name for name in match.groups.names & with_state if not matched_state.get(name)}
                stateless, frozen = without & trained_flat, frozen | (without - trained_flat)
        extra = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
        refuse_cycles(extra)
        top_level = {str(path[0]) for path in (*nesting.values(), *(nesting.empty or ()))}
        model_keys = {str(path[1]) for path in nesting.values() if path[0] == "model" and len(path) > 1}
        unexpected_keys = model_keys - state["model"].keys()
        return _KeyMismatches(
            unexpected_keys - select_custom_loaded(model, unexpected_keys), unexpected_parameters, missing_parameters,
            {(key,) for key in top_level - state.keys()}.union(nesting.unnamed_entries(extra)), missing_extra, frozen,
            () if match.groups is None else match.groups.ungrouped, unsaved, stateless,
        )

    unexpected_keys, *mismatches = _merge_ranks(gather_from_all_ranks(comm, match_rank, LoadFailed))
    if strict and unexpected_keys:
        raise unexpected_keys_error(unexpected_keys, match.directory)
    _warn_of_mismatches(*mismatches, directory=match.directory, rank=comm.rank)
    return match


def _warn_of_mismatches(
    unexpected_parameters: list[str], missing_parameters: list[str], unexpected_entries: list[Keys],
    missing_extra: list[str], frozen: list[str], ungrouped: list[str], unsaved: list[str], stateless: list[str], *,
    directory: Path, rank: int,
) -> None:
    """Warn of the fields of `_KeyMismatches` but the first."""
    warn_of_unsaved_state(unsaved, rank)
    if unexpected_parameters:
        warn(
            f"the optimizer state of {quote(unexpected_parameters)} in '{directory}' was not loaded, since this "
            "optimizer does not have these parameters", rank=rank
        )
    if missing_parameters:
        warn(
            f"no optimizer state of {quote(missing_parameters)} was loaded, since the optimizer of '{directory}' did "
            "not have these parameters: they begin without", rank=rank
        )
    if frozen:
        warn(
            f"the optimizer state of {quote(frozen)} in '{directory}' is not loaded: these parameters need no gradient "
            "now, and the optimizer has nothing that tells how their state is sharded. Load it into an optimizer that "
            "has it, if they are to be trained again", rank=rank,
        )
    if stateless:
        warn(
            f"the optimizer state of {quote(stateless)} in '{directory}' is not loaded: this optimizer has none of "
            "them, and nothing tells how that of FSDP1's flat parameters is sharded. Load it into an optimizer with "
            "the same options", rank=rank,
        )
    if ungrouped:
        warn(
            f"'{directory}' lists {quote(ungrouped)} in no group of its optimizer, though it has their state, since it "
            "was written by ranks with other parameters each, and by dcp.save or an earlier version: their groups are "
            "given the options of the saved ones at the same places", rank=rank,
        )
    if missing_extra:
        warn(
            f"'{directory}' has no {quote(missing_extra)} of the optimizer, whose state_dict() has it, as it was saved "
            "by an earlier version, or before there was any: it is not restored", rank=rank,
        )
    if unexpected_entries:
        placeholders = dict[Any, Any]()
        for path in unexpected_entries[:3]:
            # One entry stands for all of a list, which may be long.
            set_entry(placeholders, [(0, True) if type(key) is int else (key, False) for key in path], ...)
        names = [".".join(map(str, path)) for path in unexpected_entries]
        warn(
            f"{quote(names)} of '{directory}' is not loaded, since extra does not name it: pass "
            f"placeholders of what you want, extra={str(placeholders).replace('Ellipsis', '...')}, for example 0 for a "
            "number and {} for a dict of any content", rank=rank,
        )


class StateMatch(NamedTuple):
    """Result of `match_saved_state` on one rank.

    Attributes:
        directory: the checkpoint.
        groups: match of the parameter groups; None if the checkpoint has none with names of parameters.
        plain_paths: paths of saved options and other objects that the optimizer does not have; they are unpickled only
            if they are plain data.
    """

    directory: Path
    groups: GroupMatch | None = None
    plain_paths: Sequence[Keys] = ()


class _KeyMismatches(NamedTuple):
    """Differences between the keys of a checkpoint and those of a model and its optimizer.

    Attributes:
        unexpected_keys: saved keys of the model that it does not have and that no custom loading code accepts.
        unexpected_parameters: parameters with saved state that the optimizer does not have.
        missing_parameters: parameters of the optimizer without saved state, in a checkpoint with state of others.
        unexpected_entries: paths of saved keys at the top level, or below `extra`, that the state dict does not have.
        missing_extra: keys of the optimizer other than `state` and `param_groups` that were not saved.
        frozen: parameters that require no gradient and whose saved state cannot be loaded.
        ungrouped: parameters with saved state in no saved group, so that `missing_parameters` may have been in others.
        unsaved: entries of the optimizer's state that were not saved, of parameters with other saved state.
        stateless: trained parts of FSDP1's flat parameters with saved state, of which the optimizer has none.
    """

    unexpected_keys: Collection[str] = frozenset()
    unexpected_parameters: Collection[str] = frozenset()
    missing_parameters: Collection[str] = frozenset()
    unexpected_entries: Collection[Keys] = frozenset()
    missing_extra: Collection[str] = frozenset()
    frozen: Collection[str] = frozenset()
    ungrouped: Collection[str] = ()
    unsaved: Collection[str] = frozenset()
    stateless: Collection[str] = frozenset()


def warn_of_unexpected_tensors(state: Mapping[str, Any], path: str | os.PathLike[str], comm: Communicator) -> None:
    """Warn of saved tensors that the loaded module does not have, such as those of further layers.

    Collective over `comm`.

    Args:
        state: state dict of the module.
        path: the checkpoint.
        comm: communicator of the ranks that load.
    """
    def collect_unexpected_tensors() -> set[str]:
        # The checkpoint may have been replaced since the load.
        with suppress(DSQError), CheckpointFiles(require_checkpoint_path(path)) as files, files.translate_errors():
            nesting = Nesting.from_json(files.index) or Nesting({})
            return {str(keys[0]) for name, keys in nesting.items() if name in files.index["tensors"]} - state.keys()
        return set()

    unexpected_keys = _intersect_ranks(gather_from_all_ranks(comm, collect_unexpected_tensors, LoadFailed))
    if unexpected_keys:
        warn(unexpected_keys_warning(unexpected_keys, path), rank=comm.rank)


def _merge_ranks(ranks: Sequence[_KeyMismatches]) -> list[list[Any]]:
    """Return the fields of `_KeyMismatches` for all ranks together."""
    fields = list(zip(*ranks, strict=True))
    *common, missing, entries, extra = map(_intersect_ranks, fields[:5])
    missing = sorted({*missing, *(name for rank in ranks if not rank.ungrouped for name in rank.missing_parameters)})
    return [*common, missing, entries, extra, *(sorted(set().union(*sets)) for sets in fields[5:])]


def _intersect_ranks(sets: Iterable[Collection[Any]]) -> list[Any]:
    """Return names or paths that are in the sets of all ranks; a rank may have a part of the model, such as a stage."""
    return sorted(set.intersection(*map(set, sets)), key=str)


def _match_optimizer_state(
    optimizer: dict[Any, Any], parameters: Mapping[str, nn.Parameter], directory: Path, nesting: Nesting,
    tensors: Mapping[str, Any], is_other_class: bool, trained_flat: Collection[str],
) -> tuple[list[Keys], set[str], set[str], set[str]]:
    """Change the state dict of an optimizer in place so that it has the saved keys, apart from parameter groups.

    With `is_other_class`, state that was not saved is kept, so that the load raises the error that names it. For
    `trained_flat`, see `_find_trained_flat_names`.

    Returns:
        Paths of saved objects that the optimizer does not have; its keys other than `state` and `param_groups` that
        were not saved; frozen parameters whose saved state cannot be loaded, since its sharding is unknown; entries of
        its state that are removed, since other state of the same parameters was saved.
    """
    state, saved_paths, empty = optimizer["state"], dict[Keys, dict[str, Keys]](), dict[Keys, list[Keys]]()
    for name, path in nesting.items():
        if path[0] == "optimizer" and path[1:2] != ("param_groups",):
            saved_paths.setdefault(_entry_prefix(path), {})[name] = path
    for path in nesting.empty or ():
        if path[0] == "optimizer" and path[1:2] != ("param_groups",):
            empty.setdefault(_entry_prefix(path), []).append(path)
    entries = saved_paths.keys() | empty.keys()
    if not any(path[0] == "optimizer" for path in (*nesting.values(), *(nesting.empty or ()))):
        return [], set(), set(), set()  # a checkpoint of the model alone: the load raises the error
    saved_names = {str(path[2]) for path in entries if len(path) > 2}
    names = saved_names & (state.keys() | parameters.keys())  # other ranks may have other stages of a pipeline
    if saved_names and not names:
        if all(name.isdecimal() for name in saved_names):
            raise LoadFailed(
                f"'{directory}' has the optimizer's state by the numbers of parameters, as an optimizer itself tells "
                "it, and not by their names: load {'model': model, 'optimizer': optimizer} by dsq_ckpt.load"
            )
        if not any(path[0] == "model" and str(path[-1]) in parameters for path in nesting.values()):
            return [], set(), set(), set()  # a checkpoint of another model: the load raises the error

    def fit(current: dict[Any, Any], entry: Keys, parameter: nn.Parameter | None = None) -> OptimizerPlaceholders:
        empty_below = None if nesting.empty is None else empty.get(entry, [])
        return fit_placeholders(
            {"optimizer": current}, saved_paths.get(entry, {}), empty_below, nesting, tensors, parameter
        )

    def unknown_sharding(name: str, keys: Collection[str]) -> LoadFailed:
        return LoadFailed(
            f"'{directory}' has {quote(sorted(set(keys)))} in the optimizer's state of '{name}', which this optimizer "
            "does not have, so that nothing tells how it is sharded: load into one with the same options that was not "
            "used yet, or that has it"
        )

    new_paths, frozen, unsaved = list[Keys](), set[str](), set[str]()
    for name in state.keys() - names:
        del state[name]
    for name in sorted(names):
        parameter, entry = parameters.get(name), _entry_prefix(("optimizer", "state", name))
        keys = {str(path[3]) for path in (*saved_paths.get(entry, {}).values(), *empty.get(entry, ())) if len(path) > 3}
        own = state.get(name, {})
        if parameter is None:  # FSDP1 makes what is loaded from what the optimizer has
            if own and name in trained_flat and (lacking := keys.difference(map(str, own))):
                raise unknown_sharding(name, lacking)
            continue
        unsaved_keys = [] if is_other_class else find_unsaved_keys(own, keys)
        own = {key: value for key, value in own.items() if key not in unsaved_keys}  # its dict is in use
        if not keys.issuperset(map(str, own)):  # the load's error names the missing keys
            continue
        unsaved |= {f"optimizer.state.{name}.{key}" for key in unsaved_keys if keys}
        fitted = fit({"state": {name: own}}, entry, parameter)
        if fitted.unshardable_keys and not parameter.requires_grad:
            frozen.add(name)
            continue
        if fitted.unshardable_keys:
            raise unknown_sharding(name, fitted.unshardable_keys)
        state[name] = fitted.state["optimizer"]["state"][name]
        new_paths += fitted.new_paths
    extra, missing_extra = extra_entries(optimizer), set[str]()
    for key in extra:
        del optimizer[key]
        if ("optimizer", str(key)) not in entries and key != PARAMETERLESS_STATE:
            missing_extra.add(str(key))
    for entry in entries:
        if len(entry) == 2 and entry[1] != "state":
            fitted = fit({key: value for key, value in extra.items() if str(key) == entry[1]}, entry)
            optimizer.update(fitted.state["optimizer"])
            new_paths += fitted.new_paths
    return new_paths, missing_extra, frozen, unsaved


def _find_trained_flat_names(parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the names of what FSDP1's flat parameters that need a gradient consist of."""
    return {
        name.removesuffix("_flat_param") + original for name, parameter in parameters.items()
        if isinstance(parameter, FlatParameter) and parameter.requires_grad for original in parameter._fqns
    }


def _entry_prefix(path: Keys) -> Keys:
    """Return the prefix of a path below an optimizer: the state of one parameter, or another top-level key."""
    return path[:3] if path[1:2] == ("state",) else path[:2]
