"""`load`: `torch.distributed.checkpoint` with the storage reader of this package."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import getitem
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dsq_ckpt.api import background
from dsq_ckpt.api.dcp_errors import no_dcp_traceback, no_single_process_warning, unwrap_dcp_errors
from dsq_ckpt.api.module_placeholders import (
    ModulePlaceholders,
    has_custom_loading,
    unexpected_keys_warning,
    unexpected_on_all_ranks,
)
from dsq_ckpt.api.object_placeholders import (
    ObjectPlaceholders,
    UnexpectedKeys,
    initialize_subclass_states,
    select_objects,
)
from dsq_ckpt.api.state_matching import warn_of_unexpected_tensors
from dsq_ckpt.api.stateful import as_state_dict, expand_stateful, load_into, warn_of_nested_stateful
from dsq_ckpt.core.arguments import expect_flags
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.collector import no_garbage_collection
from dsq_ckpt.core.interrupts import get_handler_error, hold_signals
from dsq_ckpt.core.nesting import Nesting, Path, empty_dicts, restore_parameter_numbers
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.tensor_subclasses import find_unpacked, load_subclasses, refuse_cycles
from dsq_ckpt.dcp.nested_planners import NestedLoadPlanner, make_placeholders
from dsq_ckpt.dcp.reader import DSQStorageReader
from dsq_ckpt.distributed.comm import SingleProcess, communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.errors import DSQError, LoadFailed
from dsq_ckpt.storage.attachments import format_attachment_hint, refuse_without_tensors, warn_about_attachments
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.manifest_requests import one_request_each
from dsq_ckpt.storage.paths import require_checkpoint_path
from dsq_ckpt.storage.refinement import RefinementOption


@hold_signals()
def load(
    state_dict: dict[str, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    refinement: RefinementOption = "auto",
    exact: Sequence[str] = (),
    allow_cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    history: SaveHistory | None = None,
) -> None:
    """Load into a nested state dict, in place, whatever the number of ranks and sharding; collective.

    An empty dict, also at the top level, is filled with everything stored below it, as whole tensors on the CPU and
    plain data. Any other object is loaded only if the state dict has a placeholder for it: DCP unpickles it, which can
    run code of whoever wrote the checkpoint. If the load fails, these dicts are empty again.

    `state_dict` may be a module. Modules, optimizers and other objects with a `state_dict` method may be values at its
    top level; each is loaded by its `load_state_dict`:

    * An optimizer or another object gets everything that was saved, including keys that its own state dict does not
      have yet, such as those before the first step. If the object has tensors, saved tensors without a key in its state
      dict are skipped with a warning, and so are the entries of it that another rank has.
    * A module gets its extra states as they were saved, and all saved entries that custom loading code handles, such as
      scales of observers. Entries that it does not accept are skipped with a warning.

    Args:
        state_dict: nested dict whose tensors and other values are placeholders, or a module.
        path: a complete checkpoint: a directory, or a URL.
        refinement: True: require the refinement layer; False: load the base layer alone; "auto": load the refinement
            layer where it was kept, and warn where it was dropped.
        exact: shell patterns of names (or one pattern) of tensors that must have been stored bit for bit. Each pattern
            must match a stored tensor.
        allow_cast: load into tensors of another dtype than the saved one, such as float32 after bfloat16.
        process_group: ranks that load; None: all.
        no_dist: load in this process alone, even if `torch.distributed` is initialized.
        history: history that the checkpoint is added to, so that the next save in its run may be coded against it;
            None: that of the process.

    Raises:
        LossyTensor: a tensor of `exact` was stored lossy, or a dtype differs without `allow_cast`.
        ConfigError: an argument has a wrong type or value.
        CheckpointNotFound: there is no checkpoint at `path`, or `path` is None (as `latest` returns without one).
        LoadFailed: nothing is stored below an empty dict, or more than plain data; or `path` is a tag of DeepSpeed all
            of whose tensors are in DeepSpeed's own files.
        DSQError: any other failure, on every rank; the message names the rank that failed.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> result = dsq_ckpt.save({"model": model.state_dict(), "step": 500}, "run/step-000500")
        >>> state = {"model": model.state_dict(), "step": 0}
        >>> dsq_ckpt.load(state, "run/step-000500")  # into the tensors of the model
        >>> state["step"]
        500
        >>> everything = {}
        >>> dsq_ckpt.load(everything, "run/step-000500")
        >>> list(everything["model"])
        ['weight', 'bias']
    """
    expect_flags(no_dist=no_dist)
    comm = SingleProcess() if no_dist else communicator(process_group)
    if isinstance(state_dict, nn.Module):
        module_state = run_on_all_ranks(comm, lambda: expand_stateful({"": state_dict}, loads=True)[""], LoadFailed)
        loaded = dict(module_state)
        load_with_modules(
            loaded, path, modules={(): state_dict}, refinement=refinement, exact=exact, allow_cast=allow_cast,
            process_group=process_group, no_dist=no_dist, history=history,
        )
        offered_keys = loaded.keys() - module_state.keys()
        module_state.update(loaded)
        for name in run_on_all_ranks(comm, lambda: load_into(state_dict, module_state, path, offered_keys), LoadFailed):
            del module_state[name]
        warn_of_unexpected_tensors(module_state, path, comm)
        return
    as_state_dict(state_dict, "load(state_dict, path)")
    load_with_modules(
        state_dict, path, refinement=refinement, exact=exact, allow_cast=allow_cast, process_group=process_group,
        no_dist=no_dist, history=history,
    )


def load_with_modules(
    state_dict: dict[str, Any], path: str | os.PathLike[str], *, plain_paths: Sequence[Path] = (),
    modules: Mapping[tuple[Any, ...], nn.Module] | None = None, excluded_keys: Collection[str] = (),
    refinement: RefinementOption = "auto", exact: Sequence[str] = (), allow_cast: bool = False,
    process_group: dist.ProcessGroup | None = None, no_dist: bool = False, history: SaveHistory | None = None,
) -> None:
    """Load as `load` does, into a state dict some entries of which are the state dicts of modules.

    Args:
        state_dict: filled in place.
        path: the checkpoint.
        plain_paths: paths of objects that are unpickled only if they are plain data.
        modules: modules whose state dicts are entries of `state_dict`, by the keys that lead there. The caller loads
            these entries into the modules afterwards.
        excluded_keys: keys in the state dicts of `modules` that are not loaded.
        refinement: as for `load`, and so are the other arguments.
    """
    comm = SingleProcess() if no_dist else communicator(process_group)
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    reader: DSQStorageReader
    expanded: dict[Any, Any] = state_dict
    all_modules = {
        **(modules or {}), **{(key,): value for key, value in state_dict.items() if isinstance(value, nn.Module)}
    }
    object_placeholders: ObjectPlaceholders | None = None
    module_placeholders: ModulePlaceholders | None = None
    hint = ""
    restricted_paths, to_fill = list(plain_paths), list[tuple[MutableMapping[Any, Any], dict[Any, Any]]]()

    def prepare_load() -> tuple[UnexpectedKeys, UnexpectedKeys]:
        """Open the checkpoint and compare its keys with those of objects and modules; the state dict is not changed.

        DCP would log a long traceback for a path without a checkpoint, so it is checked here.
        """
        nonlocal reader, expanded, object_placeholders, module_placeholders, hint
        background.wait()
        reader = DSQStorageReader(path, refinement=refinement, exact=exact, allow_cast=allow_cast, history=history)
        directory = require_checkpoint_path(path)
        manifest = Manifest.read(directory)
        hint = format_attachment_hint(manifest)
        expanded = expand_stateful(state_dict, loads=True)
        refuse_cycles(expanded)
        warn_of_nested_stateful(expanded, comm.rank)
        empty_paths = [empty_path for empty_path, _ in empty_dicts(expanded)]
        objects = select_objects(state_dict)
        match_modules = any(
            has_custom_loading(module, reduce(getitem, keys, expanded)) for keys, module in all_modules.items()
        ) or bool(all_modules and comm.size > 1)  # the module of another rank may have custom loading
        if not empty_paths and not objects and not match_modules and not hint:
            return {}, {}
        with Checkpoint(directory) as checkpoint:
            refuse_without_tensors(checkpoint, "loaded", LoadFailed)
            if objects or match_modules:
                with checkpoint.translate_errors():
                    nesting = Nesting.from_json(checkpoint.index) or Nesting({})
                    tensors = checkpoint.index["tensors"]
            if objects:
                if stack.enter_context(initialize_subclass_states(objects, nesting)):
                    expanded = expand_stateful(state_dict, loads=True)
                    empty_paths = [empty_path for empty_path, _ in empty_dicts(expanded)]
                object_placeholders = ObjectPlaceholders(objects, expanded, nesting, tensors)
            if match_modules:
                module_placeholders = ModulePlaceholders(all_modules, expanded, nesting, tensors, excluded_keys)
                restricted_paths.extend(module_placeholders.plain_paths)
            frozen = [reduce(getitem, keys, expanded) for keys in modules or () if excluded_keys]  # empty: all excluded
            to_fill.extend(
                (target, placeholders) for target, placeholders in make_placeholders(expanded, checkpoint, state_dict)
                if not any(target is entries for entries in frozen)
            )
            if to_fill:
                warn_about_attachments(checkpoint, "loaded", comm.rank)
        restricted_paths.extend(empty_paths)
        return (
            {} if object_placeholders is None else object_placeholders.unexpected_keys,
            {} if module_placeholders is None else module_placeholders.unexpected_keys,
        )

    def add_placeholders() -> list[Path]:
        added: list[Path] = []
        if object_placeholders is not None:
            added += object_placeholders.add_placeholders(unexpected_in_objects, comm.rank)
        if module_placeholders is not None:
            added += module_placeholders.add_placeholders(unexpected_in_modules)
        return added

    def apply_loaded() -> tuple[set[str], set[str]]:
        """Load the results into modules, optimizers and objects; their code may fail on this rank alone.

        Returns:
            The keys that modules were offered beyond those of their state dicts, and those that they did not expect.
        """
        conversions.close()
        all_offered, unexpected = set[str](), set[str]()
        if object_placeholders is not None:
            object_placeholders.restore_options()
        completed = [expanded[key] for key, value in state_dict.items() if isinstance(value, Optimizer)]
        restore_parameter_numbers(expanded, {*map(id, completed), *(id(target) for target, _ in to_fill)})
        for key, state in expanded.items() if expanded is not state_dict else ():
            if isinstance(value := state_dict[key], Stateful):
                offered = set() if module_placeholders is None else module_placeholders.offered_keys.get((key,), set())
                all_offered |= {f"{key}.{name}" for name in offered}
                unexpected |= {f"{key}.{name}" for name in load_into(value, state, path, offered)}
            else:
                state_dict[key] = state
        return all_offered, unexpected

    with one_request_each(), ExitStack() as stack:
        gathered = gather_from_all_ranks(comm, prepare_load, LoadFailed)
        unexpected_in_objects, unexpected_in_modules = zip(*gathered, strict=True)
        try:
            # The same condition on all ranks, since adding is collective.
            if any(unexpected_in_objects) or any(any(keys.values()) for keys in unexpected_in_modules):
                restricted_paths.extend(run_on_all_ranks(comm, add_placeholders, LoadFailed))
            for target, placeholders in to_fill:
                target.update(placeholders)
            if to_fill:
                _warn_of_unpacked(expanded, path, comm.rank)
            with ExitStack() as conversions:
                sortable = conversions.enter_context(_string_keys(conversions.enter_context(load_subclasses(expanded))))
                with (
                    unwrap_dcp_errors(LoadFailed, comm.rank), no_single_process_warning(no_dist), no_dcp_traceback(),
                    no_garbage_collection(),
                ):
                    dcp.load(
                        sortable, storage_reader=reader, planner=NestedLoadPlanner(restricted_paths, expanded, hint),
                        process_group=process_group, no_dist=no_dist,
                    )
                if unexpected := unexpected_on_all_ranks(gather_from_all_ranks(comm, apply_loaded, LoadFailed)):
                    warn(unexpected_keys_warning(unexpected, path), rank=comm.rank)
        except BaseException as error:
            for target, _ in to_fill:
                target.clear()
            if (add_note := getattr(get_handler_error(), "add_note", None)) is not None:  # Python 3.11 and later
                add_note(f"during the load of '{reader.path}': what was to be loaded may be partly filled")
            if isinstance(error, DSQError) and reader.read_error is not None:
                raise reader.read_error from error
            if isinstance(error, DSQError) and str(reader.path) not in str(error):  # raised by DCP, which has no path
                raise type(error)(f"'{reader.path}': {error}") from error
            raise


def _warn_of_unpacked(filled: dict[Any, Any], path: str | os.PathLike[str], rank: int) -> None:
    """Warn of tensors of a subclass that an empty dict was filled with: only their owner can make such tensors."""
    if unpacked := sorted(find_unpacked(filled)):
        names, classes = [name for name, _ in unpacked], sorted({kind for _, kind in unpacked})
        warn(
            f"'{path}' has tensors of the class {quote(classes)}, which an empty dict gets as dicts of the tensors "
            f"that they consist of: {quote(names)}. A load_state_dict may take these, and a later step fails: to load "
            "a model or an optimizer, pass the object itself in place of the empty dict, made as it was made when it "
            "was saved", rank=rank,
        )


@contextmanager
def _string_keys(state_dict: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state dict with string keys, which DCP needs to sort and name them; then copy its values back."""
    if all(isinstance(key, str) for key in state_dict):
        yield state_dict
        return
    by_name = {str(key): value for key, value in state_dict.items()}
    if len(by_name) < len(state_dict):
        raise LoadFailed(f"two keys at the top level have the same name, among {list(by_name)}; load one of them alone")
    yield by_name
    state_dict.update({key: by_name[str(key)] for key in state_dict})
