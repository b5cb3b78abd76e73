"""What was saved of an optimizer or the like, and one that was just made does not have yet.

Its own state dict is what a load asks for, as in DCP. That lacks what some optimizers keep in their parameter groups
(`step`, `initial_lr`), and what an object has once it was used. Who gives the object means all that was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dsq_ckpt.api.checks import as_before, make_state
from dsq_ckpt.core.nesting import Nesting, Path, empty_dicts
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.subclasses import by_parts, class_in
from dsq_ckpt.core.unchanged import named
from dsq_ckpt.dcp.nested import parameters_of, placeholder
from dsq_ckpt.errors import LoadFailed

_NOT_OF_A_CLASS = frozenset({
    "params", "param_names", "step", "name", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum",
    "base_momentum",
})
"""Options of groups that schedulers, users and some optimizers set later."""

Lacking = Mapping[str, set[str]]
"""Names that were saved below a key at the top level, and that the object there does not tell on one rank."""


def objects_in(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the objects at the top level of a state dict that have one of their own, but modules, which tell all."""
    return {
        key: value for key, value in given.items()
        if isinstance(value, Stateful) and not isinstance(value, nn.Module)
    }


class Whole:
    """The objects of a state dict that is loaded, as one rank has them.

    Args:
        given: the objects, by key.
        told: a state dict with their state dicts in their places, which get dicts and lists of their own.
        nesting: of the checkpoint.
        tensors: its index of tensors.

    Attributes:
        lacking: what was saved and is not told; of optimizers without what is by the numbers of their own parameters
            and groups, which ranks need not tell each other.
    """

    def __init__(
        self, given: Mapping[Any, Any], told: MutableMapping[Any, Any], nesting: Nesting, tensors: Mapping[str, Any]
    ) -> None:
        self._objects = {str(key): key for key in given}
        self.lacking = {text: set[str]() for text in self._objects}
        self._numbered = {
            text: set[str]() for text, key in self._objects.items() if isinstance(given[key], Optimizer)
        }
        self._given, self._told, self._kept = given, told, list[tuple[dict[Any, Any], dict[Any, Any]]]()
        self._keys: dict[int, dict[str, Any]] = {}
        self._nesting, self._tensors = nesting, tensors
        for key in self._objects.values():
            told[key] = _copied(told[key])
        own = {key: told[key] for key in self._objects.values()}
        values, self._asked = flatten_state_dict(by_parts(own))
        self._no_tensors = {  # None, say, where a tensor was saved
            name for name, value in values.items()
            if name in self._tensors and not isinstance(value, torch.Tensor | ShardedTensor)
        }
        self._filled = {path for path, _ in empty_dicts(own)}  # by the load
        for name, path in self._nesting.items():
            if str(path[0]) in self._objects and name not in self._asked:
                own_numbers = self._numbered.get(str(path[0])) if _is_numbered(path) else None
                (self.lacking[str(path[0])] if own_numbers is None else own_numbers).add(name)

    def complete(self, lacking: Iterable[Lacking], rank: int) -> list[Path]:
        """Add placeholders for what was saved; leave out what an optimizer has in a group and was not saved.

        Args:
            lacking: that of all ranks. What another rank tells, such as a stage of a pipeline, is its own, but for what
                an optimizer has by the numbers of its parameters and groups.
            rank: of this process, of which 0 warns.

        Returns:
            The paths of what was added.

        Raises:
            LoadFailed: an optimizer has fewer parameters than have state, or nothing takes the parts of a tensor.
        """
        everywhere = list(lacking)
        parameters, added = parameters_of(self._given), list[Path]()
        for text, key in self._objects.items():
            names = set[str].intersection(*(one[text] for one in everywhere if text in one))
            optimizer = self._given[key] if isinstance(self._given[key], Optimizer) else None
            if optimizer is not None:
                groups = len(optimizer.param_groups)
                names |= {name for name in self._numbered[text] if not self._is_of_group_from(name, groups)}
            left = self._left(names) if optimizer is None and _has_tensors(self._told[key]) else set()
            if told := sorted(left & self._tensors.keys()):
                warn(
                    f"{named(told)} was saved of '{text}' and is not loaded, since its state_dict() does not name it: "
                    "load into an object that has it, or give an empty dict in place of this one", rank=rank,
                )
            for path in self._nesting.empty or ():
                if path[0] == text and len(path) > 1 and not self._is_below_filled(path):
                    self._put(path, {}, keep=True)
            instead = {name for name in self._no_tensors if self._nesting[name][0] == text}
            for name in sorted(names - left | instead):
                path = self._nesting[name]
                if self._is_below_filled(path):
                    continue
                refuse_parts(name, path, self._nesting)
                value = placeholder(self._tensors[name], path, parameters) if name in self._tensors else None
                if self._put(path, value):
                    added.append(path)
            if optimizer is not None:
                self._warn_of_another_class(text, optimizer, rank)
                self._set_aside(text, key)
        return added

    def put_back(self) -> None:
        """Give parameter groups what was left out of the load."""
        for group, options in self._kept:
            group.update(options)

    def _is_of_group_from(self, name: str, groups: int) -> bool:
        path = self._nesting[name]
        return path[1:2] == ("param_groups",) and type(path[2]) is int and path[2] >= groups

    def _is_below_filled(self, path: Path) -> bool:
        return any(path[:deep] in self._filled for deep in range(1, len(path)))

    def _left(self, names: Iterable[str]) -> set[str]:
        """Return the names of tensors, which an object may lack on purpose, and of what comes after these in lists."""
        tensors = {name for name in names if name in self._tensors}
        ends: dict[Path, int] = {}
        for path in map(self._nesting.__getitem__, tensors):
            for deep, part in enumerate(path):
                if type(part) is int:
                    ends[path[:deep]] = min(part, ends.get(path[:deep], part))
        return tensors | {
            name for name in names
            if any(type(part) is int and part >= ends.get(path[:deep], part + 1)
                   for path in [self._nesting[name]] for deep, part in enumerate(path))
        }

    def _warn_of_another_class(self, text: str, optimizer: Optimizer, rank: int) -> None:
        """Warn if saved groups lack options of an optimizer, and have others, as those of another class have."""
        paths = [path for path in self._nesting.values() if path[:2] == (text, "param_groups") and len(path) > 3]
        saved = {str(path[3]) for path in paths}
        lacking = sorted(optimizer.defaults.keys() - saved)
        foreign = sorted(saved.difference(optimizer.defaults, _NOT_OF_A_CLASS, *optimizer.param_groups))
        if lacking and foreign:
            warn(
                f"what was saved of '{text}' has {named(foreign)} and lacks {named(lacking)} in its groups, so it is "
                f"of another optimizer than {type(optimizer).__name__}: learning rate and weight decay are those "
                "that were saved, and moments may be missing. Leave it out of the load to begin with it as it is",
                rank=rank,
            )

    def _set_aside(self, text: str, key: Any) -> None:
        """Keep options of groups that were not saved out of the load; empty those that were saved as empty dicts."""
        empty = {path for path in self._nesting.empty or () if path[:2] == (text, "param_groups")}
        saved = {path[:4] for path in (*self._nesting.values(), *empty) if path[:2] == (text, "param_groups")}
        groups = {path[:3] for path in saved}
        for path in {path[:4] for path in self._asked.values() if path[:3] in groups}:
            group = self._told[key]["param_groups"][path[2]]
            option = next(own for own in group if str(own) == path[3])
            if path in empty:
                group[option] = {}
            elif path not in saved:
                self._kept.append((group, {option: group.pop(option)}))

    def _put(self, path: Path, value: Any, *, keep: bool = False) -> bool:
        """Set an entry of the state dict, by keys of which the text counts, and return whether that can be.

        It cannot where a value is in the place of one of its dicts or lists, unless that is None. With `keep`, what is
        there stays.
        """
        node: Any = self._told
        steps = self._nesting.steps(path)
        for (step, in_list), following in zip_longest(steps, steps[1:]):
            key: Any = step
            if isinstance(node, list) and in_list:
                node.extend([None] * (key + 1 - len(node)))
            elif isinstance(node, MutableMapping) and not in_list:
                key = self._own_key(node, key)
            else:
                return False
            if following is None:
                if not keep or node[key] is None:
                    node[key] = value
            elif node[key] is None:
                node[key] = [] if following[1] else {}
            node = node[key]
        return True

    def _own_key(self, node: MutableMapping[Any, Any], key: Any) -> Any:
        """Return the key of a dict that has the text of another one; a new one has None."""
        if id(node) not in self._keys:
            self._keys[id(node)] = {str(own): own for own in node}
        found = self._keys[id(node)].setdefault(str(key), key)
        node.setdefault(found, None)
        return found


@contextmanager
def made_states(objects: Mapping[Any, Any], nesting: Nesting) -> Iterator[bool]:
    """Make the state of optimizers that have none and keep tensors of classes of their own, and yield whether any is.

    Only the optimizer can make such tensors, as those of 8 bits of torchao, into whose parts a load then goes. If that
    fails, or the load does, they are as before.

    Raises:
        LoadFailed: a step makes no state.
    """
    states = [path for path in nesting.values() if path[1:2] == ("state",)]
    consisting = {str(path[0]) for path in states if class_in(path, nesting) is not None}
    fresh = [
        value for key, value in objects.items()
        if str(key) in consisting and isinstance(value, Optimizer) and not value.state
    ]
    with ExitStack() as stack:
        for optimizer in fresh:
            stack.enter_context(as_before(optimizer))
            make_state(optimizer)
        yield bool(fresh)


def refuse_parts(name: str, path: Path, names: Container[str]) -> None:
    """Refuse to load what is a part of a tensor of another class than torch's own into what has no such tensor.

    `names` are the flat names of all that was stored.

    Raises:
        LoadFailed: it is one.
    """
    if (deep := class_in(path, names)) is not None:
        raise LoadFailed(
            f"'{name}' is a part of a tensor of the class {path[deep]}, and what is loaded has no "
            "such tensor in its place: make it as it was made when it was saved, or load into an empty dict"
        )


def _is_numbered(path: Path) -> bool:
    """Return whether a path leads to a parameter group, or to the state of a parameter by its number."""
    return path[1:2] == ("param_groups",) or (path[1:2] == ("state",) and str(path[2]).isdecimal())


def _has_tensors(node: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in flatten_state_dict({"": node})[0].values())


def _copied(node: Any) -> Any:
    """Return new dicts and lists with the same values; those of an optimizer's state are in use."""
    if isinstance(node, list):
        return [_copied(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    made = copy.copy(node) if isinstance(node, dict) else dict(node)  # a copy of others may share what they hold
    for key, value in node.items():
        made[key] = _copied(value)
    return made
