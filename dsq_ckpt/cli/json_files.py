"""JSON files of measurements, with one row of a table per line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsq_ckpt.storage.atomic_io import create_file

_LINE_WIDTH = 120  # characters; a table that fits into a line is not split


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document atomically.

    Args:
        path: file to write. Its directory is created if it does not exist.
        document: JSON values with string keys. NaN and infinities become null.
    """
    content = dumps(document).encode()
    with create_file(path) as stream:
        stream.write(content)


def dumps(document: Mapping[str, Any]) -> str:
    """Return JSON text with one line for each key, and for each row of a table.

    A table is a list or an object whose values are lists and objects, the rows.
    """
    return _text(replace_nonfinite(document), "", whole=True) + "\n"


def replace_nonfinite(value: Any) -> Any:
    """Return JSON values with None for NaN and infinities, and strings for keys."""
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _text(value: Any, indent: str, whole: bool = False) -> str:
    line = json.dumps(value, allow_nan=False)
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    table = bool(parts) and all(isinstance(part, dict | list) for part in parts)
    if not whole and (not table or len(line) + len(indent) <= _LINE_WIDTH):
        return line
    inner = indent + " "
    lines = [_text(part, inner) for part in parts]
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {text}" for key, text in zip(value, lines, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"
