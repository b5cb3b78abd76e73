"""What was saved of an optimizer or the like, and one that was just made does not have yet.

Its own state dict is what a load asks for, as in DCP. That lacks what some optimizers keep in their parameter groups
(`step`, `initial_lr`), and what an object has once it was used. Who gives the object means all that was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dsq_ckpt.api.checks import make_state
from dsq_ckpt.core.nesting import Nesting, Path, Step, empty_dicts
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.subclasses import by_parts, is_part
from dsq_ckpt.core.unchanged import named
from dsq_ckpt.dcp.nested import parameters_of, placeholder
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.storage.checkpoint import Checkpoint

Lacking = Mapping[str, set[str]]
"""Names that were saved below a key at the top level, and that the object there does not tell on one rank."""


class Whole:
    """The objects of a state dict that is loaded, as one rank has them; modules do not count, which tell all names.

    Args:
        given: the state dict as the caller gave it.
        told: the same with state dicts in place of objects; its objects get dicts and lists of their own.
        checkpoint: what is loaded.

    Attributes:
        lacking: what was saved and is not told.
    """

    def __init__(self, given: Mapping[Any, Any], told: dict[Any, Any], checkpoint: Checkpoint) -> None:
        self._objects = {
            str(key): key for key, value in given.items()
            if isinstance(value, Stateful) and not isinstance(value, nn.Module)
        }
        self.lacking = {text: set[str]() for text in self._objects}
        self._given, self._told, self._kept = given, told, list[tuple[dict[Any, Any], dict[Any, Any]]]()
        with checkpoint.naming():
            self._nesting = Nesting.from_json(checkpoint.index) or Nesting({})
            self._tensors = checkpoint.index["tensors"]
        told |= {key: _copied(told[key]) for key in self._objects.values()}
        own = {key: told[key] for key in self._objects.values()}
        self._asked = flatten_state_dict(by_parts(own))[1]
        empty = {path for path, _ in empty_dicts(own)} if own else set()
        for name, path in self._nesting.items():
            filled = any(path[:deep] in empty for deep in range(1, len(path)))
            if str(path[0]) in self._objects and name not in self._asked and not filled:
                self.lacking[str(path[0])].add(name)

    def complete(self, lacking: Iterable[Lacking], rank: int) -> list[Path]:
        """Add placeholders for what no rank tells; leave out what an optimizer has in a group and was not saved.

        Args:
            lacking: that of all ranks. What another rank tells, such as a stage of a pipeline, is its own.
            rank: of this process, of which 0 warns.

        Returns:
            The paths of what was added.
        """
        everywhere = list(lacking)
        parameters, added = parameters_of(self._given), list[Path]()
        for text, key in self._objects.items():
            names = set[str].intersection(*(one[text] for one in everywhere if text in one))
            optimizer = isinstance(self._given[key], Optimizer)
            tensors = not optimizer and _has_tensors(self._told[key])
            left = {name for name in names if tensors and name in self._tensors}
            if left:
                warn(
                    f"{named(sorted(left))} was saved of '{text}' and is not loaded, since its state_dict() does not "
                    "name it: load into an object that has it, or give an empty dict in place of this one", rank=rank,
                )
            for name in sorted(names - left):
                path = self._nesting[name]
                refuse_parts(name, path)
                value = placeholder(self._tensors[name], path, parameters) if name in self._tensors else None
                if _put(self._told, self._nesting.steps(path), value):
                    added.append(path)
            if optimizer:
                self._set_aside(key)
        return added

    def _set_aside(self, key: Any) -> None:
        saved = {path[:4] for path in self._nesting.values() if path[:2] == (str(key), "param_groups")}
        groups = {path[:3] for path in saved}
        for path in {path[:4] for path in self._asked.values() if path[:3] in groups} - saved:
            group = self._told[key]["param_groups"][path[2]]
            option = next(own for own in group if str(own) == path[3])
            self._kept.append((group, {option: group.pop(option)}))

    def put_back(self) -> None:
        """Give parameter groups what was left out of the load."""
        for group, options in self._kept:
            group.update(options)


@contextmanager
def made_states(given: Mapping[Any, Any], checkpoint: Checkpoint) -> Iterator[bool]:
    """Make the state of optimizers that have none and keep tensors of classes of their own, and yield whether any is.

    Only the optimizer can make such tensors, as those of 8 bits of torchao, into whose parts a load then goes. If that
    fails, it has none again.

    Raises:
        LoadFailed: a step makes no state.
    """
    with checkpoint.naming():
        paths = (Nesting.from_json(checkpoint.index) or Nesting({})).values()
        consisting = {str(path[0]) for path in paths if path[1:2] == ("state",) and any(map(is_part, path))}
    fresh = [
        value for key, value in given.items()
        if str(key) in consisting and isinstance(value, Optimizer) and not value.state
    ]
    try:
        for optimizer in fresh:
            make_state(optimizer)
        yield bool(fresh)
    except BaseException:
        for optimizer in fresh:
            optimizer.state.clear()
        raise


def refuse_parts(name: str, path: Path) -> None:
    """Refuse to load what is a part of a tensor of another class than torch's own into what has no such tensor.

    Raises:
        LoadFailed: it is one.
    """
    if any(map(is_part, path)):
        raise LoadFailed(
            f"'{name}' is a part of a tensor of the class {next(filter(is_part, path))}, and what is loaded has no "
            "such tensor in its place: make it as it was made when it was saved, or load into an empty dict"
        )


def _has_tensors(node: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in flatten_state_dict({"": node})[0].values())


def _copied(node: Any) -> Any:
    """Return new dicts and lists with the same values; those of an optimizer's state are in use."""
    if isinstance(node, list):
        return [_copied(value) for value in node]
    if not isinstance(node, MutableMapping):
        return node
    made = copy.copy(node)
    for key, value in node.items():
        made[key] = _copied(value)
    return made


def _put(node: Any, steps: list[Step], value: Any) -> bool:
    """Set an entry of a nested state dict, by keys of which the text counts, and return whether that can be.

    It cannot where a value is in the place of one of its dicts or lists, unless that is None.
    """
    for (step, in_list), following in zip_longest(steps, steps[1:]):
        key: Any = step
        if isinstance(node, list) and in_list:
            node.extend([None] * (key + 1 - len(node)))
        elif isinstance(node, MutableMapping) and not in_list:
            key = next((own for own in node if str(own) == str(key)), key)
            node.setdefault(key, None)
        else:
            return False
        if following is None:
            node[key] = value
        elif node[key] is None:
            node[key] = [] if following[1] else {}
        node = node[key]
    return True
