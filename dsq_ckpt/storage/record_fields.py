"""Checked access to fields of records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from dsq_ckpt.core.arrays import F32
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.quantization.moments import multiply_by_octave_units, multiply_by_roots
from dsq_ckpt.storage.shard import RecordRef

FACTOR_KEYS = frozenset({"unit", "root", "scales"})
"""Keys of a record that specify factors of its dequantized values."""
_MAX_EXPONENT = 100


def get_root_multiplier(record: dict[str, Any]) -> Callable[[F32, F32], None]:
    """Return the function that multiplies first moments by the roots of second moments, in place."""
    return multiply_by_roots if "root" in record else multiply_by_octave_units  # which format version 4 had


def check_factors(ref: RecordRef, record: dict[str, Any], names: Collection[str]) -> None:
    """Raise CorruptCheckpoint for a record with two factors, or with a factor that is not in `names`."""
    factors = sorted(FACTOR_KEYS & record.keys())
    if len(factors) > 1 or not set(factors) <= set(names):
        raise CorruptCheckpoint(
            f"'{ref.file}' record {ref.record} has {factors}, expected one of them, and none in a sum"
        )


def get_protected_count(record: dict[str, Any]) -> int:
    """Return the number of protected values of a record."""
    count = record.get("protected_count", 0)
    if type(count) is not int or not 0 <= count <= math.prod(record["shape"]):
        raise CorruptCheckpoint(f"'{record['fqn']}' of shape {record['shape']} has {count} protected values")
    return count


def get_exponent(record: dict[str, Any]) -> float:
    """Return log2 of the factor of a record's levels."""
    parts = record.get("exponent", 0), record.get("shift", 0)
    for name, part in zip(("exponent", "shift"), parts, strict=True):
        if type(part) not in (int, float) or not -_MAX_EXPONENT <= part <= _MAX_EXPONENT:
            raise CorruptCheckpoint(f"'{record['fqn']}' has the {name} {part!r}")
    return float(sum(parts))


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name.

    Raises:
        CorruptCheckpoint: there is no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(f"unknown dtype {json.dumps(name)}: written by a newer torch?")
    return dtype
