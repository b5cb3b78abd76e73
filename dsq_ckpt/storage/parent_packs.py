"""Packs of a parent checkpoint, as references of the next save's packs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.container import ContainerReader
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.packs import PackLink, PackRef, reference_place
from dsq_ckpt.storage.shard import RecordRef

Tree = dict[str, Any]
_COMPARED_KEYS = ("type", "fqn", "offsets", "shape", "dtype", "stored", "size", "at", "scales")
"""Record fields that must be equal for a pack to be coded against a pack of the parent."""


class ParentPackReader:
    """Reader of a checkpoint's packs; see `ParentPacks`. A context manager.

    The checkpoint is opened on first use. Packs that cannot be read are stored anew, so that later checkpoints do not
    need them.

    Args:
        directory: directory of the checkpoint.
        save_id: save id that the checkpoint must have.
        known: records of chunks that this rank wrote; for other chunks the index is read.
    """

    def __init__(self, directory: Path, save_id: str, refs: Mapping[ChunkKey, RecordRef]) -> None:
        self._directory, self._save_id, self._known = directory, save_id, refs
        self._lock, self._warned = threading.Lock(), False
        self._files: CheckpointFiles | None = None

    def __enter__(self) -> ParentPackReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._files is not None:
            self._files.close()

    def find_packs(self, records: Sequence[Tree]) -> Sequence[PackRef]:
        """See `ParentPacks.find_packs`."""
        return self._find_common(records, lambda _, earlier: earlier["packs"])

    def find_scale_pack(self, records: Sequence[Tree]) -> PackRef | None:
        """See `ParentPacks.find_scale_pack`."""

        def pack(file: ContainerReader, _: Tree) -> list[int]:
            number = file.contents["scales"][0]
            return [] if isinstance(number, list) else [number]  # up to format version 7 they were no pack

        return next(iter(self._find_common(records, pack)), None)

    def _find_common(
        self, records: Sequence[Tree], packs: Callable[[ContainerReader, Tree], Sequence[int]]
    ) -> Sequence[PackRef]:
        """Return the packs common to all of these records in the parent; `packs` returns those of one record."""
        common: set[tuple[PackRef, ...]] = set()
        if any("offsets" not in record for record in records):  # objects, which only the index of all ranks locates
            return ()
        try:
            files = self._open()
            for record in records:
                key = ChunkKey(record["fqn"], tuple(record["offsets"]), tuple(record["shape"]))
                ref = files.find_chunk(key, self._known)
                earlier = None if ref is None else files.read_record(ref)
                if ref is None or earlier is None:
                    return ()
                if any(earlier.get(key) != record.get(key) for key in _COMPARED_KEYS):
                    return ()
                with files.translate_errors(ref.file):
                    numbers = packs(files.open_reader(ref.file), earlier)
                    common.add(tuple(PackRef(ref.file, number) for number in numbers))
        except DSQError as error:
            self._warn_once(error)
            return ()
        return common.pop() if len(common) == 1 else ()

    def make_link(self, newest: PackRef, size: int, itemsize: int) -> PackLink | None:
        """See `ParentPacks.make_link`."""
        try:
            files = self._open()
            index = files.pack_place(newest) + 1
            chain = files.pack_chain(newest)
            while files.pack_place(chain[0]) > reference_place(index):
                del chain[0]
            if not files.pack_fits(chain[0], size, itemsize):
                return None
            return files.make_link(chain, index)
        except DSQError as error:
            self._warn_once(error)
            return None

    def _open(self) -> CheckpointFiles:
        if self._files is None:
            files = CheckpointFiles(self._directory, lazy=True)
            if files.manifest.save_id != self._save_id:
                raise CheckpointNotFound(f"'{self._directory}' was replaced by save {files.manifest.save_id}")
            self._files = files
        return self._files

    def _warn_once(self, error: DSQError) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            warn_safely(f"exact data of the parent checkpoint cannot be read; storing it anew: {error}")
