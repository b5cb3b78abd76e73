"""Plain data: what torch unpickles without running code of whoever pickled it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, float, str, bytes)


def obstacle(value: Any) -> Exception | None:
    """Return why a value cannot be stored and loaded by `torch.load(weights_only=True)`, or None.

    Classes that the program allowed by `torch.serialization.add_safe_globals` count as plain data.
    """
    if type(value) in _PLAIN:
        return None
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        return error
    return None


def with_plain_numbers(value: Any) -> Any:
    """Return a value with plain numbers in place of NumPy's, such as a learning rate.

    Theirs would be more than plain data, which no load into an empty dict unpickles.
    """
    if isinstance(value, np.bool_ | np.integer | np.floating) and not isinstance(value, np.longdouble):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(with_plain_numbers, value))
    return {key: with_plain_numbers(one) for key, one in value.items()} if type(value) is dict else value
