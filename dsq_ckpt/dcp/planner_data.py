"""Planner data of DCP's metadata, as JSON for the index of a checkpoint."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection
from typing import Any

from dsq_ckpt.core.nesting import Nesting


class NotPlain(Exception):
    """Raised for a value that is no plain data; the text names its type."""


def planner_json(planner_data: Any, names: Collection[str]) -> tuple[dict[str, Any], str | None]:
    """Return the keys of the index that hold planner data, and why it is left out (None where it is not).

    DCP's own planners keep the path to each of the names that are saved in the nested state dict, which has a key of
    its own; any other plain data is stored beside it.
    """
    if isinstance(planner_data, dict) and planner_data.keys() >= set(names):
        if isinstance(planner_data, Nesting):
            return planner_data.as_json(), None
        paths = type(planner_data) is dict and all(map(_is_path, planner_data.items()))
        if paths and len(set(planner_data.values())) == len(planner_data):
            return Nesting(planner_data).as_json(), None
    unknown: dict[str, Any] = {"planner": None, "typed_keys": [], "empty_dicts": None}
    if planner_data is None:
        return unknown, None
    try:
        return {**unknown, "planner_data": encoded(planner_data)}, None
    except NotPlain as error:
        return unknown, str(error)
    except RecursionError:
        return unknown, "it is nested too deeply"


def _is_path(entry: tuple[Any, Any]) -> bool:
    name, path = entry
    return (
        type(name) is str and type(path) is tuple and bool(path) and all(type(part) in (str, int) for part in path)
    )


def encoded(value: Any) -> Any:
    """Return plain data as JSON; a type that JSON lacks becomes an object with one key, the name of the type.

    Raises:
        NotPlain: it is more than None, booleans, numbers, strings, bytes, and lists, tuples and dicts of these.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [encoded(entry) for entry in value]
    if kind is tuple:
        return {"tuple": [encoded(entry) for entry in value]}
    if kind is dict:
        return {"dict": [[encoded(key), encoded(entry)] for key, entry in value.items()]}
    raise NotPlain(f"a {kind.__module__}.{kind.__qualname__} is in it")


def decoded(tree: Any) -> Any:
    """Return the value that `encoded` was given.

    Raises:
        TypeError, KeyError: it is not as documented.
    """
    try:
        return _decoded(tree)
    except ValueError as error:
        raise TypeError(f"planner_data: {error}") from error


def _decoded(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_decoded(entry) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    (kind, content), = tree.items()
    if kind == "tuple":
        return tuple(_decoded(entry) for entry in content)
    if kind == "dict":
        return {_decoded(key): _decoded(entry) for key, entry in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "float":
        return float(content)
    raise KeyError(kind)
