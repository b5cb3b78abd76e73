"""Extension of another library's objects in place, since users have created and hold them already."""

from __future__ import annotations

from typing import Any, TypeVar

MixinT = TypeVar("MixinT")


def add_mixin(instance: Any, mixin: type[MixinT]) -> MixinT:
    """Change an object's class to a subclass of `mixin` and its own class; return the same object.

    An instance of `mixin` is not changed.

    Args:
        instance: object of a class of another library, or of a user's subclass.
        mixin: class whose methods take precedence.
    """
    if not isinstance(instance, mixin):
        kind = type(instance)
        instance.__class__ = type(f"DSQ{kind.__name__}", (mixin, kind), {"__module__": kind.__module__})
    extended: MixinT = instance
    return extended
