"""Flat names of the entries of a state dict, which DCP makes of the keys, and an error for two entries of one name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dsq_ckpt.core.nesting import Path
from dsq_ckpt.errors import ConfigError


def flatten(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return values and paths by flat name, as `flatten_state_dict` of DCP.

    Raises:
        ConfigError: two entries have the same name.
    """
    try:
        return flatten_state_dict(state)
    except ValueError as error:
        name = str(error).removeprefix("duplicated flatten key ")
        same_name = (keys for keys in _iter_keys((), state) if ".".join(map(str, keys)) == name)
        pair = ["".join(f"[{key!r}]" for key in keys) for keys in islice(same_name, 2)]
        if len(pair) < 2:
            raise
        raise ConfigError(
            f"{pair[0]} and {pair[1]} of the state dict have the same name in a checkpoint, '{name}', which has the "
            "text of all keys with dots between: rename a key of one of them"
        ) from error


def _iter_keys(keys: tuple[Any, ...], node: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the original keys that lead to each value that is not a dict."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _iter_keys((*keys, key), value)
        return
    yield keys
    for index, value in enumerate(node if isinstance(node, list) else ()):
        yield from _iter_keys((*keys, index), value)
