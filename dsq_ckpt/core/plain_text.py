"""Escaping of text from files for display."""

from __future__ import annotations

import unicodedata

_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def escape_controls(text: str, keep: str = "") -> str:
    """Escape control characters other than those in `keep`: a name from a file must not control the terminal."""
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in _UNPRINTABLE and letter not in keep else letter for letter in text
    )
