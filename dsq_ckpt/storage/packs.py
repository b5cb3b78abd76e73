"""Writer of packs: exact data and scales, compressed alone or as a delta to a pack of an earlier save.

A pack at place 0 of a chain is compressed alone; a pack at place p was written by the p-th save after it. It is coded
against the pack of 1, 4, 16, ... saves before, the largest such number that divides p. Most packs are coded against the
previous one, from which they differ least, and the newest of 32 saves needs at most 7 older ones. A save reads the
reference pack again rather than keep it in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dsq_ckpt.coding import difference, shuffle_compress
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.storage.container import ContainerWriter

_MAX_SHARED_BYTES = 1 << 16  # smaller items share a pack
_MIN_DELTA_BYTES = 1 << 10  # of a delta: for smaller packs it takes more time than it saves bytes
_PIECE = 1 << 23  # bytes; larger items are cut into such pieces
_MAX_DELTA_RATIO = 0.95  # to the bytes of the pack alone: a smaller gain does not justify a longer chain
_CHAIN_FACTOR = 4

Tree = dict[str, Any]


class PackRef(NamedTuple):
    """A pack of a data file of the same checkpoint directory."""

    file: str
    pack: int


class PackLink(NamedTuple):
    """Link of a pack to its reference pack, against which it is coded.

    Attributes:
        ref: location of the reference pack.
        place: place of the coded pack in its chain.
        data: bytes of the reference pack.
        requires: files that the reference pack is decoded from.
    """

    ref: PackRef
    place: int
    data: bytes
    requires: frozenset[str]


class ParentPacks(Protocol):
    """Packs of a parent checkpoint."""

    def find_packs(self, records: Sequence[Tree]) -> Sequence[PackRef]:
        """Return the parent's packs that hold exactly the same records; empty if there are none."""

    def find_scale_pack(self, records: Sequence[Tree]) -> PackRef | None:
        """Return the parent's pack that holds exactly the scales of the same records; None if there is none."""

    def make_link(self, newest: PackRef, size: int, itemsize: int) -> PackLink | None:
        """Return the link of the pack after `newest`; None if the reference is unreadable or has another size."""


class CompressedPack(NamedTuple):
    """Compressed pack, and the link to its reference pack; None if it is compressed alone."""

    data: bytes
    link: PackLink | None

    @classmethod
    def compress(
        cls, raw: memoryview | bytes, itemsize: int, level: int, link: Callable[[], PackLink | None]
    ) -> CompressedPack:
        """Compress a pack alone, or against the reference that `link` returns if that is smaller.

        If nothing has changed, as in frozen weights, it is not compressed alone for comparison.
        """
        reference, delta = link() if itemsize in difference.ITEM_SIZES else None, b""
        if reference is not None:
            delta, reference = difference.encode(raw, reference.data, itemsize, level), reference._replace(data=b"")
            if difference.is_unchanged(delta, len(raw), itemsize):
                return cls(delta, reference)
        alone = shuffle_compress(raw, itemsize, level)
        if reference is not None and len(delta) < _MAX_DELTA_RATIO * len(alone):
            return cls(delta, reference)
        return cls(alone, None)

    def write(self, base: ContainerWriter, itemsize: int, size: int) -> tuple[Any, ...]:
        """Write the pack; return its entry in the table of contents."""
        entry = base.add(self.data), itemsize, size
        return entry if self.link is None else (*entry, self.link.ref, self.link.place)


@dataclass
class _OpenPack:
    """Pack being filled with small items; `at` is the byte offset of the next item."""

    parts: list[bytes] = field(default_factory=list)
    at: int = 0
    members: list[tuple[Tree, Callable[[int], None]]] = field(default_factory=list)


class PackWriter:
    """Writer of the packs of one base file.

    Args:
        base: writer of the file.
        workers: threads.
        level: zstd level.
        earlier: packs of the parent; None: packs are compressed alone.
        requires: files of ancestors that the base file needs; those that packs need are added. If it is empty, small
            packs are compressed alone, so that a checkpoint does not depend on another for a few bytes.

    Attributes:
        contents: entries of the packs in the table of contents.
    """

    def __init__(
        self, base: ContainerWriter, workers: Workers, level: int, earlier: ParentPacks | None, requires: set[str]
    ) -> None:
        self._base, self._workers, self._level, self._earlier = base, workers, level, earlier
        self._open: dict[int, _OpenPack] = {}
        self.contents: list[tuple[Any, ...]] = []
        self._requires = requires

    def add(self, record: Tree, raw: memoryview, itemsize: int, sized: Callable[[int], None]) -> None:
        """Store the bytes of a record.

        Args:
            record: record; its location is set now, or by `finish`.
            raw: the bytes.
            itemsize: bytes per item.
            sized: called with the compressed size in bytes.
        """
        record["size"] = len(raw)
        if len(raw) > _MAX_SHARED_BYTES:
            pieces = [raw[start : start + _PIECE] for start in range(0, len(raw), _PIECE)]
            first = len(self.contents)
            sized(sum(self._add([record], pieces, itemsize)))
            record["packs"] = list(range(first, len(self.contents)))
            return
        pack = self._open.setdefault(itemsize, _OpenPack())
        record["at"] = pack.at
        pack.parts.append(bytes(raw))
        pack.at += len(raw)
        pack.members.append((record, sized))
        if pack.at > _PIECE:
            self._flush(itemsize)

    def add_scales(self, records: Sequence[Tree], items: bytes) -> tuple[int, int]:
        """Store the scales of these records, in order, as a pack; return its number and its size in bytes."""
        parent = self._get_usable_parent(len(items))
        (size,) = self._write([memoryview(items)], 2, [None if parent is None else parent.find_scale_pack(records)])
        return len(self.contents) - 1, size

    def finish(self) -> None:
        """Write the open packs of small items."""
        for itemsize in list(self._open):
            self._flush(itemsize)

    def _flush(self, itemsize: int) -> None:
        """Write the open pack of an item size, and set its location in its members."""
        pack = self._open.pop(itemsize)
        raw = memoryview(b"".join(pack.parts))
        (size,) = self._add([record for record, _ in pack.members], [raw], itemsize)
        for record, sized in pack.members:
            record["packs"] = [len(self.contents) - 1]
            sized(-(-size * record["size"] // max(len(raw), 1)))  # its share, rounded up

    def _add(self, records: Sequence[Tree], pieces: Sequence[memoryview], itemsize: int) -> Iterator[int]:
        """Write packs that together hold these records; yield the compressed size of each in bytes."""
        parent = self._get_usable_parent(sum(map(len, pieces)))
        refs = () if parent is None else parent.find_packs(records)
        return self._write(pieces, itemsize, refs if len(refs) == len(pieces) else [None] * len(pieces))

    def _write(
        self, pieces: Sequence[memoryview], itemsize: int, earlier: Sequence[PackRef | None]
    ) -> Iterator[int]:
        """Write packs, each coded against its pack of the parent if there is one; yield the size of each in bytes."""

        def compress(task: tuple[memoryview, PackRef | None]) -> CompressedPack:
            raw, ref = task
            return CompressedPack.compress(raw, itemsize, self._level, lambda: self._make_link(ref, len(raw), itemsize))

        for piece, packed in zip(pieces, self._workers.map(compress, zip(pieces, earlier, strict=True)), strict=True):
            self.contents.append(packed.write(self._base, itemsize, len(piece)))
            if packed.link is not None:
                self._requires |= packed.link.requires
            yield len(packed.data)

    def _get_usable_parent(self, size: int) -> ParentPacks | None:
        """Return the packs of the parent if packs of so many bytes may be coded against them."""
        return self._earlier if size > (_MIN_DELTA_BYTES if self._requires else _MAX_SHARED_BYTES) else None

    def _make_link(self, newest: PackRef | None, size: int, itemsize: int) -> PackLink | None:
        return None if newest is None or self._earlier is None else self._earlier.make_link(newest, size, itemsize)


def reference_place(place: int) -> int:
    """Return the place of the reference of the pack at `place`, at least 1."""
    step = 1
    while place % (_CHAIN_FACTOR * step) == 0:
        step *= _CHAIN_FACTOR
    return place - step
