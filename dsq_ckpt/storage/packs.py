"""Packs of exact data and of scales as they are written: by themselves, or as differences to those of an earlier save.

Place 0 of a chain is a pack by itself, place p that which the p-th save after it wrote. It is coded given the one of 1,
4, 16, .. saves before, the largest such number that divides p. So most are coded given the last one, from which they
differ least, of 32 saves the newest needs 7 older ones at most, and a save reads again what it is coded against, rather
than keep it in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dsq_ckpt.coding import difference, shuffle_compress
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.storage.container import ContainerWriter

_MAX_SHARED_BYTES = 1 << 16  # smaller items share a pack
_MIN_DELTA_BYTES = 1 << 10  # smaller packs are not worth the time that models take
_PIECE = 1 << 23  # larger ones are cut into pieces of this many bytes
_MAX_DELTA_RATIO = 0.95  # of the bytes of a pack by itself: to win less than that is not worth a longer chain
_CHAIN_FACTOR = 4

Tree = dict[str, Any]


class PackRef(NamedTuple):
    """A pack of a data file of the same checkpoint directory."""

    file: str
    pack: int


class PackLink(NamedTuple):
    """The pack that another one is coded given.

    Attributes:
        ref: where it is.
        place: place of the other one in its chain.
        data: its bytes.
        requires: the files that it is decoded from.
    """

    ref: PackRef
    place: int
    data: bytes
    requires: frozenset[str]


class ParentPacks(Protocol):
    """The packs of a parent checkpoint."""

    def find_packs(self, records: Sequence[Tree]) -> Sequence[PackRef]:
        """Return the packs that hold the same records there, and nothing else; none if they are not there."""

    def find_scale_pack(self, records: Sequence[Tree]) -> PackRef | None:
        """Return the pack that holds the scales of the same records there, and no others; None if there is none."""

    def make_link(self, newest: PackRef, size: int, itemsize: int) -> PackLink | None:
        """Return what the pack after `newest` is coded given; None if that cannot be read, or is of another size."""


class CompressedPack(NamedTuple):
    """A compressed pack, and what it is coded given, if anything."""

    data: bytes
    link: PackLink | None

    @classmethod
    def compress(
        cls, raw: memoryview | bytes, itemsize: int, level: int, link: Callable[[], PackLink | None]
    ) -> CompressedPack:
        """Compress a pack by itself and, if that is smaller, given what `link` returns.

        Not by itself if nothing has changed, as in frozen weights.
        """
        reference, delta = link() if itemsize in difference.ITEM_SIZES else None, b""
        if reference is not None:
            delta, reference = difference.encode(raw, reference.data, itemsize, level), reference._replace(data=b"")
            if difference.tells_nothing(delta, len(raw), itemsize):
                return cls(delta, reference)
        alone = shuffle_compress(raw, itemsize, level)
        if reference is not None and len(delta) < _MAX_DELTA_RATIO * len(alone):
            return cls(delta, reference)
        return cls(alone, None)

    def write(self, base: ContainerWriter, itemsize: int, size: int) -> tuple[Any, ...]:
        """Write the pack; return what the table of contents tells of it."""
        own = base.add(self.data), itemsize, size
        return own if self.link is None else (*own, self.link.ref, self.link.place)


@dataclass
class _OpenPack:
    """Small items that share one pack; `at` is the byte offset of the next item."""

    parts: list[bytes] = field(default_factory=list)
    at: int = 0
    members: list[tuple[Tree, Callable[[int], None]]] = field(default_factory=list)


class PackWriter:
    """Writer of the packs of one base file.

    Args:
        base: the file.
        workers: threads.
        level: of zstd.
        earlier: packs of the parent; None: it has none that may be used.
        requires: files of ancestors that the base file needs, to which those that packs need are added. Where there
            are none, small packs are stored by themselves: a checkpoint does not depend on another for a few bytes.

    Attributes:
        contents: the packs, for the table of contents.
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
            record: takes their place, now or by the end.
            raw: the bytes.
            itemsize: bytes of an item.
            sized: called with the bytes that they take in the file.
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
        """Store the scales of these records, in order, as a pack; return its number, and the bytes that it takes."""
        parent = self._get_usable_parent(len(items))
        (size,) = self._write([memoryview(items)], 2, [None if parent is None else parent.find_scale_pack(records)])
        return len(self.contents) - 1, size

    def finish(self) -> None:
        """Write the packs that small items share."""
        for itemsize in list(self._open):
            self._flush(itemsize)

    def _flush(self, itemsize: int) -> None:
        """Compress the open pack of an item size, and record its location in its members."""
        pack = self._open.pop(itemsize)
        raw = memoryview(b"".join(pack.parts))
        (size,) = self._add([record for record, _ in pack.members], [raw], itemsize)
        for record, sized in pack.members:
            record["packs"] = [len(self.contents) - 1]
            sized(-(-size * record["size"] // max(len(raw), 1)))  # its share, rounded up

    def _add(self, records: Sequence[Tree], pieces: Sequence[memoryview], itemsize: int) -> Iterator[int]:
        """Write packs that hold these records together; yield the bytes of each."""
        parent = self._get_usable_parent(sum(map(len, pieces)))
        refs = () if parent is None else parent.find_packs(records)
        return self._write(pieces, itemsize, refs if len(refs) == len(pieces) else [None] * len(pieces))

    def _write(
        self, pieces: Sequence[memoryview], itemsize: int, earlier: Sequence[PackRef | None]
    ) -> Iterator[int]:
        """Write packs, each coded given that of an earlier checkpoint if there is one; yield the bytes of each."""

        def compress(task: tuple[memoryview, PackRef | None]) -> CompressedPack:
            raw, ref = task
            return CompressedPack.compress(raw, itemsize, self._level, lambda: self._make_link(ref, len(raw), itemsize))

        for piece, packed in zip(pieces, self._workers.map(compress, zip(pieces, earlier, strict=True)), strict=True):
            self.contents.append(packed.write(self._base, itemsize, len(piece)))
            if packed.link is not None:
                self._requires |= packed.link.requires
            yield len(packed.data)

    def _get_usable_parent(self, size: int) -> ParentPacks | None:
        """Return the packs of the parent, if one of so many bytes may be coded given them."""
        return self._earlier if size > (_MIN_DELTA_BYTES if self._requires else _MAX_SHARED_BYTES) else None

    def _make_link(self, newest: PackRef | None, size: int, itemsize: int) -> PackLink | None:
        return None if newest is None or self._earlier is None else self._earlier.make_link(newest, size, itemsize)


def reference_place(place: int) -> int:
    """Return the place of a chain that the pack at `place`, from 1 on, is coded given."""
    step = 1
    while place % (_CHAIN_FACTOR * step) == 0:
        step *= _CHAIN_FACTOR
    return place - step
