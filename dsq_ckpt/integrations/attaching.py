"""Objects of another library that become ours in place, since their users made them and hold them already."""

from __future__ import annotations

from typing import Any, TypeVar

_Mixin = TypeVar("_Mixin")


def attached(found: Any, mixin: type[_Mixin]) -> _Mixin:
    """Return the same object, of a class that is its own with `mixin` before it; unchanged if it is one already.

    Args:
        found: an object, also of a subclass of a user's.
        mixin: a class whose methods come first.
    """
    if not isinstance(found, mixin):
        kind = type(found)
        found.__class__ = type(f"DSQ{kind.__name__}", (mixin, kind), {"__module__": kind.__module__})
    made: _Mixin = found
    return made
