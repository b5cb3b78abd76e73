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
