"""Decoding of a complete checkpoint: codes along the chain, values, tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsq_ckpt.coding import coder_class, decoding_tasks
from dsq_ckpt.coding.base import Coder
from dsq_ckpt.coding.decoding_tasks import DecodingTask
from dsq_ckpt.coding.scales import unpack_scales
from dsq_ckpt.core.aliases import flat_bytes
from dsq_ckpt.core.arrays import F32, I16, U32, Codes
from dsq_ckpt.core.workers import Scratch, Workers
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.quantization.codebook import Codebook
from dsq_ckpt.quantization.dequantizer import Dequantizer, add_residual
from dsq_ckpt.quantization.groups import QUANTIZABLE
from dsq_ckpt.quantization.layout import ParentModel
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from dsq_ckpt.quantization.superstep import SuperStep
from dsq_ckpt.storage.chain_decoding import ChainRecord, decode_chain, read_block_elements
from dsq_ckpt.storage.chunk_load import (
    NO_REUSE,
    ChunkDecoder,
    ChunkLoad,
    CodeReuse,
    RecordDecoder,
    SecondMomentFactor,
    allocate_output,
    copy_clamped,
    decode_all,
    decode_coded,
    decode_nothing,
    multiply_by_second_moments,
    split_blocks,
)
from dsq_ckpt.storage.container import Block
from dsq_ckpt.storage.files import CheckpointFiles, translate_record_errors
from dsq_ckpt.storage.packs import PackRef
from dsq_ckpt.storage.record_fields import (
    FACTOR_KEYS,
    check_factors,
    get_exponent,
    get_protected_count,
    get_root_multiplier,
    parse_dtype,
)
from dsq_ckpt.storage.refinement_layers import read_refinement
from dsq_ckpt.storage.shard import RecordRef

_MAX_STEPS = 1 << 16
_MAX_DEQUANTIZERS = 256  # cached, of 10 KB each: second moments have one per chunk
_SMALL_BYTES = 1 << 16  # bytes of an exact tensor that is read at once: to start a thread takes longer


class Checkpoint(CheckpointFiles):
    """Checkpoint opened for decoding; see `CheckpointFiles`."""

    def __init__(self, directory: Path, *, lazy: bool = False, cached: CheckpointFiles | None = None) -> None:
        super().__init__(directory, lazy=lazy, cached=cached)
        self._codebooks: dict[tuple[str, str], Codebook] = {}  # of the chunks, not of their chains
        self._coders: dict[tuple[str, str], Coder] = {}
        self._dequantizers: dict[tuple[str, str, float, int], Dequantizer] = {}
        self._scale_numbers: dict[str, I16] = {}

    def to_parent_model(self) -> ParentModel:
        """Return the data that a save against this checkpoint needs."""
        with self.translate_errors(self.manifest.index.name):
            return ParentModel.from_index(self.index, self.manifest.depth)

    @translate_record_errors
    def read_codebook(self, ref: RecordRef) -> Codebook:
        """Return the codebook of a coded record."""
        key = (ref.file, self.read_record(ref)["group"])
        if key not in self._codebooks:
            self._codebooks[key] = Codebook.from_json(self.open_reader(key[0]).contents["groups"][key[1]]["codebook"])
        return self._codebooks[key]

    @translate_record_errors
    def decode_codes(self, ref: RecordRef, workers: Workers) -> Codes:
        """Return the codes of a chunk, decoded from its keyframe on; uint8, flat.

        Raises:
            CorruptCheckpoint: any record of the chain is missing, altered or does not fit.
        """
        chain, count = self.read_chain(ref), math.prod(self.read_record(ref)["shape"])
        # Each block passes the whole chain while its codes are in the cache, unless block sizes differ.
        sizes = {link.step for link in chain}
        step = sizes.pop() if len(sizes) == 1 else max(count, 1)
        out = np.empty(count, np.uint8)

        def work(span: slice) -> None:
            decoding_tasks.run_task(decode_chain(chain, span, out[span], workers.scratch))

        for _ in workers.map(work, split_blocks(count, step)):
            pass
        return out

    @translate_record_errors
    def decode_values(self, ref: RecordRef, workers: Workers) -> F32:
        """Return the values of a chunk without refinement, flat, before the conversion to its dtype.

        Raises:
            CorruptCheckpoint: any record of the chain is missing, altered or does not fit.
        """
        if self.read_record(ref)["type"] == "plain":
            return self._decode_plain(ref, workers)
        codes = self.decode_codes(ref, workers)
        out = np.empty(len(codes), np.float32)
        self._decode_sum(ref, codes, False, workers, out)
        return out

    @translate_record_errors
    def decode_tensor(
        self, ref: RecordRef, refined: bool, workers: Workers, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a chunk in its saved dtype and shape; for the arguments see `prepare_load`."""
        (load,) = decode_all([self.prepare_load(ref, refined, workers, into)], workers)
        return load.tensor

    @translate_record_errors
    def prepare_load(
        self, ref: RecordRef, refined: bool, workers: Workers, into: torch.Tensor | None = None,
        span: tuple[int, int] | None = None, reuse: CodeReuse = NO_REUSE,
    ) -> ChunkLoad:
        """Return the load of a chunk for `decode_all`, which decodes chunks in parallel.

        Sums, and chains with different block sizes, are decoded here, in memory for all their codes and values.

        Args:
            ref: record of the chunk.
            refined: use the refinement layer.
            workers: threads.
            into: destination, used if its shape, dtype and layout fit.
            span: first and last element to load, the last exclusive; None: all. Other blocks are not read, unless the
                chunk has protected values, which are stored in the order of the codes.
            reuse: codes that are decoded already, and whether those of this chunk are kept.
        """
        record, naming = self.read_record(ref), partial(self.translate_errors, ref.file)
        shape, dtype = record["shape"], parse_dtype(record["dtype"])
        if record["type"] not in ("coded", "merged", "plain"):
            raise CorruptCheckpoint(f"record {ref.record} is of type {record['type']!r}, not a tensor")
        if record["type"] == "plain":
            stored = parse_dtype(record.get("stored", record["dtype"]))
            if record["size"] != math.prod(shape) * stored.itemsize:
                raise CorruptCheckpoint(f"'{record['fqn']}': {record['size']} bytes stored, shape {shape} promised")
            out = allocate_output(shape, dtype, into)
            read = partial(self._read_plain, ref, stored)
            if record["size"] > _SMALL_BYTES:
                return ChunkLoad(out, [slice(0, out.numel())], read, naming)
            read(slice(None), out.view(-1), workers.scratch)
            return ChunkLoad(out, [], read, naming)
        if (chunk := self._prepare_coded_chunk(ref, refined, workers, reuse, span)) is not None:
            out = allocate_output(shape, dtype, into)
            return ChunkLoad(
                out, chunk.select_blocks(span), partial(decode_coded, chunk), naming, chunk.codes, chunk.second_moments
            )
        codes = self.decode_codes(ref, workers)
        values = np.empty(len(codes), np.float32)
        self._decode_sum(ref, codes, refined, workers, values)
        self._multiply_by_roots(record, values, workers)
        out = allocate_output(shape, dtype, into)
        copy_clamped(torch.from_numpy(values), out.view(-1))
        return ChunkLoad(out, [], decode_nothing, naming, codes if reuse.keep and record["type"] == "coded" else None)

    def _read_plain(self, ref: RecordRef, stored: torch.dtype, _: slice, out: torch.Tensor, __: Scratch) -> None:
        """Read an exactly stored chunk as a whole into a flat tensor."""
        raw = self._read_raw(ref.file, self.read_record(ref))
        if out.dtype == stored and raw:
            flat_bytes(out).numpy()[:] = np.frombuffer(raw, np.uint8)
        elif raw:
            copy_clamped(torch.frombuffer(bytearray(raw), dtype=stored), out)

    def _prepare_coded_chunk(
        self, ref: RecordRef, refined: bool, workers: Workers, reuse: CodeReuse, span: tuple[int, int] | None
    ) -> ChunkDecoder | None:
        """Return a chunk for block-wise decoding; None if that is not possible."""
        record = self.read_record(ref)
        if record["type"] != "coded" or "residual" in record:
            return None
        values = self._make_record_decoder(ref, record, refined)
        span = None if len(values.protected) else span  # protected values take all blocks
        known = reuse.find(ref, span)
        chain = self.read_chain(ref) if known is None else []
        if any(link.step != values.step for link in chain):
            return None
        factor: Callable[[slice, F32, Scratch], DecodingTask | None] | None = None
        if (measure := self._find_second_moments(record)) is not None:
            times = get_root_multiplier(record)
            if self.read_record(measure)["type"] == "plain":
                factor = partial(multiply_by_second_moments, times, self._decode_plain(measure, workers))
            else:
                measure_chunk = self._prepare_coded_chunk(measure, False, workers, reuse, span)
                if measure_chunk is None or measure_chunk.step != values.step:
                    return None
                factor = SecondMomentFactor(measure, measure_chunk, times)
        count = math.prod(record["shape"])
        codes = np.empty(count, np.uint8) if reuse.keep and chain else known
        return ChunkDecoder(chain, values, codes, count, factor)

    def _find_second_moments(self, record: dict[str, Any]) -> RecordRef | None:
        """Return the record of the second moments by whose roots a record was divided; None if it was not."""
        if (name := record.get("root", record.get("unit"))) is None:
            return None
        ref = self.find_record(str(name), tuple(record["offsets"]))
        measure_record = self.read_record(ref)
        if measure_record["shape"] != record["shape"] or "unit" in measure_record or "root" in measure_record:
            raise CorruptCheckpoint(
                f"'{ref.file}' record {ref.record} does not fit {record['fqn']}, which is measured by it: "
                f"{measure_record['fqn']} of shape {measure_record['shape']}, expected {record['shape']}"
            )
        return ref

    def _multiply_by_roots(self, record: dict[str, Any], values: F32, workers: Workers) -> None:
        """Multiply first moments by the roots of their second moments if they were divided by these."""
        if (ref := self._find_second_moments(record)) is None:
            return
        if self.read_record(ref)["type"] == "plain":
            squares = self._decode_plain(ref, workers)
        else:
            squares = np.empty(len(values), np.float32)
            self._decode_sum(ref, self.decode_codes(ref, workers), False, workers, squares)
        times = get_root_multiplier(record)
        for _ in workers.map(lambda span: times(values[span], squares[span]), workers.blocks(len(values))):
            pass

    def _decode_sum(self, ref: RecordRef, codes: Codes, refined: bool, workers: Workers, out: F32) -> None:
        """Decode a coded record into `out`, float32, flat: the sum of its residual chain, from the oldest record on."""
        for index, link in enumerate(reversed(self.follow_chain(ref, "residual", ("coded", "merged", "plain")))):
            record = self.read_record(link)
            own_values = link == ref and not index and record["type"] == "coded"
            check_factors(link, record, FACTOR_KEYS if own_values else ())
            if record["type"] == ("plain" if index else "merged"):
                raise CorruptCheckpoint(
                    f"'{self.directory / link.file}' record {link.record} does not fit its chain: {record['type']}"
                )
            if record["type"] == "plain":
                out[:] = self._decode_plain(link, workers)
                continue
            own = codes if link == ref else self.decode_codes(link, workers)
            if record["type"] == "merged":
                self.read_superstep(link, own).add_to(out, workers)
            else:
                self._dequantize(link, own, refined and link == ref, workers, out, index > 0)

    @translate_record_errors
    def _read_scales(self, ref: RecordRef, record: dict[str, Any]) -> MatrixScales | None:
        """Return the scales of rows and columns of a record of second moments; None if it has none."""
        if "scales" not in record:
            return None
        numbers = self.read_scale_numbers(ref.file)
        first, by_row, by_column = record["scales"]
        shape = record["shape"]
        rows = shape[0] if shape else 1
        columns = math.prod(shape) // max(rows, 1)
        fits = by_row in (0, rows) and by_column in (0, columns)
        if not fits or type(first) is not int or not 0 <= first <= len(numbers) - by_row - by_column:
            raise CorruptCheckpoint(
                f"'{ref.file}' record {ref.record} of shape {shape} has scales {record['scales']}, expected a place "
                f"among {len(numbers)} numbers, {rows} or 0 for rows and {columns} or 0 for columns"
            )
        end = first + by_row
        return MatrixScales(columns, numbers[first:end], numbers[end : end + by_column])

    def read_scale_numbers(self, file: str) -> I16:
        """Return the numbers of all scales of a file that has scales."""
        if file not in self._scale_numbers:
            number, count = self.open_reader(file).contents["scales"]
            if type(count) is not int or count < 0:
                raise CorruptCheckpoint(f"'{file}' has {count!r} numbers of scales")
            if isinstance(number, list):  # up to format version 7
                numbers = np.frombuffer(self._read_unshuffled(file, Block(*number), 2, 2 * count), np.int16)
            elif self.pack_fits(ref := PackRef(file, number), 2 * count, 2):
                numbers = unpack_scales(self.read_pack(ref))
            else:
                raise CorruptCheckpoint(f"'{file}' has {count} scales in a pack of {self.pack_size(ref)} bytes")
            self._scale_numbers[file] = numbers
        return self._scale_numbers[file]

    @translate_record_errors
    def read_superstep(self, ref: RecordRef, codes: Codes) -> SuperStep:
        """Return the values that a record adds, by code, without refinement.

        Raises:
            CorruptCheckpoint: the record is altered or inconsistent.
        """
        record = self.read_record(ref)
        if record["type"] == "coded":
            book, protected = self.read_codebook(ref), self._read_protected(ref.file, record)
            levels = np.empty((1, len(book.levels)), np.float32)
            dequantizer = Dequantizer(book, get_exponent(record), 0)
            dequantizer.block(np.arange(levels.size, dtype=np.uint8), protected[:0], None, levels[0])
            return SuperStep.from_stored(codes, levels, protected.view(np.float32)[None], f"'{record['fqn']}'")
        steps, count = record["steps"], get_protected_count(record)
        if not 1 <= len(steps) <= _MAX_STEPS:
            raise CorruptCheckpoint(f"'{record['fqn']}' stands for {len(steps)} differences")
        escaped = np.empty((len(steps), count), np.float32)
        if count:
            raw = self._read_unshuffled(ref.file, Block(*record["protected"]), 4, escaped.nbytes)
            escaped = np.frombuffer(raw, np.float32).reshape(escaped.shape)
        return SuperStep.from_stored(codes, steps, escaped, f"'{record['fqn']}'")

    @translate_record_errors
    def _decode_plain(self, ref: RecordRef, workers: Workers) -> F32:
        tensor = self.decode_tensor(ref, False, workers)
        if tensor.dtype not in QUANTIZABLE:
            raise CorruptCheckpoint(f"record {ref.record} does not fit its chain: {tensor.dtype}")
        values: F32 = tensor.to(torch.float32).view(-1).numpy()
        return values

    @translate_record_errors
    def _dequantize(
        self, ref: RecordRef, codes: Codes, refined: bool, workers: Workers, out: F32, onto: bool
    ) -> None:
        """Dequantize a record into `out`, float32, flat, its blocks in parallel; with `onto` add it to `out`."""
        values = self._make_record_decoder(ref, self.read_record(ref), refined)
        blocks = list(split_blocks(len(codes), values.step))
        before = np.cumsum([0, *(values.count_protected(codes[span]) for span in blocks)])
        values.check_protected_count(int(before[-1]))

        def work(index: int) -> None:
            span = blocks[index]
            piece = np.empty_like(out[span]) if onto else out[span]
            protected = slice(before[index], before[index + 1])
            decoding_tasks.run_task(values.decode(span, codes[span], protected, piece, workers.scratch))
            if onto:
                add_residual(out[span], piece, out[span])

        for _ in workers.map(work, range(len(blocks))):
            pass

    @translate_record_errors
    def _make_record_decoder(self, ref: RecordRef, record: dict[str, Any], refined: bool) -> RecordDecoder:
        """Return the decoder from the codes of a record to values."""
        check_factors(ref, record, FACTOR_KEYS)
        book, protected = self.read_codebook(ref), self._read_protected(ref.file, record)
        layers = read_refinement(self, ref) if refined else []
        bits = layers[0].bits if layers else 0
        if layers and len(protected):
            entry = layers[0].source.contents["records"][str(ref.record)]
            raw = self._read_unshuffled(layers[0].source.path.name, Block(*entry["protected"]), 4, 4 * len(protected))
            protected = np.frombuffer(raw, np.uint32)
        source = layers[0].source if layers else self.open_reader(ref.file)
        step = read_block_elements(source)
        key = ref.file, record["group"], get_exponent(record), bits
        if (dequantizer := self._dequantizers.get(key)) is None:
            if len(self._dequantizers) >= _MAX_DEQUANTIZERS:
                self._dequantizers.clear()
            dequantizer = self._dequantizers[key] = Dequantizer(book, get_exponent(record), bits)
        return RecordDecoder(
            source, record["fqn"], step, layers, dequantizer, book.protected, protected,
            self._read_scales(ref, record),
        )

    def _get_coder(self, file: str, group: str) -> Coder:
        key = (file, group)
        if key not in self._coders:
            self._coders[key] = self._read_coder(file, self.open_reader(file).contents["groups"][group])
        return self._coders[key]

    def _read_coder(self, file: str, tree: dict[str, Any]) -> Coder:
        with self.translate_errors(file):
            return coder_class(tree["coder"]).from_bytes(self.open_reader(file).read(Block(*tree["model"])))

    @translate_record_errors
    def read_chain(self, ref: RecordRef) -> list[ChainRecord]:
        """Return the records that the codes of a chunk are decoded from, from its keyframe on."""
        count = math.prod(self.read_record(ref)["shape"])
        if self.read_record(ref)["type"] == "merged":
            return [self._read_chain_record(ref, count)]
        return [self._read_chain_record(link, count) for link in reversed(self.follow_chain(ref, "parent", ("coded",)))]

    @translate_record_errors
    def _read_chain_record(self, ref: RecordRef, count: int) -> ChainRecord:
        """Return a record of `count` codes as part of a chain."""
        record, reader = self.read_record(ref), self.open_reader(ref.file)
        merged = record["type"] == "merged"
        coder = self._read_coder(ref.file, record) if merged else self._get_coder(ref.file, record["group"])
        step = read_block_elements(reader)
        blocks = [None if block is None else Block(*block) for block in record["blocks"]]
        if len(blocks) != -(-count // step):
            raise CorruptCheckpoint(f"'{reader.path}': {len(blocks)} blocks of {step} codes for {count} elements")
        return ChainRecord(reader, coder, step, blocks)

    def _read_protected(self, file: str, record: dict[str, Any]) -> U32:
        if not (count := get_protected_count(record)):
            return np.empty(0, np.uint32)
        raw = self._read_unshuffled(file, Block(*record["protected"]), 2, 2 * count)
        return np.frombuffer(raw, np.uint16).astype(np.uint32) << np.uint32(16)
