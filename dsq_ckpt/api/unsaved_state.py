"""State of an optimizer's parameters that a checkpoint lacks; a load removes it, as `load_state_dict` of torch does.

The optimizer has it if its options differ from the saved ones (`amsgrad`), or if it appears late and a run is set back.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.nesting import Nesting, Path
from dsq_ckpt.core.notices import warn


def find_unsaved_keys(state: Collection[Any], saved_keys: Collection[str]) -> list[Any]:
    """Return the keys of a parameter's state that were not saved; none if no key fits the saved ones.

    The load then raises the error that names the missing keys.
    """
    unsaved = [key for key in state if str(key) not in saved_keys]
    return [] if saved_keys and len(unsaved) == len(state) else unsaved


def remove_unsaved_state(key: str, state: MutableMapping[Any, Any], nesting: Nesting) -> list[str]:
    """Remove unsaved entries from the state of an optimizer with numbers of parameters as keys, at any depth.

    Args:
        key: key of the optimizer at the top level of the checkpoint.
        state: its `state`, changed in place.
        nesting: nesting of the checkpoint.

    Returns:
        The flat names of the entries of parameters that have other saved state.
    """
    objects = {path for path in nesting.values() if path[:2] == (key, "state")}
    empty = {path for path in nesting.empty or () if path[:2] == (key, "state")}
    saved = {path[:depth] for path in objects | empty for depth in range(2, len(path) + 1)}
    keys: dict[str, set[str]] = {str(path[2]): set() for path in saved if len(path) > 2}
    for path in saved:
        if len(path) > 3:
            keys[str(path[2])].add(str(path[3]))
    if not saved or (keys and not any(number.isdecimal() for number in keys)):  # not saved, or by names
        return []
    unsaved = list[str]()
    for number, entries in list(state.items()):
        if not isinstance(entries, MutableMapping):
            continue
        saved_keys = keys.get(str(number), set())
        unsaved_keys = find_unsaved_keys(entries, saved_keys)
        if unsaved_keys or saved_keys.issuperset(map(str, entries)):
            _remove_unsaved(entries, (key, "state", str(number)), saved, objects)
        if saved_keys:
            unsaved += [f"{key}.state.{number}.{own_key}" for own_key in unsaved_keys]
        if str(number) not in keys:
            del state[number]
    return unsaved


def _remove_unsaved(node: Any, path: Path, saved: Collection[Path], objects: Collection[Path]) -> None:
    """Remove unsaved entries of a dict or list; a dict or list that was saved as one object becomes None."""
    entries = list(enumerate(node) if isinstance(node, list) else node.items())
    for key, value in reversed(entries):
        inner = (*path, key if isinstance(node, list) else str(key))
        if inner not in saved:
            del node[key]
        elif isinstance(value, MutableMapping | list) and inner in objects:
            node[key] = None
        elif isinstance(value, MutableMapping | list):
            _remove_unsaved(value, inner, saved, objects)


def warn_of_unsaved_state(names: list[str], rank: int) -> None:
    """Warn of the entries that a load removes; `names` are flat names."""
    if names:
        warn(
            f"{quote(names)} is not in the checkpoint, which has other state of the same parameters: the optimizer "
            "goes on without, as after load_state_dict of torch", rank=rank,
        )
