"""Names in a manifest, which may not lead anywhere but to files and directories beside it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def is_plain(name: str) -> bool:
    """Return whether a name stays in the directory that it is looked up in."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def _beside(name: str) -> str:
    if not is_plain(name):
        raise ValueError(f"{name!r} is not the name of a directory beside this one; a manifest may not point there")
    return name


def _below(name: str) -> str:
    if not all(map(is_plain, name.split("/"))):
        raise ValueError(f"{name!r} is not the path of a file in this directory; a manifest may not point there")
    return name


Sibling = Annotated[str, AfterValidator(_beside)]
"""Name of a directory beside that of the manifest."""
Below = Annotated[str, AfterValidator(_below)]
"""Path of a file in the directory of the manifest, or below it, with slashes."""
