"""Triton's interpreter, which replaces the functions of `triton.language` whenever a kernel or a part of one is called,
looks through it for them each time, and makes its table of dtypes for each look into it; here it does so once, and
replaces functions once for each call of a kernel.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter

_dtype_by_table, _replace = interpreter._get_np_dtype, interpreter._patch_lang
_replaced: set[tuple[str, ...]] = set()
_dtypes: dict[str, Any] = {}


@functools.cache
def _list_functions(place: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(place) if is_builtin(member))


def _patch_builtin(place: Any, builder: Any, scope: Any) -> None:
    """Do what Triton's function of that name does; within a kernel's own call, functions are replaced already."""
    for name in _list_functions(place):
        if is_builtin(member := getattr(place, name)):
            interpreter._patch_attr(place, name, member, builder, scope)


@functools.cache
def _list_languages(fn: Any) -> tuple[str, ...]:
    """Return the names under which a kernel's module knows `triton.language` and its core."""
    return tuple(sorted(value.__name__ for value in fn.__globals__.values()
                        if inspect.ismodule(value) and value in (interpreter.tl, interpreter.tl.core)))


def _replace_for_kernel(fn: Any) -> Any:
    _replaced.clear()
    _replaced.add(_list_languages(fn))
    return _replace(fn)


def _call_part(part: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a part of a kernel; functions stay replaced until the kernel's own call ends."""
    if (languages := _list_languages(part.fn)) not in _replaced:
        _replaced.add(languages)
        _replace(part.fn)
    try:
        return part.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _get_dtype(kind: Any) -> Any:
    name = kind.scalar.name  # of elements; types of blocks cannot be hashed
    if name not in _dtypes:
        _dtypes[name] = _dtype_by_table(kind)
    return _dtypes[name]


def remember_functions() -> None:
    """Let the interpreter of this process remember what it finds."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _replace_for_kernel
    interpreter.InterpretedFunction.__call__ = _call_part
    interpreter._get_np_dtype = _get_dtype
