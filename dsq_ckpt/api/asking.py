"""What a `Compressor` asks of an optimizer and of a checkpoint: all that was saved, and nothing else.

An optimizer has no state of a parameter that had no gradient yet. A new one, whose state torch initializes for a load,
has that of all parameters, and one that has stepped that of others, perhaps. A save, or a load that fails, leaves it
as it was.
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
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dsq_ckpt.api import background
from dsq_ckpt.api.buffers import lacks, not_taken, through_own_code
from dsq_ckpt.api.checks import as_before, has_state
from dsq_ckpt.api.fitting import Fitted, fitted
from dsq_ckpt.api.optimizer_state import OF_NO_PARAMETER, beside
from dsq_ckpt.api.parameter_groups import GroupsByName, saved_groups, saved_options
from dsq_ckpt.api.stateful import refuse_meta
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.core.nesting import Path as Keys
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.unchanged import named
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import DSQError, LoadFailed
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.paths import existing_path

_ONE_AT_A_TIME = threading.RLock()  # of one thread, perhaps twice: a signal's handler, or a module's hook, may save


@contextmanager
def as_it_is(optimizer: Optimizer | None) -> Iterator[None]:
    """Keep torch from initializing an optimizer that has no state yet, while its state dict is made.

    It would do that by a step without gradients, which counts: Adam's next one were its second, of another length. It
    makes none where there is a gradient. One thread at a time does so: torch's gradients are no place for two.
    """
    if optimizer is None or has_state(optimizer):  # no lock: a state dict may wait for other ranks
        yield
        return
    with _ONE_AT_A_TIME:
        parameter = None if has_state(optimizer) else _without_gradient(optimizer)
        if parameter is not None:
            parameter.grad = torch.zeros_like(parameter)
        try:
            yield
        finally:
            if parameter is not None:
                parameter.grad = None


@contextmanager
def given_back(optimizer: Optimizer | None) -> Iterator[None]:
    """Take back what torch initializes in an optimizer that has no state yet, if a load fails."""
    parameter = None if optimizer is None or has_state(optimizer) else _without_gradient(optimizer)
    if optimizer is None or parameter is None:
        yield
        return
    try:
        with as_before(optimizer):
            yield
    except BaseException:
        optimizer.zero_grad(set_to_none=True)
        raise


def _without_gradient(optimizer: Optimizer) -> torch.Tensor | None:
    """Return the smallest parameter that takes gradients, if no parameter has one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        return None
    trained = (parameter for parameter in parameters if parameter.requires_grad and not is_lazy(parameter))
    return min(trained, key=torch.Tensor.numel, default=None)


def ask_for_saved(
    path: str | os.PathLike[str], state: dict[str, Any], model: nn.Module, parameters: Mapping[str, nn.Parameter],
    whole: bool, comm: Communicator,
) -> Found:
    """Change the state dict of an optimizer so that a load fills all of what was saved, and asks for nothing else.

    Collective over `comm`.

    Args:
        path: the checkpoint.
        state: as of `Compressor.state`: with an optimizer's state by names of parameters, if there is one.
        model: module that made the state dict's `model`, and may take more than it tells.
        parameters: parameters of the model, by name.
        whole: all that was saved of the model is to be loaded.
        comm: communicator of the ranks that load.

    Raises:
        CheckpointNotFound: nothing is at `path`, or it is None.
        LoadFailed: the model lacks what was saved, or is on the meta device; the optimizer has other groups; or the
            state of a sharded parameter was saved, and the optimizer has none that tells how to shard it.
        DSQError: what else failed, on every rank.
    """
    background.wait()

    found = Found(Path())

    def ask() -> _Asked:
        nonlocal found
        directory = existing_path(path)
        refuse_meta(state["model"])
        with CheckpointFiles(directory) as files, files.naming():
            nesting, tensors = Nesting.from_json(files.index), files.index["tensors"]
            saved = [] if nesting is None or "optimizer" not in state else saved_groups(files, nesting)
        found = Found(directory)
        if nesting is None:
            return _Asked()
        left, new, frozen, own = set[str](), set[str](), set[str](), parameters
        if saved:
            optimizer = state["optimizer"]
            with_state = {str(path[2]) for path in nesting.values() if path[:2] == ("optimizer", "state")}
            names = [group["params"] for group in optimizer["param_groups"]]
            groups = GroupsByName(names, saved, parameters, with_state, directory)
            optimizer["param_groups"] = groups.asked(optimizer["param_groups"], saved_options(nesting, tensors))
            plain = [("optimizer", "param_groups", *option) for option in groups.new]
            found, own = found._replace(groups=groups, plain=plain), groups.parameters
            left = (groups.saved - groups.own) & with_state
            if with_state:
                new = groups.own - groups.saved - with_state - {name for name in own if not own[name].requires_grad}
        unsaved = set[str]()
        if "optimizer" in state:
            lacking, unsaved, frozen = _ask(state["optimizer"], own, directory, nesting, tensors)
            found = found._replace(plain=[*found.plain, *lacking])
            if found.groups is not None:
                asked_of = state["optimizer"]["state"]
                frozen |= {name for name in found.groups.own & with_state if not asked_of.get(name)}
        top = {str(path[0]) for path in (*nesting.values(), *(nesting.empty or ()))}
        of_model = {str(path[1]) for path in nesting.values() if path[0] == "model" and len(path) > 1}
        placed = () if found.groups is None else found.groups.placed
        unknown = of_model - state["model"].keys()
        unknown -= through_own_code(model, unknown)
        return _Asked(unknown, left, new, top - state.keys(), unsaved, frozen, placed)

    asked = gather_from_all_ranks(comm, ask, LoadFailed)
    unknown, left, new, more, unsaved = (_on_all(sets) for sets in zip(*(own[:5] for own in asked), strict=True))
    frozen, placed = (sorted(set().union(*sets)) for sets in zip(*(own[5:] for own in asked), strict=True))
    directory = found.directory
    if whole and unknown:
        raise lacks(unknown, directory)
    if left:
        warn(
            f"the optimizer state of {named(left)} in '{directory}' was not loaded, since this optimizer does not have "
            "these parameters", rank=comm.rank
        )
    if new:
        warn(
            f"no optimizer state of {named(new)} was loaded, since the optimizer of '{directory}' did not have these "
            "parameters: they begin without", rank=comm.rank
        )
    if frozen:
        warn(
            f"the optimizer state of {named(frozen)} in '{directory}' is not loaded: these parameters need no gradient "
            "now, and the optimizer has nothing that tells how their state is sharded. Load it into an optimizer that "
            "has it, if they are to be trained again", rank=comm.rank,
        )
    if placed:
        warn(
            f"'{directory}' lists {named(placed)} in no group of its optimizer, though it has their state, since it "
            "was written by ranks with other parameters each, and by dcp.save or an earlier version: their groups are "
            "given the options of the saved ones at the same places", rank=comm.rank,
        )
    if unsaved:
        warn(
            f"'{directory}' has no {named(unsaved)} of the optimizer, whose state_dict() has it, as it was saved by "
            "an earlier version, or before there was any: it is not restored", rank=comm.rank,
        )
    if more:
        placeholders = ", ".join(f"'{name}': ..." for name in more[:3])
        warn(
            f"{named(more)} of '{directory}' is not loaded, since extra does not name it: pass placeholders of what "
            f"you want, extra={{{placeholders}}}, for example 0 for a number and {{}} for a dict of any content",
            rank=comm.rank,
        )
    return found


class Found(NamedTuple):
    """A checkpoint that is loaded, as far as one rank knows it.

    Attributes:
        directory: the checkpoint.
        groups: parameter groups, if it has some by name.
        plain: paths of the options and of other objects that the optimizer lacks.
    """

    directory: Path
    groups: GroupsByName | None = None
    plain: Sequence[Keys] = ()


class _Asked(NamedTuple):
    """Names by which a checkpoint differs from the model and the optimizer of one rank.

    Attributes:
        unknown: names that were saved of the model, and that it lacks, also as far as its own code loads it.
        left: parameters whose state was saved, and that this optimizer lacks.
        new: parameters that the optimizer trains, and of which no state was saved, though of others.
        more: names at the top level of what was saved that the state dict lacks.
        unsaved: what the optimizer tells beside its state and its groups, and was not saved.
        frozen: parameters that need no gradient now, and whose state was saved and cannot be loaded.
        placed: parameters whose state was saved, and that are in no saved group.
    """

    unknown: Collection[str] = frozenset()
    left: Collection[str] = frozenset()
    new: Collection[str] = frozenset()
    more: Collection[str] = frozenset()
    unsaved: Collection[str] = frozenset()
    frozen: Collection[str] = frozenset()
    placed: Collection[str] = ()


def tell_of_more(state: Mapping[str, Any], path: str | os.PathLike[str], comm: Communicator) -> None:
    """Warn of tensors that a checkpoint has, and a module lacks that was loaded from it, as one with fewer layers.

    Collective over `comm`.

    Args:
        state: state dict of the module.
        path: the checkpoint.
        comm: communicator of the ranks that load.
    """
    def more() -> set[str]:
        with suppress(DSQError), CheckpointFiles(existing_path(path)) as files, files.naming():  # or it was replaced
            nesting = Nesting.from_json(files.index) or Nesting({})
            return {str(own[0]) for name, own in nesting.items() if name in files.index["tensors"]} - state.keys()
        return set()

    unknown = _on_all(gather_from_all_ranks(comm, more, LoadFailed))
    if unknown:
        warn(not_taken(unknown, path), rank=comm.rank)


def _on_all(sets: Iterable[Collection[str]]) -> list[str]:
    """Return the names that no rank knows: each may have a part of the model, such as a stage of a pipeline."""
    return sorted(set.intersection(*map(set, sets)))


def _ask(
    optimizer: dict[Any, Any], parameters: Mapping[str, nn.Parameter], directory: Path, nesting: Nesting,
    tensors: Mapping[str, Any],
) -> tuple[list[Keys], set[str], set[str]]:
    """Let the state dict of an optimizer ask for all that was saved, apart from groups.

    Returns:
        Paths of objects that the optimizer lacks, keys beside its state and its groups that were not saved, and frozen
        parameters of whose state nothing tells how it is sharded.
    """
    state, saved, empty = optimizer["state"], dict[Keys, dict[str, Keys]](), dict[Keys, list[Keys]]()
    for name, path in nesting.items():
        if path[0] == "optimizer" and path[1:2] != ("param_groups",):
            saved.setdefault(_entry(path), {})[name] = path
    for path in nesting.empty or ():
        if path[0] == "optimizer" and path[1:2] != ("param_groups",):
            empty.setdefault(_entry(path), []).append(path)
    entries = saved.keys() | empty.keys()
    if not any(path[0] == "optimizer" for path in (*nesting.values(), *(nesting.empty or ()))):
        return [], set(), set()  # as of a model alone, which the load tells
    everything = {str(path[2]) for path in entries if len(path) > 2}
    names = everything & (state.keys() | parameters.keys())  # of a pipeline other ranks have others
    if everything and not names:
        if all(name.isdecimal() for name in everything):
            raise LoadFailed(
                f"'{directory}' has the optimizer's state by the numbers of parameters, as an optimizer itself tells "
                "it, and not by their names: load {'model': model, 'optimizer': optimizer} by dsq_ckpt.load"
            )
        if not any(path[0] == "model" and str(path[-1]) in parameters for path in nesting.values()):
            return [], set(), set()  # of another model, which the load tells

    def fit(own: dict[Any, Any], entry: Keys, parameter: nn.Parameter | None = None) -> Fitted:
        below = None if nesting.empty is None else empty.get(entry, [])
        return fitted({"optimizer": own}, saved.get(entry, {}), below, nesting, tensors, parameter)

    new, frozen = list[Keys](), set[str]()
    for name in state.keys() - names:
        del state[name]
    for name in sorted(names):
        parameter, entry = parameters.get(name), _entry(("optimizer", "state", name))
        if parameter is None:
            continue
        keys = {str(path[3]) for path in (*saved.get(entry, {}).values(), *empty.get(entry, ())) if len(path) > 3}
        if name in state and not {str(key) for key in state[name]} <= keys:  # the load names those that were not saved
            continue
        found = fit({"state": {name: state.get(name, {})}}, entry, parameter)
        if found.unshared and not parameter.requires_grad:
            frozen.add(name)
            continue
        if found.unshared:
            raise LoadFailed(
                f"'{directory}' has {named(sorted(set(found.unshared)))} in the optimizer's state of '{name}', which "
                "this optimizer does not have, so that nothing tells how it is sharded: load into one with the same "
                "options that was not used yet, or that has it"
            )
        state[name] = found.state["optimizer"]["state"][name]
        new += found.new
    own, unsaved = beside(optimizer), set[str]()
    for key in own:
        del optimizer[key]
        if ("optimizer", str(key)) not in entries and key != OF_NO_PARAMETER:
            unsaved.add(str(key))
    for entry in entries:
        if len(entry) == 2 and entry[1] != "state":
            found = fit({key: value for key, value in own.items() if str(key) == entry[1]}, entry)
            optimizer.update(found.state["optimizer"])
            new += found.new
    return new, unsaved, frozen


def _entry(path: Keys) -> Keys:
    """Return the beginning of a path below an optimizer: the state of a parameter, or a key beside all state."""
    return path[:3] if path[1:2] == ("state",) else path[:2]
