"""Writer of the records of one rank, coded or exact, in a base file and a refinement file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt.coding import HuffmanCoder, fit_fastest, refinement_blocks, shuffle_compress
from dsq_ckpt.coding.base import Coder
from dsq_ckpt.coding.scales import pack_scales
from dsq_ckpt.config.schema import DeltaConfig
from dsq_ckpt.core.aliases import flat_bytes
from dsq_ckpt.core.arrays import I16, Bits, Codes
from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.chunk import BlockData, ChunkKey, CodeSource, protected_bf16
from dsq_ckpt.quantization.plan import QuantizationPlan
from dsq_ckpt.quantization.step_lengths import StepLengths, correct_scales
from dsq_ckpt.storage.container import Block, ContainerWriter, FileInfo
from dsq_ckpt.storage.packs import PackWriter, ParentPacks

_PREFIX_CODES = 4096  # codes compared first: they nearly always differ if the block does


class RecordRef(NamedTuple):
    """Reference to a record of a data file of the same checkpoint."""

    file: str
    record: int


@dataclass
class WrittenRecord:
    """Written record and its sizes in bytes: of the tensor, in the base file, in the refinement file."""

    ref: RecordRef
    logical: int
    base: int
    refinement: int = 0


class RefinementSymbols(NamedTuple):
    """Symbols of the refinement of a chunk, in memory, for the next save to store its difference to them.

    Attributes:
        ref: record of the chunk.
        file: name of the refinement file.
        bits: bits of a symbol.
        step: elements per block.
        blocks: packed symbols by the first element of their block; not of blocks that were coded given their codes.
        uses: number of layers so far that are differences to this one.
    """

    ref: RecordRef
    file: str
    bits: int
    step: int
    blocks: dict[int, bytes]
    uses: int = 0


class ChunkRequest(NamedTuple):
    """Request to write a chunk, with the records of the parent checkpoint that it is coded against.

    Attributes:
        source: codes of the chunk; `source.parent` is the coding context if and only if `parent` is not None.
        dtype: dtype of the tensor.
        parent: record of the parent checkpoint that holds the previous codes.
        requires: all files that the record of the parent checkpoint needs, its own included.
        residual: record of the parent checkpoint to which the decoded values are added; then `requires` is of this one.
        older_refinement: symbols to which the refinement may be stored as a difference.
        keeps_refinement: whether symbols of the refinement are kept in memory for the next save.
    """

    source: CodeSource
    dtype: torch.dtype
    parent: RecordRef | None
    requires: frozenset[str]
    residual: RecordRef | None = None
    older_refinement: RefinementSymbols | None = None
    keeps_refinement: bool = False


class _EncodedBlock(NamedTuple):
    """Encoded block.

    Attributes:
        task: task that made it.
        codes: encoded codes; None if they equal those of the parent.
        data: other data of the block, its refinement encoded.
        symbols: packed symbols of the refinement, to keep in memory; None: they are not kept.
        saved: bytes fewer than packed, if the refinement is stored as a difference; else 0.
    """

    task: _BlockTask
    codes: bytes | None
    data: BlockData
    symbols: bytes | None = None
    saved: int = 0


@dataclass(frozen=True)
class _BlockTask:
    """Task of a worker thread: encode one block of a chunk."""

    chunk: ChunkRequest
    coder: Coder
    span: slice
    last: bool

    def run(self) -> _EncodedBlock:
        """Encode the block."""
        source = self.chunk.source
        if not len(source.codes):
            return _EncodedBlock(self, b"", BlockData(np.empty(0, np.uint32), b""))
        data = source.block(self.span)
        parent = None if source.parent is None else source.parent[self.span]
        codes = source.codes[self.span]
        packed, bits = data.refinement, source.refinement_bits
        differences = self._encode_differences(packed) if bits else None
        refinement = (differences or refinement_blocks.encode(packed, codes, bits)) if bits else b""
        is_kept = bits and self.chunk.keeps_refinement and refinement_blocks.is_packed(refinement, len(codes), bits)
        symbols = bytes(packed) if is_kept else None
        equal = parent is not None and _codes_equal(codes, parent)  # a frozen layer
        encoded = None if equal else self.coder.encode(codes, parent)
        saved = 0 if differences is None else len(packed) - len(differences)
        return _EncodedBlock(self, encoded, data._replace(refinement=refinement), symbols, saved)

    def _encode_differences(self, packed: bytes | memoryview) -> bytes | None:
        """Return the refinement as the difference to the older one; None if that is not possible, or not smaller."""
        older, bits, span = self.chunk.older_refinement, self.chunk.source.refinement_bits, self.span
        if older is None or older.bits != bits or (before := older.blocks.get(span.start)) is None:
            return None
        return refinement_blocks.encode_differences(packed, before, span.stop - span.start, bits)


def _codes_equal(codes: Codes, parent: Codes) -> bool:
    return bool(np.array_equal(codes[:_PREFIX_CODES], parent[:_PREFIX_CODES]) and np.array_equal(codes, parent))


class ShardWriter:
    """Writer of the records of one rank. Its context removes the files on failure."""

    def __init__(
        self, directory: Path, save_id: str, rank: int, plan: QuantizationPlan, workers: Workers,
        earlier: ParentPacks | None,
    ) -> None:
        config = self._config = plan.config
        self._fitted = plan.analysis.fitted
        self._workers = workers
        self._directory = directory
        self._head = {"save": save_id, "rank": rank}
        self._base = ContainerWriter(directory, f"{save_id}-{rank:05d}.dsq", config.storage.fsync)
        self._refinement: ContainerWriter | None = None
        self._records: list[dict[str, Any]] = []
        self._refined: dict[int, dict[str, Any]] = {}
        self._groups: dict[str, dict[str, Any]] = {}
        self._coders: dict[str, Coder] = {}
        self._requires: set[str] = set()
        self._refinement_requires: set[str] = set()
        self.symbols: dict[RecordRef, RefinementSymbols] = {}
        """Symbols of the refinement that are kept in memory, by record."""
        self.saved_by_differences: int | None = None
        """Bytes that the refinement stored as differences takes less than packed; None: no layers could be compared."""
        self._packs = PackWriter(self._base, workers, config.storage.zstd_level, earlier, self._requires)
        self._scales: list[tuple[dict[str, Any], WrittenRecord, I16]] = []
        self._scale_count = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._base.__exit__(*exc)
        if self._refinement is not None:
            self._refinement.__exit__(*exc)

    @property
    def name(self) -> str:
        """Name of the base file."""
        return self._base.path.name

    def add_coded(self, chunks: Iterable[ChunkRequest]) -> Iterator[WrittenRecord]:
        """Entropy-code chunks, and quantize those that have no codes yet.

        Blocks of different chunks are encoded in parallel, small ones in batches, so that no thread waits at the end of
        a chunk. Only a few batches per thread are ahead of the writes, so that memory stays bounded.
        """

        def tasks() -> Iterator[_BlockTask]:
            for chunk in chunks:
                coder = self._get_coder(chunk.source.group, len(chunk.source.codes))
                blocks = list(self._workers.blocks(len(chunk.source.codes))) or [slice(0, 0)]  # empty: only a record
                for span in blocks:
                    yield _BlockTask(chunk, coder, span, last=span is blocks[-1])

        base: list[Block | None] = []
        refined: list[Block] = []
        protected: list[Bits] = []
        steps: StepLengths | None = None
        symbols: dict[int, bytes] = {}
        saved = 0
        encoded = self._workers.map_batches(_BlockTask.run, tasks(), lambda task: task.span.stop - task.span.start)
        for task, codes, data, packed, saved_by_block in encoded:
            run_pending_handlers()
            saved += saved_by_block
            if packed is not None:
                symbols[task.span.start] = packed
            protected.append(data.protected)
            if data.steps is not None and (scales := task.chunk.source.scales) is not None:
                steps = steps or StepLengths.zeros(scales)
                steps.add(data.steps)
            if len(task.chunk.source.codes):
                base.append(None if codes is None else self._base.add(codes))
                if task.chunk.source.refinement_bits:
                    refined.append(self._get_refinement_writer().add(data.refinement))
            if task.last:
                written = self._add_record(task.chunk, base, refined, np.concatenate(protected), steps)
                if refined:
                    self._add_refinement_links(task.chunk, written.ref, symbols, saved)
                yield written
                base, refined, protected, steps, symbols, saved = [], [], [], None, {}, 0

    def _add_record(
        self, chunk: ChunkRequest, blocks: list[Block | None], refined: list[Block], protected: Bits,
        steps: StepLengths | None,
    ) -> WrittenRecord:
        source, dtype, parent = chunk.source, chunk.dtype, chunk.parent
        record: dict[str, Any] = {
            "type": "coded", **_chunk_fields(source.key, dtype), "group": source.group, "blocks": blocks,
        }
        if source.exponent:
            record["exponent"] = source.exponent
        scales, moved = source.scales, 0.0
        if scales is not None and steps is not None:
            scales, moved = correct_scales(scales, steps)
        if shift := round(moved, 4):  # levels are multiplied by a factor of 16 bits
            record["shift"] = shift
        if source.second_moment is not None:
            record["root"] = source.second_moment
        if parent is not None:
            record["parent"] = list(parent)
        if chunk.residual is not None:
            record["residual"] = list(chunk.residual)
        self._requires |= chunk.requires
        size = sum(block.size for block in blocks if block is not None)
        if len(protected):
            record["protected_count"] = len(protected)
            record["protected"] = self._base.add(shuffle_compress(protected_bf16(protected).tobytes(), 2))
            size += record["protected"].size
        ref = RecordRef(self.name, len(self._records))
        written = WrittenRecord(ref, len(source.codes) * dtype.itemsize, size)
        if scales is not None and scales.is_scaled:
            by_row, by_column = scales.by_row, scales.by_column
            record["scales"] = [self._scale_count, len(by_row), len(by_column)]
            self._scale_count += len(by_row) + len(by_column)
            self._scales.append((record, written, np.concatenate([by_row, by_column])))
        self._records.append(record)
        if source.refinement_bits:
            entry: dict[str, Any] = {"bits": source.refinement_bits, "blocks": refined}
            written.refinement = sum(block.size for block in refined)
            if len(protected):
                entry["protected"] = self._get_refinement_writer().add(shuffle_compress(protected.tobytes(), 4))
                written.refinement += entry["protected"].size
            self._refined[ref.record] = entry
        return written

    def _add_refinement_links(
        self, chunk: ChunkRequest, ref: RecordRef, symbols: dict[int, bytes], saved: int
    ) -> None:
        """Note the older layer of a refinement with differences to it; keep symbols in memory for the next save."""
        older = chunk.older_refinement
        if saved and older is not None:
            self._refined[ref.record]["older"] = list(older.ref)
            self._refinement_requires.add(older.file)
        if older is not None:
            if older.bits == chunk.source.refinement_bits:
                self.saved_by_differences = (self.saved_by_differences or 0) + saved
            if older.uses + 1 < self._config.refinement.max_differences:  # else the row is complete
                self.symbols[ref] = older._replace(uses=older.uses + 1)
        elif symbols:
            name = self._get_refinement_writer().path.name
            bits, step = chunk.source.refinement_bits, self._workers.block_elements
            self.symbols[ref] = RefinementSymbols(ref, name, bits, step, symbols)

    def add_plain(self, key: ChunkKey, tensor: torch.Tensor, stored: torch.dtype | None = None) -> WrittenRecord:
        """Store a tensor exactly, or converted to the dtype `stored`, clamped so that finite values stay finite."""
        values = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        if stored is not None:
            limit = torch.finfo(stored).max
            values = torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(stored)
        raw = flat_bytes(values).numpy().data if values.numel() else memoryview(b"")
        record = {"type": "plain", **_chunk_fields(key, tensor.dtype)}
        if stored is not None and stored != tensor.dtype:
            record["stored"] = _dtype_name(stored)
        itemsize = values.element_size() // (2 if values.is_complex() else 1)  # real and imaginary parts are items
        return self._add_raw(record, raw, itemsize, key.elements * tensor.element_size())

    def add_bytes(self, fqn: str, data: bytes) -> WrittenRecord:
        """Store the bytes of an object that DCP serialized."""
        return self._add_raw({"type": "bytes", "fqn": fqn}, memoryview(data), 1, len(data))

    def finish(self) -> tuple[FileInfo, FileInfo | None, list[str], list[str]]:
        """Finish and return both files, and the names of the ancestors' files that each of them needs."""
        scales = self._write_scales()
        self._packs.finish()
        requires = sorted(self._requires)
        base = self._base.finish({
            **self._head, **scales, "requires": requires, "groups": self._groups,
            "packs": self._packs.contents, "block_elements": self._workers.block_elements, "records": self._records,
        })
        refinement = None
        if self._refinement is not None:
            refinement = self._refinement.finish({
                **self._head, "base": base.name, "requires": sorted(self._refinement_requires),
                "records": self._refined, "block_elements": self._workers.block_elements,
            })
        return base, refinement, requires, sorted(self._refinement_requires)

    def _write_scales(self) -> dict[str, Any]:
        """Store the numbers of all scales as one pack; return its entry in the table of contents."""
        if not self._scales:
            return {}
        records, parts, numbers = zip(*self._scales, strict=True)
        pack, size = self._packs.add_scales(records, pack_scales(np.concatenate(numbers)))
        for written, scale in zip(parts, numbers, strict=True):
            written.base += -(-size * len(scale) // self._scale_count)  # its share, rounded up
        return {"scales": [pack, self._scale_count]}

    def _get_coder(self, name: str, elements: int) -> Coder:
        """Return the coder of a group. Write its codebook and model once per file."""
        if name not in self._groups:
            fitted = self._fitted[name]
            coder = _fit_coder(self._config.delta, fitted.counts)
            self._coders[name] = coder
            self._groups[name] = {
                "codebook": fitted.codebook.to_json(), "coder": coder.name, "elements": 0,
                "model": self._base.add(coder.to_bytes()),
            }
        self._groups[name]["elements"] += elements
        return self._coders[name]

    def _get_refinement_writer(self) -> ContainerWriter:
        if self._refinement is None:
            name = f"{self._base.path.stem}.refinement"
            self._refinement = ContainerWriter(self._directory, name, self._config.storage.fsync)
        return self._refinement

    def _add_raw(self, record: dict[str, Any], raw: memoryview, itemsize: int, logical: int) -> WrittenRecord:
        written = WrittenRecord(RecordRef(self.name, len(self._records)), logical, 0)
        self._records.append(record)

        def sized(size: int) -> None:
            written.base = size

        self._packs.add(record, raw, itemsize, sized)
        return written


def _fit_coder(config: DeltaConfig, counts: np.ndarray) -> Coder:
    if config.coder == "huffman":
        return HuffmanCoder.fit(counts, config.rearrange, config.run_length)
    return fit_fastest(counts)


def _chunk_fields(key: ChunkKey, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "fqn": key.fqn, "offsets": list(key.offsets), "shape": list(key.shape), "dtype": _dtype_name(dtype),
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
