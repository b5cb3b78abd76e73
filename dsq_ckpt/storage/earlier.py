"""The packs of a parent checkpoint, which those of the next one are coded given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.errors import DSQError
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.packs import Link, PackRef, before
from dsq_ckpt.storage.shard import RecordRef

Tree = dict[str, Any]
_SAME = ("type", "fqn", "offsets", "shape", "dtype", "stored", "size", "at")
"""What the records of a pack must have in common with those of an earlier one, item by item."""


class PacksOfParent:
    """The packs of an opened checkpoint; see `EarlierPacks`.

    What cannot be read is stored anew: the next checkpoint needs it no longer.

    Args:
        files: the checkpoint.
        find: returns the record of a chunk there, None if there is none.
    """

    def __init__(self, files: CheckpointFiles, find: Callable[[ChunkKey], RecordRef | None]) -> None:
        self._files, self._find = files, find
        self._lock, self._told = threading.Lock(), False

    def of(self, records: Sequence[Tree]) -> Sequence[PackRef]:
        """See `EarlierPacks.of`."""
        found: set[tuple[PackRef, ...]] = set()
        if any("offsets" not in record for record in records):  # objects, which only the index of all ranks leads to
            return ()
        try:
            for record in records:
                ref = self._find(ChunkKey(record["fqn"], tuple(record["offsets"]), tuple(record["shape"])))
                earlier = None if ref is None else self._files.record(ref)
                if ref is None or earlier is None or any(earlier.get(key) != record.get(key) for key in _SAME):
                    return ()
                with self._files.naming(ref.file):
                    found.add(tuple(PackRef(ref.file, number) for number in earlier["packs"]))
        except DSQError as error:
            self._tell(error)
            return ()
        return found.pop() if len(found) == 1 else ()

    def link(self, newest: PackRef, size: int, itemsize: int) -> Link | None:
        """See `EarlierPacks.link`."""
        files = self._files
        try:
            place = files.pack_place(newest) + 1
            chain = files.pack_chain(newest)
            while files.pack_place(chain[0]) > before(place):
                del chain[0]
            if not files.pack_fits(chain[0], size, itemsize):
                return None
            return files.link(chain, place)
        except DSQError as error:
            self._tell(error)
            return None

    def _tell(self, error: DSQError) -> None:
        """Warn once."""
        with self._lock:
            told, self._told = self._told, True
        if not told:
            warn_safely(f"exact data of the parent checkpoint cannot be read; storing it anew: {error}")
