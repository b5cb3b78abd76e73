"""Conversion of planner data in DCP's metadata to and from JSON, for the index of a checkpoint."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection
from typing import Any

from dsq_ckpt.core.nesting import Nesting


class NotPlainData(Exception):
    """A value is no plain data; the text names its type."""


def planner_data_to_json(planner_data: Any, names: Collection[str]) -> tuple[dict[str, Any], str | None]:
    """Return the keys of the index that hold planner data, and the reason if it is omitted, else None.

    DCP's own planners keep the path of each saved name in the nested state dict, which has its own key in the index.
    Other plain data is stored in another key.
    """
    if isinstance(planner_data, dict) and planner_data.keys() >= set(names):
        if isinstance(planner_data, Nesting):
            return planner_data.as_json(), None
        paths = type(planner_data) is dict and all(map(_is_path, planner_data.items()))
        if paths and len(set(planner_data.values())) == len(planner_data):
            return Nesting(planner_data).as_json(), None
    unknown: dict[str, Any] = {"planner": None, "typed_keys": [], "tuple_keys": [], "empty_dicts": None}
    if planner_data is None:
        return unknown, None
    try:
        return {**unknown, "planner_data": encode(planner_data)}, None
    except NotPlainData as error:
        return unknown, str(error)
    except RecursionError:
        return unknown, "it is nested too deeply"


def _is_path(entry: tuple[Any, Any]) -> bool:
    name, path = entry
    return (
        type(name) is str and type(path) is tuple and bool(path) and all(type(part) in (str, int) for part in path)
    )


def encode(value: Any) -> Any:
    """Return plain data as JSON; a value of a type that JSON lacks becomes an object with the type's name as its key.

    Raises:
        NotPlainData: it has other values than None, booleans, numbers, strings, bytes, lists, tuples and dicts.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [encode(entry) for entry in value]
    if kind is tuple:
        return {"tuple": [encode(entry) for entry in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(entry)] for key, entry in value.items()]}
    raise NotPlainData(f"a {kind.__module__}.{kind.__qualname__} is in it")


def decode(tree: Any) -> Any:
    """Return the value that `encoded` was given.

    Raises:
        TypeError, KeyError: it is not as documented.
    """
    try:
        return _decode_tree(tree)
    except ValueError as error:
        raise TypeError(f"planner_data: {error}") from error


def _decode_tree(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_decode_tree(entry) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    (kind, content), = tree.items()
    if kind == "tuple":
        return tuple(_decode_tree(entry) for entry in content)
    if kind == "dict":
        return {_decode_tree(key): _decode_tree(entry) for key, entry in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "float":
        return float(content)
    raise KeyError(kind)
