"""Nesting of state dicts: conversion between nested state dicts and flat names without loss.

DCP names an entry of a state dict by the path of keys that leads to it. It converts all keys to strings, also the
numbers of parameters in a plain `optimizer.state_dict()`, and drops empty dicts. A `Nesting` keeps both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from dsq_ckpt.errors import LoadFailed

Path = tuple[str | int, ...]
"""Keys of dicts as strings, and indices of lists as integers."""
Step = tuple[Hashable, bool]
"""The original key of a dict, or an index of a list; and whether it is an index."""
Place = str | tuple[str, tuple[int, ...]]
"""A flat name; for a shard of a distributed tensor, with its offsets."""


class Nesting(dict[str, Path]):
    """DCP's path of each flat name, with the original keys and the empty dicts that paths do not contain.

    Attributes:
        typed: original keys of dicts, by path of the entry: finite numbers, booleans, None, and tuples of these and of
            strings; with `all_keys` of `of`, all keys that are not strings.
        empty: paths of dicts without entries; None: not known.
        digests: digests of values that must be equal on all ranks, by place.
        groups: names of the parameters in each group of an optimizer, by flat name of the list; in a global plan, with
            those of other ranks if this rank writes the list.
    """

    digests: Mapping[Place, int]
    groups: Mapping[str, list[str]]

    def __init__(
        self, paths: Mapping[str, Path], typed: Mapping[Path, Hashable] | None = None,
        empty: Collection[Path] | None = None,
    ) -> None:
        super().__init__(paths)
        self.typed = dict(typed or {})
        self.empty = None if empty is None else list(empty)
        self.digests, self.groups = {}, {}

    @classmethod
    def of(cls, state: Mapping[str, Any], paths: Mapping[str, Path], *, all_keys: bool = False) -> Nesting:
        """Return the nesting of a state dict with DCP's flat names; `all_keys` keeps keys that no index can store."""
        entries = list(_iter_entries((), state))
        typed: dict[Path, Hashable] = {}
        for path, key, _ in entries:
            if type(key) is str:
                continue
            if all_keys:
                typed[path] = key
            elif (plain := _to_plain_key(key)) is not None or key is None:
                typed[path] = plain
        return cls(paths, typed, [path for path, _, value in entries if isinstance(value, Mapping) and not value])

    @classmethod
    def merged(cls, paths: Mapping[str, Path], parts: Iterable[Nesting]) -> Nesting:
        """Return the union of the nestings of all ranks.

        Args:
            paths: paths of all ranks, by flat name.
            parts: nesting of each rank; empty dicts are known if at least one rank knows its own.
        """
        typed: dict[Path, Hashable] = {}
        empty: dict[Path, None] | None = None
        for nesting in parts:
            typed |= nesting.typed
            if nesting.empty is not None:
                empty = (empty or {}) | dict.fromkeys(nesting.empty)
        return cls(paths, typed, empty)

    @classmethod
    def from_json(cls, index: Mapping[str, Any]) -> Nesting | None:
        """Return the nesting from an index, or None if the planner stored no paths.

        Raises:
            KeyError, IndexError, TypeError: the index does not have the documented form.
        """
        if index["planner"] is None:
            return None
        empty = index.get("empty_dicts")
        return cls(
            {name: tuple(path) for name, path in index["planner"].items()},
            {tuple(entry[0]): entry[1] for entry in index.get("typed_keys") or ()}
            | {tuple(entry[0]): tuple(entry[1]) for entry in index.get("tuple_keys") or ()},
            None if empty is None else [tuple(path) for path in empty],
        )

    def list_unkept_keys(self, state: Mapping[str, Any]) -> list[tuple[Path, Any]]:
        """Return paths and keys of the state dict that are converted to strings, such as sets."""
        return [
            (path, key) for path, key, _ in _iter_entries((), state)
            if not isinstance(key, str) and path not in self.typed
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the keys of the index that `from_json` reads."""
        tuples = {path: key for path, key in self.typed.items() if isinstance(key, tuple)}
        return {
            "planner": {name: list(path) for name, path in self.items()},
            "typed_keys": [[list(path), key] for path, key in self.typed.items() if path not in tuples],
            "tuple_keys": [[list(path), list(key)] for path, key in tuples.items()],
            "empty_dicts": None if self.empty is None else [list(path) for path in self.empty],
        }

    def steps(self, path: Path) -> list[Step]:
        """Return a path with the original keys of the saved state dict."""
        return [
            (self.typed.get(path[: index + 1], key), type(key) is int) for index, key in enumerate(path)
        ]

    def unflatten(self, flat: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the nested state dict of flat names and values, in their order, with new dicts and lists.

        Raises:
            KeyError: a name has no path.
            LoadFailed: a name is a value and also a prefix of others, as when ranks use a name differently.
        """
        inner = {self[name][:end]: name for name in flat for end in range(1, len(self[name]))}
        for name in flat:
            if self[name] in inner:
                raise LoadFailed(
                    f"'{name}' and '{inner[self[name]]}' cannot both be in one state dict; name in the state dict "
                    "which of them is to be loaded"
                )
        root: dict[Any, Any] = {}
        for name, value in flat.items():
            set_entry(root, self.steps(self[name]), value)
        for path in self.empty or ():
            set_entry(root, self.steps(path), {}, keep=True)
        return root

    def unnamed_entries(self, state: Mapping[Any, Any]) -> list[Path]:
        """Return the paths of saved entries without a key in a nested dict that has other keys.

        Args:
            state: a state dict to load into. The keys at its top level are not compared.
        """
        top_keys, saved = set(map(str, state)), dict[Path, dict[str, Path]]()
        for path in (*self.values(), *(self.empty or ())):
            for depth in range(1, len(path) if path and path[0] in top_keys else 0):
                if isinstance(key := path[depth], str):
                    saved.setdefault(path[:depth], {})[key] = path[: depth + 1]
        unnamed = list[Path]()
        for parent, _, node in _iter_entries((), state):
            if isinstance(node, Mapping) and node and parent in saved:
                keys = set(map(str, node))
                unnamed += [path for key, path in saved[parent].items() if key not in keys]
        return unnamed

    def below(self, path: Path) -> Nesting | None:
        """Return the nesting below a path, or None if there is nothing, not even an empty dict."""
        depth = len(path)
        nesting = Nesting(
            {name: steps[depth:] for name, steps in self.items() if steps[:depth] == path and len(steps) > depth},
            {steps[depth:]: key for steps, key in self.typed.items() if steps[:depth] == path and len(steps) > depth},
            [steps[depth:] for steps in self.empty or () if steps[:depth] == path and len(steps) > depth],
        )
        return nesting if nesting or nesting.empty or path in (self.empty or ()) else None


def _to_plain_key(key: Any) -> int | float | tuple[str | int | float | None, ...] | None:
    """Return the number, or the tuple of numbers, strings and None, that has the text of a key; else None."""
    if type(key) is not tuple:
        return _to_plain_number(key)
    parts = tuple(part if type(part) is str else _to_plain_number(part) for part in key)
    return parts if str(parts) == str(key) else None


def _to_plain_number(key: Any) -> int | float | None:
    """Return the Python int, float or bool that equals a key, for JSON; None if the key is not a finite number.

    Numbers of other classes, such as NumPy's or members of an `IntEnum`, count if they have the same text, which DCP
    uses in names.
    """
    if isinstance(key, bool):
        return key
    if not isinstance(key, Integral | Real) or not math.isfinite(key):
        return None
    number = int(key) if isinstance(key, Integral) else float(key)
    return number if number == key and str(number) == str(key) else None


def set_entry(root: dict[Any, Any], steps: list[Step], value: Any, *, keep: bool = False) -> None:
    """Set an entry of a nested state dict, and create missing dicts and lists on the path.

    Args:
        root: the state dict.
        steps: path of the entry.
        value: the new value.
        keep: keep an existing value.
    """
    node: Any = root
    for (key, _), (_, inner_is_list) in pairwise(steps):
        node = _get_or_set(node, key, [] if inner_is_list else {})
    key, in_list = steps[-1]
    if keep:
        _get_or_set(node, key, value)
    else:
        if in_list and isinstance(node, list):
            node.extend([None] * (key + 1 - len(node)))  # type: ignore[operator]
        node[key] = value


def empty_dicts(state: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield dicts without entries and their paths, including the state dict itself."""
    if not state:
        yield (), state
    for path, _, value in _iter_entries((), state):
        if isinstance(value, Mapping) and not value:
            yield path, value


def list_lengths(paths: Mapping[str, Path]) -> dict[Path, int]:
    """Return the lengths of lists, by their paths."""
    lengths: dict[Path, int] = {}
    for path in paths.values():
        for depth, key in enumerate(path):
            if type(key) is int:
                lengths[path[:depth]] = max(lengths.get(path[:depth], 0), key + 1)
    return lengths


def restore_parameter_numbers(node: Any, filled: Collection[int]) -> None:
    """Convert the keys of an optimizer's `state` back to numbers, if DCP's planner has converted them to strings.

    The numbers are those in `param_groups`; an optimizer would ignore strings.

    Args:
        node: a nested state dict, changed in place.
        filled: ids of the dicts that a load has filled with all stored entries; only a `state` in these is changed.
    """
    if id(node) in filled:
        filled = {*filled, *map(id, node.values() if isinstance(node, Mapping) else node)}
    if isinstance(node, Mapping):
        state, groups = node.get("state"), node.get("param_groups")
        if isinstance(state, MutableMapping) and id(state) in filled and _has_numbered_parameters(groups):
            entries = [(int(key) if isinstance(key, str) and key.isdecimal() else key, state[key]) for key in state]
            state.clear()
            state.update(entries)
    for value in node.values() if isinstance(node, Mapping) else node:
        if isinstance(value, Mapping | list):
            restore_parameter_numbers(value, filled)


def _has_numbered_parameters(groups: Any) -> bool:
    if not isinstance(groups, list | tuple):
        return False
    lists = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    return any(lists) and all(
        isinstance(keys, list | tuple) and all(type(key) is int for key in keys) for keys in lists
    )


def _get_or_set(node: Any, key: Any, default: Any) -> Any:
    """Return the entry of a dict or list; set it to `default` if it is missing."""
    if isinstance(node, list):
        node.extend([None] * (key + 1 - len(node)))
        if node[key] is None:
            node[key] = default
        return node[key]
    return node.setdefault(key, default)


def _iter_entries(path: Path, node: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Yield path, key and value of all entries of nested dicts, and of the dicts and lists in lists."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            inner = (*path, str(key))
            yield inner, key, value
            yield from _iter_entries(inner, value)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            if isinstance(value, Mapping | list):
                yield (*path, index), str(index), value
                yield from _iter_entries((*path, index), value)
