"""Conversion of hyperparameters and states of schedulers to and from JSON, without pickle.

JSON has no tuples, keys other than strings, bytes, tensors or non-finite numbers. Each of these becomes an object with
one key that begins with a dollar sign.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dsq_ckpt.core.aliases import flat_bytes
from dsq_ckpt.errors import ConfigError, CorruptCheckpoint
from dsq_ckpt.storage.record_fields import parse_dtype

_MAX_TENSOR_BYTES = 1 << 20
_DICTS: dict[str, Callable[[dict[Any, Any]], Any]] = {"$dict": dict, "$counter": Counter, "$ordered": OrderedDict}


class NotLoggable(ConfigError):
    """Raised for state that a log cannot hold. While training runs it ends the log, not training."""


def to_plain(value: Any, label: str) -> Any:
    """Convert a value to JSON data, from which `from_plain` restores the same value.

    Args:
        value: None, numbers, strings, bytes, lists, tuples, dicts, and tensors and arrays of up to 1 MiB.
        label: name of the value in error messages.

    Raises:
        NotLoggable: the value holds an object of another type or a larger tensor; the message says where.
    """
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return to_plain(value.item(), label)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        items = [to_plain(item, f"{label}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _dict_to_plain(value, label)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"$array": to_plain(torch.from_numpy(np.ascontiguousarray(value)), label)}
    if isinstance(value, torch.Tensor):
        return _tensor_to_plain(value, label)
    raise NotLoggable(
        f"{label} is a {type(value).__name__}, which cannot be written into the log: it takes numbers, strings, lists, "
        "tuples, dicts and small tensors; leave it out of state_dict(), or keep it in a checkpoint of your own"
    )


def from_plain(value: Any) -> Any:
    """Restore a value from the result of `to_plain`.

    Raises:
        CorruptCheckpoint: the data is not a result of `to_plain`.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: from_plain(item) for key, item in value.items()}
    try:
        inner = value[tag]
        if tag == "$tuple":
            return tuple(from_plain(inner))
        if tag in _DICTS:
            return _DICTS[tag]({from_plain(key): from_plain(item) for key, item in inner})
        if tag == "$float":
            return float(inner)
        if tag == "$bytes":
            return base64.b64decode(inner, validate=True)
        if tag == "$array":
            return from_plain(inner).numpy()
        if tag == "$tensor":
            dtype, shape, data = inner
            raw = bytearray(base64.b64decode(data, validate=True))
            flat = torch.frombuffer(raw, dtype=parse_dtype(dtype)) if raw else torch.empty(0, dtype=parse_dtype(dtype))
            return flat.reshape(shape)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CorruptCheckpoint(f"plain data does not parse: {error}") from error
    raise CorruptCheckpoint(f"plain data has {tag!r}, which this version does not know")


def _dict_to_plain(value: Mapping[Any, Any], label: str) -> Any:
    tag = {Counter: "$counter", OrderedDict: "$ordered"}.get(type(value))
    if tag is None and all(isinstance(key, str) for key in value) and not next(iter(value), "").startswith("$"):
        return {key: to_plain(item, f"{label}.{key}") for key, item in value.items()}
    pairs = [
        [to_plain(key, f"a key of {label}"), to_plain(item, f"{label}.{key}")] for key, item in value.items()
    ]
    return {tag or "$dict": pairs}


def _tensor_to_plain(value: torch.Tensor, label: str) -> Any:
    if value.nbytes > _MAX_TENSOR_BYTES:
        raise NotLoggable(
            f"{label} is a tensor of {value.nbytes} bytes; within lists, dicts or what is logged with every step it "
            f"may have {_MAX_TENSOR_BYTES}: make it a buffer of the model, or keep it in a checkpoint of your own"
        )
    raw = flat_bytes(value.detach().cpu().contiguous()).numpy().tobytes() if value.numel() else b""
    name = str(value.dtype).removeprefix("torch.")
    return {"$tensor": [name, list(value.shape), base64.b64encode(raw).decode()]}
