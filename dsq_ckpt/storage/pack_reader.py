"""Reader of packs of exact data: of a pack alone, or along the chain of its reference packs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import NamedTuple

from dsq_ckpt.coding import difference, shuffle_decompress
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage.container import Block, ContainerReader
from dsq_ckpt.storage.packs import PackLink, PackRef

_MAX_CACHED_BYTES = 1 << 25
"""Bytes of cached packs of small records: the next record is mostly in the same pack."""
_MAX_CHAIN = 10_000  # packs of a chain


class _PackEntry(NamedTuple):
    """Entry of a pack in the table of contents of its file.

    Attributes:
        block: location of the compressed bytes.
        itemsize: bytes per item.
        size: uncompressed size in bytes.
        reference: reference pack; None: compressed alone.
        place: place in its chain; 0: compressed alone.
    """

    block: Block
    itemsize: int
    size: int
    reference: PackRef | None
    place: int


class PackReader(ABC):
    """Reader of the packs of a checkpoint; safe to use from several threads. A subclass opens the files."""

    def __init__(self) -> None:
        self._kept: OrderedDict[PackRef, bytes] = OrderedDict()  # the last used at the end
        self._kept_lock = threading.Lock()

    @abstractmethod
    def open_reader(self, name: str) -> ContainerReader:
        """Return an open data file."""

    @abstractmethod
    def translate_errors(self, name: str = "") -> AbstractContextManager[None]:
        """Return a context that translates errors and adds the name of a file."""

    def pack_size(self, ref: PackRef) -> int:
        """Return the uncompressed size of a pack in bytes."""
        return self._read_entry(ref).size

    def pack_fits(self, ref: PackRef, size: int, itemsize: int) -> bool:
        """Return whether a pack has this size and item size, in bytes."""
        entry = self._read_entry(ref)
        return (entry.size, entry.itemsize) == (size, itemsize)

    def pack_place(self, ref: PackRef) -> int:
        """Return the place of a pack in its chain."""
        return self._read_entry(ref).place

    def pack_chain(self, ref: PackRef) -> list[PackRef]:
        """Return a pack and the packs that it is decoded from, newest first.

        Raises:
            CorruptCheckpoint: the chain never ends, or its packs do not fit each other.
        """
        newest, links, link = self._read_entry(ref), [ref], self._read_entry(ref).reference
        while link is not None:
            if len(links) > _MAX_CHAIN:
                raise CorruptCheckpoint(f"'{ref.file}' pack {ref.pack}: the chain never ends")
            entry = self._read_entry(link)
            if (entry.size, entry.itemsize) != (newest.size, newest.itemsize):
                raise CorruptCheckpoint(
                    f"'{link.file}' pack {link.pack} has {entry.size} bytes in items of {entry.itemsize}, expected "
                    f"{newest.size} in items of {newest.itemsize}, as '{ref.file}' pack {ref.pack}, coded given it"
                )
            links.append(link)
            link = entry.reference
        return links

    def make_link(self, chain: list[PackRef], place: int) -> PackLink:
        """Return the link of a pack at `place` to the newest pack of a chain."""
        return PackLink(chain[0], place, self.read_pack(chain[0]), frozenset(ref.file for ref in chain))

    def read_pack(self, ref: PackRef, keep: bool = False) -> bytes:
        """Return the bytes of a pack.

        Args:
            ref: the pack.
            keep: cache the bytes for the next call.

        Raises:
            CorruptCheckpoint: the pack, or one that it is decoded from, is missing, altered or does not fit.
        """
        with self._kept_lock:
            if (cached := self._kept.get(ref)) is not None:
                self._kept.move_to_end(ref)
                return cached
        data: bytes | None = None
        for link in reversed(self.pack_chain(ref)):
            entry = self._read_entry(link)
            with self.translate_errors(link.file):
                block = self.open_reader(link.file).read(entry.block)
                if data is None:
                    data = shuffle_decompress(block, entry.itemsize, entry.size)
                else:
                    data = difference.decode(block, data, entry.itemsize)
        assert data is not None
        if keep:
            with self._kept_lock:
                self._kept[ref] = data
                while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _MAX_CACHED_BYTES:
                    self._kept.popitem(last=False)
        return data

    def _read_entry(self, ref: PackRef) -> _PackEntry:
        with self.translate_errors(ref.file):
            packs = self.open_reader(ref.file).contents["packs"]
            if type(ref.pack) is not int or not 0 <= ref.pack < len(packs):
                raise CorruptCheckpoint(f"it has {len(packs)} packs, pack {ref.pack!r} is asked for")
            block, itemsize, size, *earlier = packs[ref.pack]
            entry = _PackEntry(Block(*block), itemsize, size, None, 0)
            if earlier:
                (file, number), index = earlier
                if not isinstance(file, str):
                    raise CorruptCheckpoint(f"pack {ref.pack} is coded given a pack of {file!r}, expected a file name")
                entry = entry._replace(reference=PackRef(file, number), place=index)
            if not all(type(value) is int and value >= 0 for value in (entry.itemsize, entry.size, entry.place)):
                raise CorruptCheckpoint(f"pack {ref.pack} is of {size!r} bytes in items of {itemsize!r}: {earlier}")
            return entry
