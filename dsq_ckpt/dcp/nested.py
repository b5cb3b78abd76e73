"""Planners that keep what DCP's own leave out of a nested state dict, and empty dicts that a load fills."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from dsq_ckpt.core.arguments import format_value
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.hints import SHAPE_MISMATCH_ADVICE, missing_hint
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.nesting import Nesting, Path, empty_dicts, list_lengths, set_entry
from dsq_ckpt.core.notices import warn, warn_safely
from dsq_ckpt.core.tensor_subclasses import partial_placement_problem
from dsq_ckpt.dcp.differing import PLAIN, digests, warn_of_differing
from dsq_ckpt.dcp.groups_of_ranks import lists_of_names, united
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.record_fields import parse_dtype

_MOST_TOLD = 3  # objects that a save warns of


class NestedSavePlanner(DefaultSavePlanner):
    """DCP's save planner, with a `Nesting` of all ranks as `planner_data`; it warns of values that ranks differ in."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._told = 0
        self.mappings = Nesting.of(state_dict, self.mappings)
        for path, key in self.mappings.list_unkept_keys(state_dict) if is_coordinator else ():
            warn(
                f"the key {key!r} of '{'.'.join(map(str, path[:-1]))}' is stored as the string {path[-1]!r}, and comes "
                "back as that from a load into an empty dict: keys of a state dict are strings, numbers or None"
            )

    def create_local_plan(self) -> SavePlan:
        assert isinstance(self.mappings, Nesting)
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if not alone:
            self.mappings.digests = digests(self.state_dict)
            self.mappings.groups = lists_of_names(self.state_dict)
        return super().create_local_plan()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        with contextlib.suppress(RecursionError):  # a list that contains itself, which pickle can store
            object = _plain(object)
        stored = super().transform_object(write_item, object)
        if isinstance(stored, io.BytesIO) and type(object) not in PLAIN and self._told < _MOST_TOLD:
            self._tell_of_classes(write_item.index.fqn, stored)
        return stored

    def _tell_of_classes(self, fqn: str, stored: io.BytesIO) -> None:
        """Warn of an object that no load into an empty dict brings back; its bytes tell its classes."""
        classes, end = [], stored.tell()
        with contextlib.suppress(RuntimeError, ValueError, pickle.UnpicklingError):  # no save fails for want of it
            stored.seek(0)
            classes = get_unsafe_globals_in_checkpoint(stored)
        stored.seek(end)
        if classes:
            self._told += 1
            warn_safely(
                f"'{fqn}' is stored by {quote(sorted(classes))}, which is more than plain data: it comes back where a "
                "load has a placeholder for it, but not into an empty dict, since unpickling it can run code. Store "
                "numbers, strings, lists, dicts or tensors in its place"
            )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        parts = [plan.planner_data for plan in all_plans]
        warn_of_differing(part.digests for part in parts)
        groups, given = united([part.groups for part in parts]), set[str]()
        for plan, part in zip(plans, parts, strict=True):  # the writer may give a list to the first rank that has it
            written = {item.index.fqn for item in plan.items} | (part.groups.keys() - given)
            given |= part.groups.keys()
            plan.planner_data.groups = {name: names for name, names in groups.items() if name in written}
        return plans, replace(metadata, planner_data=Nesting.merged(metadata.planner_data, parts))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.state_dict.update(new_plan.planner_data.groups)
        return super().finish_plan(new_plan)


def _plain(value: Any) -> Any:
    """Return a value with plain numbers in place of NumPy's, such as a learning rate.

    Theirs would be more than plain data, which no load into an empty dict unpickles.
    """
    if isinstance(value, np.bool_ | np.integer | np.floating) and not isinstance(value, np.longdouble):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(one) for key, one in value.items()} if type(value) is dict else value


class NestedLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner, which also finds objects below keys that are no strings.

    Args:
        filled: paths of the dicts that were empty. What is stored there was not asked for by name, so it is unpickled
            only as far as it is plain data; other objects are unpickled as DCP does it.
        given: the state dict as the caller gave it; None: as DCP gives it.
        hint: said where the checkpoint has no entry of a name.

    Attributes:
        given: the state dict to load into, with the state dicts that modules made.
    """

    def __init__(self, filled: Iterable[Path] = (), given: Mapping[str, Any] | None = None, hint: str = "") -> None:
        super().__init__()
        self._filled, self._hint = list(filled), hint
        self.given = given

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Only ShardedTensors of ShardedTensors need it, and it makes None of empty dicts in lists.
        flat, paths = flatten_state_dict(state_dict)
        if not (dist.is_available() and dist.is_initialized()):  # torch asks it where to put these
            own = Nesting.of(state_dict, paths, all_keys=True)
            for name, value in flat.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    set_entry(state_dict, own.steps(paths[name]), torch.empty_like(value, device="cpu"))
        self.flatten_sharded_tensors = any(isinstance(value, ShardedTensor) for value in flat.values())
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._nesting = Nesting.of(state_dict, self.mappings, all_keys=True)
        if is_coordinator and metadata is not None:
            _warn_of_shorter(self.mappings, metadata.planner_data)
        empty = {*self._filled, *(path for path, _ in empty_dicts(state_dict))}
        self._empty = empty
        self._above = {path[:deep] for path in empty for deep in range(len(path))}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for fqn, placeholder in self.state_dict.items():
            if (reason := partial_placement_problem(placeholder)) is not None:
                raise LoadFailed(f"'{fqn}' {reason}")
            stored = self.metadata.state_dict_metadata.get(fqn)
            if not isinstance(stored, TensorStorageMetadata):
                continue
            if not isinstance(placeholder, torch.Tensor | ShardedTensor):
                raise LoadFailed(
                    f"'{fqn}' was saved as a tensor of shape {tuple(stored.size)}, and its value in the state dict is "
                    f"{format_value(placeholder)}: put a tensor of that shape there, or leave '{fqn}' out"
                )
            if stored.size != placeholder.size():
                raise LoadFailed(
                    f"'{fqn}' was saved with the shape {tuple(stored.size)}, and has {tuple(placeholder.size())} in "
                    f"what it is loaded into: {SHAPE_MISMATCH_ADVICE}"
                )
        try:
            return super().create_local_plan()
        except RuntimeError as error:
            known = self.metadata.state_dict_metadata
            missing = [fqn for fqn in self.state_dict if fqn not in known]
            if not missing:
                raise
            self._refuse_entries(missing, self.metadata)
            more = (f" and {len(missing) - 1} more" if len(missing) > 1 else "") + ", which the state dict has"
            ending = self._hint + missing_hint(missing, self.state_dict, known)
            raise LoadFailed(f"the checkpoint has no '{missing[0]}'{more}{ending}") from error

    def _refuse_entries(self, missing: Iterable[str], metadata: Metadata) -> None:
        """Refuse a placeholder in whose place a dict or a list was saved, with entries of their own."""
        if not isinstance(saved := metadata.planner_data, dict):
            return
        for fqn in missing:
            path = self.mappings[fqn]
            below = {
                name: own for name in metadata.state_dict_metadata
                if isinstance(own := saved.get(name), tuple) and own[: len(path)] == path and len(own) > len(path)
            }
            if below:
                kind = "list" if type(next(iter(below.values()))[len(path)]) is int else "dict"
                fills = ", or an empty dict, which dsq_ckpt.load fills with all of them" if kind == "dict" else ""
                raise LoadFailed(
                    f"'{fqn}' was saved as a {kind} with the entries {quote(list(below))}, and its value in the state "
                    f"dict is {format_value(self.state_dict[fqn])}: put a {kind} there with a placeholder for each, a "
                    f"tensor for a tensor{fills}"
                )

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        # Above as well: DCP may take a dict for one object, as versions before 2.4 did.
        plain = path in self._above or any(path[:deep] in self._empty for deep in range(len(path) + 1))
        try:
            with in_user_code():  # which objects may have for that
                found = torch.load(value, weights_only=plain)
        except pickle.UnpicklingError as error:
            if not plain:
                raise
            raise LoadFailed(
                f"object '{read_item.dest_index.fqn}' is more than plain data; unpickling it can run code, so it is "
                "not loaded into an empty dict, nor into an object that does not name it. If you trust this "
                "checkpoint, name it in the state dict: in place of the empty dict, or the object, put a dict with a "
                "placeholder for each entry that you want, None for this one; DCP then unpickles what is named"
            ) from error
        set_entry(self.original_state_dict, self._nesting.steps(path), found)


def _warn_of_shorter(paths: Mapping[str, Path], saved: Any) -> None:
    """Warn of lists with fewer entries than were saved, by their paths; what another planner saved may be no paths."""
    if not isinstance(saved, dict) or not all(isinstance(path, tuple) for path in saved.values()):
        return
    stored = list_lengths(saved)
    for path, length in list_lengths(paths).items():
        if stored.get(path, 0) > length:
            warn(
                f"'{'.'.join(map(str, path))}' is a list of {length}, of which {stored[path]} were saved: the rest is "
                "not loaded"
            )


def fillings(
    state_dict: dict[Any, Any], checkpoint: Checkpoint, given: Mapping[Any, Any]
) -> list[tuple[MutableMapping[Any, Any], dict[Any, Any]]]:
    """Return placeholders for everything that a checkpoint holds below the empty dicts of a state dict.

    Args:
        state_dict: to be loaded; tensors are made on the CPU, and the state of an optimizer's parameters with their
            strides, or sharded like them.
        checkpoint: to load it from.
        given: the same with optimizers in place of their state dicts, as far as these were given.

    Returns:
        The dicts that are to be filled, each with its new entries.

    Raises:
        LoadFailed: the checkpoint has nothing there, and no empty dict either.
        CorruptCheckpoint: its index is not as documented.
    """
    found_all: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
    parameters = parameters_of(given)
    with checkpoint.translate_errors():
        nesting, tensors = Nesting.from_json(checkpoint.index), checkpoint.index["tensors"]
        if nesting is None:
            if not state_dict and (tensors or checkpoint.index["objects"]):
                raise LoadFailed(
                    f"'{checkpoint.directory}' does not tell how the state dict was nested, since its planner did not: "
                    "name in the state dict what is to be loaded"
                )
            return found_all
        for path, target in empty_dicts(state_dict):
            found = nesting.below(path)
            named = path and not isinstance(given.get(path[0]), Stateful)  # which may have had no state before
            if found is None and named and nesting.empty is not None:
                raise LoadFailed(_nothing_below(path, nesting, checkpoint))
            if found is None or not isinstance(target, MutableMapping):
                continue
            found_all.append((target, found.unflatten({
                name: placeholder(tensors[name], nesting[name], parameters) if name in tensors else None
                for name in found
            })))
    return found_all


def parameters_of(given: Mapping[Any, Any]) -> dict[str, list[torch.Tensor]]:
    """Return the parameters of optimizers at the top level of a state dict, by their number in the optimizer."""
    return {
        str(key): [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for key, optimizer in given.items() if isinstance(optimizer, Optimizer)
    }


def placeholder(
    tensor: Mapping[str, Any], path: Path, parameters: Mapping[str, Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Return a tensor to load into, for the tensor of an index at a path.

    Args:
        tensor: its entry in the index.
        path: see above.
        parameters: as of `parameters_of`, whose strides and shards the state of a parameter gets.

    Raises:
        LoadFailed: it is of an optimizer's state for other parameters than those that the optimizer has.
    """
    shape, dtype = torch.Size(tensor["shape"]), parse_dtype(tensor["dtype"])
    own = parameters.get(str(path[0]), ())
    if own and len(path) == 4 and path[1] == "state" and str(path[2]).isdecimal():
        name, number = ".".join(map(str, path)), int(path[2])
        if number >= len(own):
            raise LoadFailed(
                f"the checkpoint has '{name}', state of parameter {number}, counted from 0, and '{path[0]}' has "
                f"{len(own)} parameters: was it saved by the optimizer of another model?"
            )
        like = own[number].detach()
        if like.shape != shape and kind_of(name) in ("exp_avg", "momentum"):  # second ones may be those of rows
            warn(
                f"'{name}' has shape {tuple(shape)} in the checkpoint, and parameter {number} of '{path[0]}' "
                f"{tuple(like.shape)}: unless the optimizer keeps moments of other shapes than its parameters', it was "
                "saved by that of another model"
            )
        if like.shape == shape and isinstance(like, DTensor):
            return torch.empty_like(like, dtype=dtype)
        if like.shape == shape and type(like) is torch.Tensor:  # fused optimizers rely on its strides, as channels_last
            return torch.empty_like(like, dtype=dtype, device="cpu")
    return torch.empty(shape, dtype=dtype, device="cpu")


def _nothing_below(path: Path, nesting: Nesting, checkpoint: Checkpoint) -> str:
    name = ".".join(map(str, path))
    if path in nesting.values():
        return (
            f"'{name}' is an empty dict, to be filled with what is stored below it, but '{checkpoint.directory}' has "
            "one object there: put a placeholder for it in place of the dict, such as None"
        )
    known = sorted({str(own[0]) for own in [*nesting.values(), *(nesting.empty or ())]})
    return (
        f"'{name}' is an empty dict, to be filled with what is stored below it, but '{checkpoint.directory}' has "
        f"nothing there; at its top level are {', '.join(repr(key) for key in known)}. Leave '{name}' out, or name "
        "what was saved"
    )
