"""Text of a manifest: JSON that contains its own checksum, which is verified before anything else is parsed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import xxhash

from dsq_ckpt.core.strict_json import parse_strict_json
from dsq_ckpt.errors import CorruptCheckpoint, UnsupportedFormat
from dsq_ckpt.storage.container import FORMAT_VERSION

NO_CHECKSUM = "0" * 16
_MAX_DEPTH = 64
_HEAD = re.compile(
    rb'\s*\{\s*"format"\s*:\s*"dsq_ckpt"\s*,\s*"version"\s*:\s*(?P<version>\d{1,18})\s*,'
    rb'(?:\s*"checksum"\s*:\s*"(?P<checksum>[0-9a-f]{16})")?'
)


def parse_manifest_text(text: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON of a manifest. Verify its version and checksum before anything else is parsed.

    Raises:
        CorruptCheckpoint, UnsupportedFormat: see `Manifest.read`.
    """
    head = _HEAD.match(text)
    version = int(head["version"]) if head is not None else 0
    if head is None or version < 1:
        raise CorruptCheckpoint(f"'{path}' is not a dsq_ckpt manifest: it begins with {text[:60]!r}")
    if version > FORMAT_VERSION:
        raise UnsupportedFormat(
            f"'{path}' has format version {version}, this dsq_ckpt reads up to {FORMAT_VERSION}; upgrade it"
        )
    stored_checksum = head["checksum"] or b""
    if not stored_checksum or insert_checksum(text.replace(stored_checksum, NO_CHECKSUM.encode(), 1)) != text:
        raise CorruptCheckpoint(f"'{path}' does not have the checksum it states: it was altered, restore it")
    try:
        tree = parse_strict_json(text)
    except ValueError as error:
        raise CorruptCheckpoint(f"'{path}' is not a dsq_ckpt manifest: {error!r}") from error
    level = [tree]
    for _ in range(_MAX_DEPTH):
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)
                 if isinstance(child, dict | list)]
    if level:  # other code traverses it recursively
        raise CorruptCheckpoint(f"'{path}' is not a dsq_ckpt manifest: it is nested more than {_MAX_DEPTH} deep")
    return dict(tree)


def insert_checksum(text: bytes) -> bytes:
    """Return the text with its xxh3-64 in place of the zeros, so that the checksum covers every byte of the file."""
    return text.replace(NO_CHECKSUM.encode(), xxhash.xxh3_64_hexdigest(text).encode(), 1)
