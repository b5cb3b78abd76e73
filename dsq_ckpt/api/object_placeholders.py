"""Placeholders for saved entries that an optimizer or another object does not have in its state dict yet.

DCP loads the keys of the object's current state dict. A new object has fewer keys than were saved: some optimizers add
options to their parameter groups later (`step`, `initial_lr`), other objects add entries when they are used. A user who
passes the object expects everything that was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dsq_ckpt.api.checks import has_state, initialize_state, reset_on_failure
from dsq_ckpt.api.parameter_groups import compare_options, warn_of_other_optimizer
from dsq_ckpt.api.unsaved_state import remove_unsaved_state, warn_of_unsaved_state
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.flat_names import flatten
from dsq_ckpt.core.nesting import Nesting, Path, empty_dicts
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.tensor_subclasses import find_class_key, replace_subclasses
from dsq_ckpt.dcp.nested_planners import list_parameters, make_placeholder
from dsq_ckpt.errors import LoadFailed

UnexpectedKeys = Mapping[str, Collection[str]]
"""Saved keys that the state dict of an object or a module does not have on one rank, by the key of the latter."""


def select_objects(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the values at the top level of a state dict that have a state dict of their own, except modules."""
    return {
        key: value for key, value in state.items()
        if isinstance(value, Stateful) and not isinstance(value, nn.Module)
    }


class ObjectPlaceholders:
    """Placeholders in the state dicts of optimizers and other objects, on one rank.

    Args:
        objects: the objects, by key.
        state: state dict to load into, with the state dicts of the objects at the same keys; their dicts and lists are
            replaced by copies.
        nesting: nesting of the checkpoint.
        tensors: the checkpoint's index of tensors.

    Attributes:
        unexpected_keys: saved keys that the state dicts do not have. For optimizers, it does not contain keys with
            numbers of parameters or groups: each rank counts its own, so ranks need not exchange these.
    """

    def __init__(
        self, objects: Mapping[Any, Any], state: MutableMapping[Any, Any], nesting: Nesting, tensors: Mapping[str, Any]
    ) -> None:
        self._keys = {str(key): key for key in objects}
        self.unexpected_keys = {text: set[str]() for text in self._keys}
        self._unexpected_numbered = {
            text: set[str]() for text, key in self._keys.items() if isinstance(objects[key], Optimizer)
        }
        self._objects, self._state = objects, state
        self._excluded_options = list[tuple[dict[Any, Any], dict[Any, Any]]]()
        self._keys_by_text: dict[int, dict[str, Any]] = {}
        self._nesting, self._tensors = nesting, tensors
        for key in self._keys.values():
            state[key] = _copy_containers(state[key])
        object_states = {key: state[key] for key in self._keys.values()}
        values, self._expected = flatten(replace_subclasses(object_states))
        self._without_tensor = {  # the object has None, for example, where a tensor was saved
            name for name, value in values.items()
            if name in self._tensors and not isinstance(value, torch.Tensor | ShardedTensor)
        }
        self._empty_paths = {path for path, _ in empty_dicts(object_states)}  # filled by the load
        for name, path in self._nesting.items():
            if str(path[0]) in self._keys and name not in self._expected:
                numbered = self._unexpected_numbered.get(str(path[0])) if _is_numbered(path) else None
                (self.unexpected_keys[str(path[0])] if numbered is None else numbered).add(name)

    def add_placeholders(self, unexpected_keys: Iterable[UnexpectedKeys], rank: int) -> list[Path]:
        """Add placeholders for saved entries, and remove options of groups and state of parameters not saved.

        Args:
            unexpected_keys: `unexpected_keys` of all ranks. A key that one rank expects, such as that of a stage of a
                pipeline, is loaded by that rank alone.
            rank: this process's rank; rank 0 warns.

        Returns:
            The paths of the placeholders.

        Raises:
            LoadFailed: an optimizer has fewer parameters than have state, or a part of a tensor subclass was saved
                where the object has no such tensor.
        """
        ranks = list(unexpected_keys)
        parameters, added = list_parameters(self._objects), list[Path]()
        for text, key in self._keys.items():
            names = set[str].intersection(*(set(unexpected[text]) for unexpected in ranks if text in unexpected))
            optimizer = self._objects[key] if isinstance(self._objects[key], Optimizer) else None
            if optimizer is not None:
                self._exclude_unsaved_state(text, key, rank)
                groups = len(optimizer.param_groups)
                names |= {
                    name for name in self._unexpected_numbered[text] if not self._is_beyond_last_group(name, groups)
                }
            excluded = self._exclude_tensors(names) if optimizer is None and _has_tensors(self._state[key]) else set()
            if excluded_tensors := sorted(excluded & self._tensors.keys()):
                warn(
                    f"{quote(excluded_tensors)} was saved of '{text}' and is not loaded, since its state_dict() does "
                    "not name it: load into an object that has it, or give an empty dict in place of this one",
                    rank=rank,
                )
            for path in self._nesting.empty or ():
                if path[0] == text and len(path) > 1 and not self._is_below_empty_dict(path):
                    self._set_entry(path, {}, keep=True)
            replaced = {name for name in self._without_tensor if self._nesting[name][0] == text}
            for name in sorted(names - excluded | replaced):
                path = self._nesting[name]
                if self._is_below_empty_dict(path):
                    continue
                refuse_subclass_part(name, path, self._nesting)
                value = make_placeholder(self._tensors[name], path, parameters) if name in self._tensors else None
                if self._set_entry(path, value):
                    added.append(path)
            if optimizer is not None:
                warn_of_other_optimizer(text, optimizer, self._nesting, rank)
                self._exclude_unsaved_options(text, key)
        return added

    def restore_options(self) -> None:
        """Put the options that were removed before the load back into the parameter groups."""
        for group, options in self._excluded_options:
            group.update(options)

    def _is_beyond_last_group(self, name: str, groups: int) -> bool:
        path = self._nesting[name]
        return path[1:2] == ("param_groups",) and type(path[2]) is int and path[2] >= groups

    def _is_below_empty_dict(self, path: Path) -> bool:
        return any(path[:depth] in self._empty_paths for depth in range(1, len(path)))

    def _exclude_tensors(self, names: Iterable[str]) -> set[str]:
        """Return the names of tensors, which an object may omit on purpose, and of entries that follow them in lists.

        A list can only be filled up to its first excluded entry.
        """
        tensors = {name for name in names if name in self._tensors}
        ends: dict[Path, int] = {}  # index of the first excluded entry of each list
        for path in map(self._nesting.__getitem__, tensors):
            for depth, part in enumerate(path):
                if type(part) is int:
                    ends[path[:depth]] = min(part, ends.get(path[:depth], part))
        return tensors | {
            name for name in names
            if any(type(part) is int and part >= ends.get(path[:depth], part + 1)
                   for path in [self._nesting[name]] for depth, part in enumerate(path))
        }

    def _exclude_unsaved_state(self, text: str, key: Any, rank: int) -> None:
        """Remove state of an optimizer's parameters that was not saved, unless another class was."""
        state = self._state[key].get("state")
        is_other_class = any(compare_options(text, self._objects[key], self._nesting))
        if isinstance(state, MutableMapping) and not is_other_class:
            warn_of_unsaved_state(remove_unsaved_state(text, state, self._nesting), rank)

    def _exclude_unsaved_options(self, text: str, key: Any) -> None:
        """Remove options of saved groups that were not saved from the load; clear those saved as empty dicts."""
        empty = {path for path in self._nesting.empty or () if path[:2] == (text, "param_groups")}
        saved_options = {path[:4] for path in (*self._nesting.values(), *empty) if path[:2] == (text, "param_groups")}
        groups = {path[:3] for path in saved_options}
        for path in {path[:4] for path in self._expected.values() if path[:3] in groups}:
            group = self._state[key]["param_groups"][path[2]]
            option = next(name for name in group if str(name) == path[3])
            if path in empty:
                group[option] = {}
            elif path not in saved_options:
                self._excluded_options.append((group, {option: group.pop(option)}))

    def _set_entry(self, path: Path, value: Any, *, keep: bool = False) -> bool:
        """Set an entry of the state dict, matching keys by their text; return whether it could be set.

        It cannot be set below a value that is neither None nor a dict or list. With `keep`, an existing value stays.
        """
        node: Any = self._state
        steps = self._nesting.steps(path)
        for (step, in_list), following in zip_longest(steps, steps[1:]):
            key: Any = step
            if isinstance(node, list) and in_list:
                node.extend([None] * (key + 1 - len(node)))
            elif isinstance(node, MutableMapping) and not in_list:
                key = self._find_key(node, key)
            else:
                return False
            if following is None:
                if not keep or node[key] is None:
                    node[key] = value
            elif node[key] is None:
                node[key] = [] if following[1] else {}
            node = node[key]
        return True

    def _find_key(self, node: MutableMapping[Any, Any], key: Any) -> Any:
        """Return the key of a dict with the same text as `key`; if there is none, add `key` with the value None."""
        if id(node) not in self._keys_by_text:
            self._keys_by_text[id(node)] = {str(own_key): own_key for own_key in node}
        first_key = self._keys_by_text[id(node)].setdefault(str(key), key)
        node.setdefault(first_key, None)
        return first_key


@contextmanager
def initialize_subclass_states(objects: Mapping[Any, Any], nesting: Nesting) -> Iterator[bool]:
    """Initialize optimizers without state whose saved state has tensor subclasses; yield whether there is any.

    Only the optimizer can create such tensors, as the 8-bit ones of torchao. A load then fills their inner tensors. If
    the initialization or the load fails, the optimizers are reset.

    Raises:
        LoadFailed: the step that initializes the state fails.
    """
    states = [path for path in nesting.values() if path[1:2] == ("state",)]
    with_subclasses = {str(path[0]) for path in states if find_class_key(path, nesting) is not None}
    uninitialized = [
        value for key, value in objects.items()
        if str(key) in with_subclasses and isinstance(value, Optimizer) and not has_state(value)
    ]
    with ExitStack() as stack:
        for optimizer in uninitialized:
            stack.enter_context(reset_on_failure(optimizer))
            initialize_state(optimizer)
        yield bool(uninitialized)


def refuse_subclass_part(name: str, path: Path, names: Container[str]) -> None:
    """Raise an error if a saved entry is a part of a tensor subclass and would be loaded where no such tensor is.

    Args:
        name: flat name of the entry.
        path: its path.
        names: flat names of all saved entries.

    Raises:
        LoadFailed: the entry is such a part.
    """
    if (depth := find_class_key(path, names)) is not None:
        raise LoadFailed(
            f"'{name}' is a part of a tensor of the class {path[depth]}, and what is loaded has no "
            "such tensor in its place: make it as it was made when it was saved, or load into an empty dict"
        )


def _is_numbered(path: Path) -> bool:
    """Return whether a path leads to a parameter group, or to the state of a parameter that has a number as its key."""
    return path[1:2] == ("param_groups",) or (path[1:2] == ("state",) and str(path[2]).isdecimal())


def _has_tensors(node: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in flatten_state_dict({"": node})[0].values())


def _copy_containers(node: Any) -> Any:
    """Return copies of nested dicts and lists with the same values: an optimizer's state dict has those in use."""
    if isinstance(node, list):
        return [_copy_containers(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    copied = copy.copy(node) if isinstance(node, dict) else dict(node)  # a copy of another mapping may share entries
    for key, value in node.items():
        copied[key] = _copy_containers(value)
    return copied
