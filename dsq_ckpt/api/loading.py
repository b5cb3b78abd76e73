"""`load`: `torch.distributed.checkpoint` with our reader."""

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
from dsq_ckpt.api.asking import tell_of_more
from dsq_ckpt.api.buffers import Given, Untold, left_by_all, needs_all, not_taken
from dsq_ckpt.api.dcp_errors import plain_errors, without_traceback, without_warning
from dsq_ckpt.api.stateful import give_state, state_of, told_state, warn_of_objects
from dsq_ckpt.api.whole import Lacking, Whole, made_states, objects_in
from dsq_ckpt.core.interrupts import held_signals, raised_by_handler
from dsq_ckpt.core.nesting import Nesting, Path, empty_dicts, number_parameters
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.subclasses import loading, refuse_cycles
from dsq_ckpt.dcp.nested import NestedLoadPlanner, fillings
from dsq_ckpt.dcp.reader import DSQStorageReader
from dsq_ckpt.distributed.comm import SingleProcess, communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.errors import DSQError, LoadFailed
from dsq_ckpt.storage.attachments import hint_of_attachments, refuse_without_tensors, warn_of_attachments
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.paths import existing_path
from dsq_ckpt.storage.refinement import Refinement


@held_signals()
def load(
    state_dict: dict[str, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    refinement: Refinement = "auto",
    exact: Sequence[str] = (),
    allow_cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    history: SaveHistory | None = None,
) -> None:
    """Load into a nested state dict, in place, whatever the number of ranks and sharding; collective.

    An empty dict in it, or itself if it is empty, is filled with all that is stored below it, as whole tensors on the
    CPU and plain data. Any other object is loaded only where the state dict has a placeholder for it: DCP unpickles it,
    which can run code of whoever wrote the checkpoint. When a load fails, empty dicts are empty again. The other
    arguments are those of `DSQStorageReader` and of `torch.distributed.checkpoint.load`. A module stands for its state
    dict; so do modules, optimizers and other objects with one that are values at the top level, and are given theirs:
    of optimizers and others all that was saved, also what theirs does not name, as before the first step. Tensors that
    an object with tensors does not name are left out, with a warning, and so is what another rank has of it. Modules
    are given their extra states as they were saved, and what goes through code of their own when they are loaded, as
    scales of observers, also if they did not tell it before; they leave out what they do not take, with a warning.

    Raises:
        ConfigError: an argument is not what it must be.
        CheckpointNotFound: nothing is at `path`, or it is None, as of `latest` where there is no checkpoint.
        LoadFailed: nothing is stored below an empty dict, or more than plain data; or `path` is a tag of DeepSpeed that
            has no tensors but those in DeepSpeed's own files.
        DSQError: what else failed, naming the rank, on every rank.

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
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    comm = SingleProcess() if no_dist else communicator(process_group)
    if isinstance(state_dict, nn.Module):
        own = run_on_all_ranks(comm, lambda: told_state({"": state_dict}, loads=True)[""], LoadFailed)
        found = dict(own)  # of which `tell_of_more` warns
        load_with(
            found, path, modules={(): state_dict}, refinement=refinement, exact=exact, allow_cast=allow_cast,
            process_group=process_group, no_dist=no_dist, history=history,
        )
        offered = found.keys() - own.keys()
        own.update(found)
        for name in run_on_all_ranks(comm, lambda: give_state(state_dict, own, path, offered), LoadFailed):
            del own[name]
        tell_of_more(own, path, comm)
        return
    state_of(state_dict, "load(state_dict, path)")
    load_with(
        state_dict, path, refinement=refinement, exact=exact, allow_cast=allow_cast, process_group=process_group,
        no_dist=no_dist, history=history,
    )


def load_with(
    state_dict: dict[str, Any], path: str | os.PathLike[str], *, plain: Sequence[Path] = (),
    modules: Mapping[tuple[Any, ...], nn.Module] | None = None, left_out: Collection[str] = (),
    refinement: Refinement = "auto", exact: Sequence[str] = (), allow_cast: bool = False,
    process_group: dist.ProcessGroup | None = None, no_dist: bool = False, history: SaveHistory | None = None,
) -> None:
    """Load as `load` does; what is at the paths `plain` is unpickled only as far as it is plain data.

    `modules` are those that made dicts in the state dict, by the keys that lead there, and are given these afterwards;
    `left_out` are the names of their entries that are not to be loaded.
    """
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    comm = SingleProcess() if no_dist else communicator(process_group)
    reader: DSQStorageReader
    told: dict[Any, Any] = state_dict
    making = {**(modules or {}), **{(key,): own for key, own in state_dict.items() if isinstance(own, nn.Module)}}
    whole: Whole | None = None
    of_modules: Given | None = None
    hint = ""
    empty, to_fill = list(plain), list[tuple[MutableMapping[Any, Any], dict[Any, Any]]]()

    def prepare() -> tuple[Lacking, Untold]:
        """Check the path before DCP does, which would log a long traceback; the state dict is not changed."""
        nonlocal reader, told, whole, of_modules, hint
        background.wait()
        reader = DSQStorageReader(path, refinement=refinement, exact=exact, allow_cast=allow_cast, history=history)
        directory = existing_path(path)
        manifest = Manifest.read(directory)
        hint = hint_of_attachments(manifest)
        told = told_state(state_dict, loads=True)
        refuse_cycles(told)
        warn_of_objects(told, comm.rank)
        found = [own for own, _ in empty_dicts(told)]
        objects = objects_in(state_dict)
        asking = any(needs_all(module, reduce(getitem, keys, told)) for keys, module in making.items())
        asking = asking or bool(making and comm.size > 1)  # as another rank may
        if not found and not objects and not asking and not hint:
            return {}, {}
        with Checkpoint(directory) as checkpoint:
            refuse_without_tensors(checkpoint, "loaded", LoadFailed)
            if objects or asking:
                with checkpoint.naming():
                    nesting = Nesting.from_json(checkpoint.index) or Nesting({})
                    tensors = checkpoint.index["tensors"]
            if objects:
                if stack.enter_context(made_states(objects, nesting)):
                    told = told_state(state_dict, loads=True)
                    found = [own for own, _ in empty_dicts(told)]
                whole = Whole(objects, told, nesting, tensors)
            if asking:
                of_modules = Given(making, told, nesting, tensors, left_out)
                empty.extend(of_modules.plain)
            to_fill.extend(fillings(told, checkpoint, state_dict))
            if to_fill:
                warn_of_attachments(checkpoint, "loaded", comm.rank)
        empty.extend(found)
        return {} if whole is None else whole.lacking, {} if of_modules is None else of_modules.untold

    def complete() -> list[Path]:
        added = [] if whole is None else whole.complete(lacking, comm.rank)
        return added if of_modules is None else [*added, *of_modules.offer(untold)]

    def give() -> tuple[set[str], set[str]]:
        """Put what was loaded into its places; hooks and objects of the user may fail on this rank alone.

        Returns:
            What modules were offered, and what of it they left aside.
        """
        ending.close()
        all_offered, left = set[str](), set[str]()
        if whole is not None:
            whole.put_back()
        completed = [told[key] for key, own in state_dict.items() if isinstance(own, Optimizer)]
        number_parameters(told, {*map(id, completed), *(id(target) for target, _ in to_fill)})
        for key, value in told.items() if told is not state_dict else ():
            if isinstance(own := state_dict[key], Stateful):
                offered = set() if of_modules is None else of_modules.offered.get((key,), set())
                all_offered |= {f"{key}.{name}" for name in offered}
                left |= {f"{key}.{name}" for name in give_state(own, value, path, offered)}
            else:
                state_dict[key] = value
        return all_offered, left

    with ExitStack() as stack:
        lacking, untold = zip(*gather_from_all_ranks(comm, prepare, LoadFailed), strict=True)
        try:
            if any(lacking) or any(any(one.values()) for one in untold):  # as all ranks know
                empty.extend(run_on_all_ranks(comm, complete, LoadFailed))
            for target, placeholders in to_fill:
                target.update(placeholders)
            with ExitStack() as ending:
                sortable = ending.enter_context(_sortable(ending.enter_context(loading(told))))
                with plain_errors(LoadFailed, comm.rank), without_warning(no_dist), without_traceback():
                    dcp.load(
                        sortable, storage_reader=reader, planner=NestedLoadPlanner(empty, told, hint),
                        process_group=process_group, no_dist=no_dist,
                    )
                if left := left_by_all(gather_from_all_ranks(comm, give, LoadFailed)):
                    warn(not_taken(left, path), rank=comm.rank)
        except BaseException as error:
            for target, _ in to_fill:
                target.clear()
            if (add_note := getattr(raised_by_handler(), "add_note", None)) is not None:  # of Python 3.11
                add_note(f"during the load of '{reader.path}': what was to be loaded may be partly filled")
            if isinstance(error, DSQError) and reader.unreadable is not None:
                raise reader.unreadable from error
            if isinstance(error, DSQError) and str(reader.path) not in str(error):  # of DCP's own, which knows no path
                raise type(error)(f"'{reader.path}': {error}") from error
            raise


@contextmanager
def _sortable(state_dict: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield a state dict with strings as keys, by which DCP sorts and names; then copy its values to the original."""
    if all(isinstance(key, str) for key in state_dict):
        yield state_dict
        return
    by_name = {str(key): value for key, value in state_dict.items()}
    if len(by_name) < len(state_dict):
        raise LoadFailed(f"two keys at the top level have the same name, among {list(by_name)}; load one of them alone")
    yield by_name
    state_dict.update({key: by_name[str(key)] for key in state_dict})
