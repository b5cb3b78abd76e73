"""Types of names in a manifest, which may refer only to files and directories beside it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def is_plain_name(name: str) -> bool:
    """Return whether a name is a single path component other than `.` and `..`."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def _check_sibling(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError(f"{name!r} is not the name of a directory beside this one; a manifest may not point there")
    return name


def _check_relative(name: str) -> str:
    if not all(map(is_plain_name, name.split("/"))):
        raise ValueError(f"{name!r} is not the path of a file in this directory; a manifest may not point there")
    return name


SiblingName = Annotated[str, AfterValidator(_check_sibling)]
"""Name of a directory beside the manifest's directory."""
RelativePath = Annotated[str, AfterValidator(_check_relative)]
"""Path of a file relative to the manifest's directory, with slashes."""
