"""Triton's interpreter, which looks through `triton.language` for its functions whenever a kernel or a part of one is
called, and makes its table of dtypes for each look into it; here it does so once.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter

_dtype_by_table = interpreter._get_np_dtype
_dtypes: dict[str, Any] = {}


@functools.cache
def _list_functions(place: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(place) if is_builtin(member))


def _patch_builtin(place: Any, builder: Any, scope: Any) -> None:
    """Do what Triton's function of that name does; within a kernel's own call, functions are replaced already."""
    for name in _list_functions(place):
        if is_builtin(member := getattr(place, name)):
            interpreter._patch_attr(place, name, member, builder, scope)


def _get_dtype(kind: Any) -> Any:
    name = kind.scalar.name  # of elements; types of blocks cannot be hashed
    if name not in _dtypes:
        _dtypes[name] = _dtype_by_table(kind)
    return _dtypes[name]


def remember_functions() -> None:
    """Let the interpreter of this process remember what it finds."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_dtype
