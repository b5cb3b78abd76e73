"""JSON from untrusted files."""

from __future__ import annotations

import json
from typing import Any


def parse_strict_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text does not parse, is nested too deeply, or has NaN or Infinity, which Python would accept.
    """

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def make_unique_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of keys and values.

    Raises:
        ValueError: a key occurs twice.
    """
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"the key '{key}' is there twice in one mapping; keep one of them")
        tree[key] = value
    return tree
