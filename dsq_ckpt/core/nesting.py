"""Nested state dicts: their flat names, what these leave out, and how they are put together again.

DCP names what a state dict holds by the path of keys that leads to it. It makes strings of all keys, also of the
numbers by which a plain `optimizer.state_dict()` knows its parameters, and dicts without entries leave no trace. A
`Nesting` has both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from dsq_ckpt.errors import LoadFailed

Path = tuple[str | int, ...]
"""Keys of dicts as strings, and places in lists as integers."""
Step = tuple[Hashable, bool]
"""A key of a dict as it was, or a place in a list; and whether it is the latter."""
Place = str | tuple[str, tuple[int, ...]]
"""A flat name; of a part of a distributed tensor, with its offsets."""


class Nesting(dict[str, Path]):
    """DCP's path by flat name, as its planners keep them, with what such paths leave out.

    Attributes:
        typed: by path of a dict's entry: its key, where that was a finite number, a boolean or None; or all that are no
            strings (`of`).
        empty: paths of dicts without entries; None: not known.
        digests: of values by which ranks are compared, by place.
        groups: names of the parameters in each group of an optimizer, by flat name of the list; in a global plan with
            those of other ranks, where this one writes the list.
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
        """Return the nesting of a state dict with DCP's flat names; `all_keys` adds keys that an index cannot hold."""
        found = list(_dicts((), state))
        typed: dict[Path, Hashable] = {}
        for path, key, _ in found:
            if all_keys and type(key) is not str:
                typed[path] = key
            elif (own := _plain(key)) is not None or key is None:
                typed[path] = own
        return cls(paths, typed, [path for path, _, value in found if isinstance(value, Mapping) and not value])

    @classmethod
    def merged(cls, paths: Mapping[str, Path], parts: Iterable[Nesting]) -> Nesting:
        """Return the union of the nestings of all ranks.

        Args:
            paths: paths of all ranks.
            parts: nesting of each rank; empty dicts are known if one rank has them.
        """
        typed: dict[Path, Hashable] = {}
        empty: dict[Path, None] | None = None
        for part in parts:
            typed |= part.typed
            if part.empty is not None:
                empty = (empty or {}) | dict.fromkeys(part.empty)
        return cls(paths, typed, empty)

    @classmethod
    def from_json(cls, index: Mapping[str, Any]) -> Nesting | None:
        """Return the nesting of an index, or None if the planner kept no paths.

        Raises:
            KeyError, IndexError, TypeError: it is not as documented.
        """
        if index["planner"] is None:
            return None
        empty = index.get("empty_dicts")
        return cls(
            {name: tuple(path) for name, path in index["planner"].items()},
            {tuple(entry[0]): entry[1] for entry in index.get("typed_keys") or ()},
            None if empty is None else [tuple(path) for path in empty],
        )

    def become_strings(self, state: Mapping[str, Any]) -> list[tuple[Path, Any]]:
        """Return paths and keys of the state dict that neither are strings nor are kept, such as tuples."""
        return [
            (path, key) for path, key, _ in _dicts((), state) if not isinstance(key, str) and path not in self.typed
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the keys of the index that `from_json` reads."""
        return {
            "planner": {name: list(path) for name, path in self.items()},
            "typed_keys": [[list(path), key] for path, key in self.typed.items()],
            "empty_dicts": None if self.empty is None else [list(path) for path in self.empty],
        }

    def steps(self, path: Path) -> list[Step]:
        """Return a path with the keys of the saved state dict."""
        found: list[Step] = []
        for place, part in enumerate(path):
            found.append((self.typed.get(path[: place + 1], part), type(part) is int))
        return found

    def nested(self, flat: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the nested state dict of flat names and values, in their order; every dict is new.

        Raises:
            KeyError: a name has no path.
            LoadFailed: one name is a value where others are below it, as where ranks have different things of one name.
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
            put(root, self.steps(self[name]), value)
        for path in self.empty or ():
            put(root, self.steps(path), {}, keep=True)
        return root

    def below(self, path: Path) -> Nesting | None:
        """Return the nesting below a path, or None if nothing lies there, not even an empty dict."""
        deep = len(path)
        found = Nesting(
            {name: own[deep:] for name, own in self.items() if own[:deep] == path and len(own) > deep},
            {own[deep:]: key for own, key in self.typed.items() if own[:deep] == path and len(own) > deep},
            [own[deep:] for own in self.empty or () if own[:deep] == path and len(own) > deep],
        )
        return found if found or found.empty or path in (self.empty or ()) else None


def _plain(key: Any) -> int | float | None:
    """Return a key that is a finite number as an equal one of Python's own classes, as JSON has it; None: it is none.

    Others are those of NumPy, and members of an `IntEnum`, as far as they have the same text, by which DCP names them.
    """
    if isinstance(key, bool):
        return key
    if not isinstance(key, Integral | Real) or not math.isfinite(key):
        return None
    found = int(key) if isinstance(key, Integral) else float(key)
    return found if found == key and str(found) == str(key) else None


def put(root: dict[Any, Any], steps: list[Step], value: Any, *, keep: bool = False) -> None:
    """Set an entry of a nested state dict; dicts and lists on the way are made where they are not there.

    Args:
        root: the state dict.
        steps: the way to the entry.
        value: what to put there.
        keep: what is there stays.
    """
    node: Any = root
    for (key, _), (_, inner_is_list) in pairwise(steps):
        node = _entry(node, key, [] if inner_is_list else {})
    key, in_list = steps[-1]
    if keep:
        _entry(node, key, value)
    else:
        if in_list and isinstance(node, list):
            node.extend([None] * (key + 1 - len(node)))  # type: ignore[operator]
        node[key] = value


def empty_dicts(state: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Return dicts without entries, with their paths, including the state dict itself if it has none."""
    if not state:
        yield (), state
    yield from ((path, value) for path, _, value in _dicts((), state) if isinstance(value, Mapping) and not value)


def list_lengths(paths: Mapping[str, Path]) -> dict[Path, int]:
    """Return the lengths of lists, by their paths."""
    found: dict[Path, int] = {}
    for path in paths.values():
        for deep, part in enumerate(path):
            if type(part) is int:
                found[path[:deep]] = max(found.get(path[:deep], 0), part + 1)
    return found


def number_parameters(node: Any, filled: Collection[int]) -> None:
    """Make numbers of the strings that DCP's own planner makes of an optimizer's parameters in `state`.

    A state dict with numbers in its `param_groups` has them there, and an optimizer leaves strings aside.

    Args:
        node: a nested state dict, changed in place.
        filled: ids of the dicts whose entries were not named by the caller, in or above which a `state` is.
    """
    if id(node) in filled:
        filled = {*filled, *map(id, node.values() if isinstance(node, Mapping) else node)}
    if isinstance(node, Mapping):
        state, groups = node.get("state"), node.get("param_groups")
        if isinstance(state, MutableMapping) and id(state) in filled and _numbers_parameters(groups):
            entries = [(int(key) if isinstance(key, str) and key.isdecimal() else key, state[key]) for key in state]
            state.clear()
            state.update(entries)
    for value in node.values() if isinstance(node, Mapping) else node:
        if isinstance(value, Mapping | list):
            number_parameters(value, filled)


def _numbers_parameters(groups: Any) -> bool:
    if not isinstance(groups, list | tuple):
        return False
    known = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    return any(known) and all(isinstance(own, list | tuple) and all(type(one) is int for one in own) for own in known)


def _entry(node: Any, key: Any, otherwise: Any) -> Any:
    """Return the entry of a dict or list; put `otherwise` there if there is none."""
    if isinstance(node, list):
        node.extend([None] * (key + 1 - len(node)))
        if node[key] is None:
            node[key] = otherwise
        return node[key]
    return node.setdefault(key, otherwise)


def _dicts(path: Path, node: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Yield all entries of dicts, also of dicts in lists, and dicts in lists: path, key (of a dict), value."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            inner = (*path, str(key))
            yield inner, key, value
            yield from _dicts(inner, value)
    elif isinstance(node, list):
        for place, value in enumerate(node):
            if isinstance(value, Mapping | list):
                yield (*path, place), str(place), value
                yield from _dicts((*path, place), value)
