"""Planners that keep the full nesting of a state dict, unlike DCP's planners, and placeholders for empty dicts."""

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
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from dsq_ckpt.core.arguments import format_value
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.flat_names import flatten
from dsq_ckpt.core.hints import SHAPE_MISMATCH_ADVICE, missing_hint
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.nesting import Nesting, Path, empty_dicts, list_lengths, set_entry
from dsq_ckpt.core.notices import warn, warn_safely
from dsq_ckpt.core.tensor_subclasses import partial_placement_problem
from dsq_ckpt.dcp.parameter_groups import find_parameter_lists, merge_parameter_lists
from dsq_ckpt.dcp.rank_differences import PLAIN_TYPES, compute_digests, warn_of_differences
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.record_fields import parse_dtype

_MAX_WARNED = 3  # objects per save


class NestedSavePlanner(DefaultSavePlanner):
    """DCP's save planner with a `Nesting` of all ranks as `planner_data`, and warnings of differences between ranks."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        try:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
        except ValueError:
            flatten(state_dict)  # its error names the keys, unlike DCP's
            raise
        self._warned_objects = 0
        self.mappings = Nesting.of(state_dict, self.mappings)
        for path, key in self.mappings.list_unkept_keys(state_dict) if is_coordinator else ():
            warn(
                f"the key {key!r} of '{'.'.join(map(str, path[:-1]))}' is stored as the string {path[-1]!r}, and comes "
                "back as that from a load into an empty dict: keys of a state dict are strings, numbers, None, or "
                "tuples of these"
            )

    def create_local_plan(self) -> SavePlan:
        assert isinstance(self.mappings, Nesting)
        is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if not is_alone:
            self.mappings.digests = compute_digests(self.state_dict)
            self.mappings.groups = find_parameter_lists(self.state_dict)
        return super().create_local_plan()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        with contextlib.suppress(RecursionError):  # a list that contains itself can be pickled
            object = _to_plain(object)
        stored = super().transform_object(write_item, object)
        if isinstance(stored, io.BytesIO) and type(object) not in PLAIN_TYPES and self._warned_objects < _MAX_WARNED:
            self._warn_of_classes(write_item.index.fqn, stored)
        return stored

    def _warn_of_classes(self, fqn: str, stored: io.BytesIO) -> None:
        """Warn of an object that a load into an empty dict cannot restore, by the classes in its pickle."""
        classes, end = [], stored.tell()
        with contextlib.suppress(RuntimeError, ValueError, pickle.UnpicklingError):  # it must not fail the save
            stored.seek(0)
            classes = get_unsafe_globals_in_checkpoint(stored)
        stored.seek(end)
        if classes:
            self._warned_objects += 1
            warn_safely(
                f"'{fqn}' is pickled with {quote(sorted(classes))}, which is more than plain data: it comes back where "
                "a load has a placeholder for it, but not into an empty dict, since unpickling it can run code. Store "
                "numbers, strings, lists, dicts or tensors in its place"
            )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        parts = [plan.planner_data for plan in all_plans]
        warn_of_differences(part.digests for part in parts)
        groups, assigned = merge_parameter_lists([part.groups for part in parts]), set[str]()
        for plan, part in zip(plans, parts, strict=True):  # the writer may assign a list to the first rank that has it
            written = {item.index.fqn for item in plan.items} | (part.groups.keys() - assigned)
            assigned |= part.groups.keys()
            plan.planner_data.groups = {name: names for name, names in groups.items() if name in written}
        return plans, replace(metadata, planner_data=Nesting.merged(metadata.planner_data, parts))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.state_dict.update(new_plan.planner_data.groups)
        return super().finish_plan(new_plan)


def _to_plain(value: Any) -> Any:
    """Return a value with NumPy scalars, such as a learning rate, replaced by plain numbers.

    A load into an empty dict unpickles only plain data, which NumPy scalars are not.
    """
    if isinstance(value, np.bool_ | np.integer | np.floating) and not isinstance(value, np.longdouble):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_to_plain, value))
    return {key: _to_plain(entry) for key, entry in value.items()} if type(value) is dict else value


class NestedLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner, which also finds objects below keys that are not strings.

    Args:
        filled: paths of the dicts that were empty. Objects stored there are not requested by name, so only plain data
            is unpickled there; all other objects are unpickled as by DCP.
        caller_state_dict: the state dict as passed by the caller, with the state dicts that modules made; None: as
            passed by DCP.
        hint: appended to the message on missing keys.
    """

    def __init__(
        self, filled: Iterable[Path] = (), caller_state_dict: Mapping[str, Any] | None = None, hint: str = ""
    ) -> None:
        super().__init__()
        self._filled_paths, self._hint = list(filled), hint
        self.caller_state_dict = caller_state_dict

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Only ShardedTensors need flattening, and it replaces empty dicts in lists by None.
        flat, paths = flatten(state_dict)
        if not (dist.is_available() and dist.is_initialized()):  # torch would use the process group to place these
            nesting = Nesting.of(state_dict, paths, all_keys=True)
            for name, value in flat.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    set_entry(state_dict, nesting.steps(paths[name]), torch.empty_like(value, device="cpu"))
        self.flatten_sharded_tensors = any(isinstance(value, ShardedTensor) for value in flat.values())
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._nesting = Nesting.of(state_dict, self.mappings, all_keys=True)
        if is_coordinator and metadata is not None:
            _warn_of_shorter_lists(self.mappings, metadata.planner_data)
        empty = {*self._filled_paths, *(path for path, _ in empty_dicts(state_dict))}
        self._empty_paths = empty
        self._parent_paths = {path[:depth] for path in empty for depth in range(len(path))}

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
            plain = isinstance(placeholder, torch.Tensor) and not isinstance(placeholder, ShardedTensor)
            if plain and placeholder.is_nested:  # has no size; a ShardedTensor does not tell
                raise LoadFailed(
                    f"'{fqn}' is a nested tensor in what it is loaded into, and was saved as a tensor of shape "
                    f"{tuple(stored.size)}: put a tensor of that shape there"
                )
            if stored.size != placeholder.size():
                raise LoadFailed(
                    f"'{fqn}' was saved with the shape {tuple(stored.size)}, and has {tuple(placeholder.size())} in "
                    f"what it is loaded into: {SHAPE_MISMATCH_ADVICE}"
                )
            if isinstance(placeholder, torch.Tensor) and placeholder.layout is not torch.strided:
                raise LoadFailed(
                    f"'{fqn}' has the layout {placeholder.layout} in what it is loaded into: load into a dense tensor, "
                    "such as its to_dense(), and convert that"
                )
        try:
            return super().create_local_plan()
        except RuntimeError as error:
            entries = self.metadata.state_dict_metadata
            missing = [fqn for fqn in self.state_dict if fqn not in entries]
            if not missing:
                raise
            self._check_no_entries(missing, self.metadata)
            suffix = (f" and {len(missing) - 1} more" if len(missing) > 1 else "") + ", which the state dict has"
            ending = self._hint + missing_hint(missing, self.state_dict, entries)
            raise LoadFailed(f"the checkpoint has no '{missing[0]}'{suffix}{ending}") from error

    def _check_no_entries(self, missing: Iterable[str], metadata: Metadata) -> None:
        """Raise if a dict or a list with entries was saved in place of a placeholder."""
        if not isinstance(paths := metadata.planner_data, dict):
            return
        for fqn in missing:
            path = self.mappings[fqn]
            below = {
                name: steps for name in metadata.state_dict_metadata
                if isinstance(steps := paths.get(name), tuple) and steps[: len(path)] == path and len(steps) > len(path)
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
        # Parents too: DCP may store a dict as one object, as versions before 2.4 did.
        plain = path in self._parent_paths or any(path[:depth] in self._empty_paths for depth in range(len(path) + 1))
        try:
            with in_user_code():  # objects may have their own unpickling functions
                loaded = torch.load(value, weights_only=plain)
        except pickle.UnpicklingError as error:
            if not plain:
                raise
            raise LoadFailed(
                f"object '{read_item.dest_index.fqn}' is more than plain data; unpickling it can run code, so it is "
                "not loaded into an empty dict, nor into an object that does not name it. If you trust this "
                "checkpoint, name it in the state dict: in place of the empty dict, or the object, put a dict with a "
                "placeholder for each entry that you want, None for this one; DCP then unpickles what is named"
            ) from error
        set_entry(self.original_state_dict, self._nesting.steps(path), loaded)


def _warn_of_shorter_lists(paths: Mapping[str, Path], planner_data: Any) -> None:
    """Warn of lists with fewer entries than were saved; planner data of another planner is ignored."""
    if not isinstance(planner_data, dict) or not all(isinstance(path, tuple) for path in planner_data.values()):
        return
    stored = list_lengths(planner_data)
    for path, length in list_lengths(paths).items():
        if stored.get(path, 0) > length:
            warn(
                f"'{'.'.join(map(str, path))}' is a list of {length}, of which {stored[path]} were saved: the rest is "
                "not loaded"
            )


def make_placeholders(
    state_dict: dict[Any, Any], checkpoint: Checkpoint, caller_state_dict: Mapping[Any, Any]
) -> list[tuple[MutableMapping[Any, Any], dict[Any, Any]]]:
    """Return placeholders for all entries of a checkpoint below the empty dicts of a state dict.

    Args:
        state_dict: the state dict to load into. Tensors are created on the CPU; those of the state of an optimizer's
            parameter have the strides or the sharding of the parameter.
        checkpoint: the checkpoint to load.
        caller_state_dict: the same with optimizers in place of their state dicts, if the caller passed them.

    Returns:
        The dicts to fill, each with its new entries.

    Raises:
        LoadFailed: the checkpoint has neither entries nor an empty dict there.
        CorruptCheckpoint: its index is not as documented.
    """
    placeholders: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
    parameters = list_parameters(caller_state_dict)
    with checkpoint.translate_errors():
        nesting, tensors = Nesting.from_json(checkpoint.index), checkpoint.index["tensors"]
        if nesting is None:
            if not state_dict and (tensors or checkpoint.index["objects"]):
                raise LoadFailed(
                    f"'{checkpoint.directory}' does not tell how the state dict was nested, since its planner did not: "
                    "name in the state dict what is to be loaded"
                )
            return placeholders
        for path, target in empty_dicts(state_dict):
            below = nesting.below(path)
            # A Stateful may have had no state.
            is_required = path and not isinstance(caller_state_dict.get(path[0]), Stateful)
            if below is None and is_required and nesting.empty is not None:
                raise LoadFailed(_describe_nothing_below(path, nesting, checkpoint))
            if below is None or not isinstance(target, MutableMapping):
                continue
            placeholders.append((target, below.unflatten({
                name: make_placeholder(tensors[name], nesting[name], parameters) if name in tensors else None
                for name in below
            })))
    return placeholders


def list_parameters(state_dict: Mapping[Any, Any]) -> dict[str, list[torch.Tensor]]:
    """Return the parameters of the optimizers at the top level of a state dict, in the optimizer's order, by key."""
    return {
        str(key): [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for key, optimizer in state_dict.items() if isinstance(optimizer, Optimizer)
    }


def make_placeholder(
    tensor: Mapping[str, Any], path: Path, parameters: Mapping[str, Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Return a tensor to load into, for a tensor in the index of a checkpoint.

    Args:
        tensor: its entry in the index.
        path: its path in the nested state dict.
        parameters: see `list_parameters`; the state of a parameter gets its strides and shards.

    Raises:
        LoadFailed: it is optimizer state of a parameter that the optimizer does not have.
    """
    shape, dtype = torch.Size(tensor["shape"]), parse_dtype(tensor["dtype"])
    candidates = parameters.get(str(path[0]), ())
    if candidates and len(path) == 4 and path[1] == "state" and str(path[2]).isdecimal():
        name, number = ".".join(map(str, path)), int(path[2])
        if number >= len(candidates):
            raise LoadFailed(
                f"the checkpoint has '{name}', state of parameter {number}, counted from 0, and '{path[0]}' has "
                f"{len(candidates)} parameters: was it saved by the optimizer of another model?"
            )
        like = candidates[number].detach()
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


def _describe_nothing_below(path: Path, nesting: Nesting, checkpoint: Checkpoint) -> str:
    name = ".".join(map(str, path))
    if path in nesting.values():
        return (
            f"'{name}' is an empty dict, to be filled with what is stored below it, but '{checkpoint.directory}' has "
            "one object there: put a placeholder for it in place of the dict, such as None"
        )
    top_keys = sorted({str(full_path[0]) for full_path in [*nesting.values(), *(nesting.empty or ())]})
    return (
        f"'{name}' is an empty dict, to be filled with what is stored below it, but '{checkpoint.directory}' has "
        f"nothing there; at its top level are {', '.join(repr(key) for key in top_keys)}. Leave '{name}' out, or name "
        "what was saved"
    )
