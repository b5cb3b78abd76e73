"""A complete checkpoint opened for reading: codes along the chain, tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsq_ckpt.coding import coder_class, layered
from dsq_ckpt.coding.base import Coder
from dsq_ckpt.core.arrays import F32, I16, U32, Codes
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CodingError, CorruptCheckpoint
from dsq_ckpt.quantization.chunk import Dequantizer, add
from dsq_ckpt.quantization.codebook import Codebook
from dsq_ckpt.quantization.groups import QUANTIZABLE
from dsq_ckpt.quantization.layout import ParentModel
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from dsq_ckpt.quantization.moments import from_octave_units, from_roots
from dsq_ckpt.quantization.superstep import SuperStep
from dsq_ckpt.storage.container import Block
from dsq_ckpt.storage.files import CheckpointFiles, names_file
from dsq_ckpt.storage.layers import Layer, block_elements, decode_chain
from dsq_ckpt.storage.shard import RecordRef

_MOST_STEPS = 1 << 16
_MOST_EXPONENT = 100
FACTORS = frozenset({"unit", "root", "scales"})
"""Keys of a record by which its values are multiplied after they were dequantized."""


class Checkpoint(CheckpointFiles):
    """A checkpoint directory whose tensors can be decoded; see `CheckpointFiles`."""

    def __init__(self, directory: Path, *, lazy: bool = False, known: CheckpointFiles | None = None) -> None:
        super().__init__(directory, lazy=lazy, known=known)
        self._models: dict[tuple[str, str], tuple[Codebook, Coder]] = {}
        self._numbers: dict[str, I16] = {}

    def model(self) -> ParentModel:
        """Return the data of this checkpoint that a child needs of its parent."""
        with self.naming(self.manifest.index.name):
            books = {name: Codebook.from_json(tree) for name, tree in self.index["codebooks"].items()}
            return ParentModel(books, dict(self.index["exponents"]), self.manifest.depth)

    @names_file
    def codebook(self, ref: RecordRef) -> Codebook:
        """Return the codebook that a coded record was coded with."""
        return self._model(ref.file, self.record(ref)["group"])[0]

    @names_file
    def part_of(self, ref: RecordRef, refined: bool, first: int, last: int) -> slice | None:
        """Return which elements of a chunk to decode for those from `first` to `last`, exclusive; None: all.

        These are whole blocks. Where values stand beside the codes, in the order of these, where blocks of the chain
        differ in size, and in sums, all of a chunk is decoded.
        """
        record, steps = self.record(ref), set[int]()
        for place in (ref, self._measure_of(record)):
            if place is None or (place != ref and self.record(place)["type"] == "plain"):
                continue
            own = self.record(place)
            if own["type"] != "coded" or "residual" in own or _protected_count(own):
                return None
            steps |= {block_elements(self.reader(link.file)) for link in self.chain(place, "parent", ("coded",))}
        if refined and (name := f"{Path(ref.file).stem}.refinement") in self._sizes:
            steps.add(block_elements(self.reader(name)))
        step, count = max(steps), math.prod(record["shape"])
        found = slice(first // step * step, min(-(-last // step) * step, count))
        return None if len(steps) > 1 or found == slice(0, count) else found

    @names_file
    def codes(self, ref: RecordRef, workers: Workers, part: slice | None = None) -> Codes:
        """Return the codes of a chunk, decoded from its keyframe on; uint8, flat.

        Args:
            ref: its record.
            workers: threads.
            part: from `part_of`: only these elements are decoded, the others are undefined.

        Raises:
            CorruptCheckpoint: any record of the chain is missing, altered or does not fit.
        """
        merged = self.record(ref)["type"] == "merged"
        links = [ref] if merged else list(reversed(self.chain(ref, "parent", ("coded",))))
        count = math.prod(self.record(ref)["shape"])
        layers = [self._layer(link, count) for link in links]
        # One block through the whole chain while its codes are in the cache; all at once if blocks changed their size.
        sizes = {layer.step for layer in layers}
        step = sizes.pop() if len(sizes) == 1 else max(count, 1)
        out = np.empty(count, np.uint8)

        def work(start: int) -> None:
            decode_chain(layers, slice(start, min(start + step, count)), out)

        for _ in workers.map(work, range(0, count, step)[_blocks_of(part, step)]):
            pass
        return out

    @names_file
    def values(self, ref: RecordRef, workers: Workers) -> F32:
        """Return the values of a chunk without refinement, flat, before they are converted to its dtype.

        Raises:
            CorruptCheckpoint: any record of the chain is missing, altered or does not fit.
        """
        if self.record(ref)["type"] == "plain":
            return self._plain_values(ref, workers)
        codes = self.codes(ref, workers)
        out = np.empty(len(codes), np.float32)
        self._sum(ref, codes, False, workers, out)
        return out

    @names_file
    def tensor(
        self, ref: RecordRef, refined: bool, workers: Workers, codes: Codes | None = None,
        into: torch.Tensor | None = None, part: slice | None = None,
    ) -> torch.Tensor:
        """Return a chunk in the dtype and shape in which it was saved.

        Args:
            ref: its record.
            refined: use the refinement layer.
            codes: its codes, where they were decoded already.
            into: where the chunk is wanted; it is decoded there, and returned, if shape, dtype and layout allow.
            part: from `part_of`: only these elements are decoded, the others are undefined.
        """
        record = self.record(ref)
        shape, dtype = record["shape"], dtype_of(record["dtype"])
        if record["type"] == "plain":
            stored = dtype_of(record.get("stored", record["dtype"]))
            if record["size"] != math.prod(shape) * stored.itemsize:
                raise CorruptCheckpoint(f"'{record['fqn']}': {record['size']} bytes stored, shape {shape} promised")
            raw = bytearray(self._raw(ref.file, record))
            flat = torch.frombuffer(raw, dtype=stored) if raw else torch.empty(0, dtype=stored)
            return flat.view(shape).to(dtype)
        if record["type"] not in ("coded", "merged"):
            raise CorruptCheckpoint(f"record {ref.record} is of type {record['type']!r}, not a tensor")
        codes = self.codes(ref, workers, part) if codes is None else codes
        direct = into is not None and dtype == torch.float32 == into.dtype and into.device.type == "cpu"
        if direct and into is not None and into.is_contiguous() and list(into.shape) == shape:
            self._sum(ref, codes, refined, workers, into.view(-1).numpy(), part)
            self._times_roots(record, into.view(-1).numpy(), workers, part)
            return into
        values = np.empty(len(codes), np.float32)
        self._sum(ref, codes, refined, workers, values, part)
        self._times_roots(record, values, workers, part)
        return within(torch.from_numpy(values), dtype).view(shape)

    def _measure_of(self, record: dict[str, Any]) -> RecordRef | None:
        """Return the record of the second moments by whose roots first moments were divided, None if they were not."""
        if (name := record.get("root", record.get("unit"))) is None:
            return None
        ref = self.find(str(name), tuple(record["offsets"]))
        other = self.record(ref)
        if other["shape"] != record["shape"] or "unit" in other or "root" in other:
            raise CorruptCheckpoint(
                f"'{ref.file}' record {ref.record} does not fit {record['fqn']}, which is measured by it: "
                f"{other['fqn']} of shape {other['shape']}, expected {record['shape']}"
            )
        return ref

    def _times_roots(self, record: dict[str, Any], values: F32, workers: Workers, part: slice | None) -> None:
        """Multiply first moments by the roots of their second moments, if they were divided by these."""
        if (ref := self._measure_of(record)) is None:
            return
        if self.record(ref)["type"] == "plain":
            squares = self._plain_values(ref, workers)
        else:
            squares = np.empty(len(values), np.float32)
            self._sum(ref, self.codes(ref, workers, part), False, workers, squares, part)
        multiply = from_roots if "root" in record else from_octave_units  # which format version 4 had
        for _ in workers.map(lambda where: multiply(values[where], squares[where]), _slices(workers, values, part)):
            pass

    def _sum(
        self, ref: RecordRef, codes: Codes, refined: bool, workers: Workers, out: F32, part: slice | None = None
    ) -> None:
        """Decode a record with codes into `out`, float32 flat: the records it is added to, oldest first, then own."""
        for place, link in enumerate(reversed(self.chain(ref, "residual", ("coded", "merged", "plain")))):
            record = self.record(link)
            factors = sorted(FACTORS & record.keys())
            if len(factors) > 1 or (factors and (place or link != ref)):
                raise CorruptCheckpoint(
                    f"'{link.file}' record {link.record} has {factors}, expected one of them, and none in a sum"
                )
            if record["type"] == ("plain" if place else "merged"):
                raise CorruptCheckpoint(
                    f"'{self.directory / link.file}' record {link.record} does not fit its chain: {record['type']}"
                )
            if record["type"] == "plain":
                out[:] = self._plain_values(link, workers)
                continue
            own = codes if link == ref else self.codes(link, workers)
            if record["type"] == "merged":
                self.superstep(link, own).add_to(out, workers)
            else:
                self._values(link, record, own, refined and link == ref, workers, out, place > 0, part)
            if "scales" in record:
                self._times_scales(link, record, out, workers, part)

    @names_file
    def _times_scales(
        self, ref: RecordRef, record: dict[str, Any], values: F32, workers: Workers, part: slice | None
    ) -> None:
        """Multiply second moments by the scales of their rows and columns."""
        numbers = self._scale_numbers(ref.file)
        first, by_row, by_column = record["scales"]
        shape = record["shape"]
        rows = shape[0] if shape else 1
        columns = len(values) // max(rows, 1)
        fits = by_row in (0, rows) and by_column in (0, columns)
        if not fits or type(first) is not int or not 0 <= first <= len(numbers) - by_row - by_column:
            raise CorruptCheckpoint(
                f"'{ref.file}' record {ref.record} of shape {shape} has scales {record['scales']}, expected a place "
                f"among {len(numbers)} numbers, {rows} or 0 for rows and {columns} or 0 for columns"
            )
        end = first + by_row
        scales = MatrixScales(columns, numbers[first:end], numbers[end : end + by_column])
        for _ in workers.map(
            lambda where: scales.multiply(values[where], where.start), _slices(workers, values, part)
        ):
            pass

    def _scale_numbers(self, file: str) -> I16:
        """Return the numbers of all scales of a file."""
        if file not in self._numbers:
            block, count = self.reader(file).contents["scales"]
            if type(count) is not int or count < 0:
                raise CorruptCheckpoint(f"'{file}' has {count!r} numbers of scales")
            self._numbers[file] = np.frombuffer(self._unshuffled(file, Block(*block), 2, 2 * count), np.int16)
        return self._numbers[file]

    @names_file
    def superstep(self, ref: RecordRef, codes: Codes) -> SuperStep:
        """Return the value that a record with codes adds, by code, without refinement.

        Raises:
            CorruptCheckpoint: it is altered, or does not fit itself.
        """
        record = self.record(ref)
        if record["type"] == "coded":
            book, protected = self.codebook(ref), self._protected(ref.file, record)
            levels = np.empty((1, len(book.levels)), np.float32)
            dequantizer = Dequantizer(book, _exponent(record), 0)
            dequantizer.block(np.arange(levels.size, dtype=np.uint8), protected[:0], None, levels[0])
            return SuperStep.checked(codes, levels, protected.view(np.float32)[None], f"'{record['fqn']}'")
        steps, count = record["steps"], _protected_count(record)
        if not 1 <= len(steps) <= _MOST_STEPS:
            raise CorruptCheckpoint(f"'{record['fqn']}' stands for {len(steps)} differences")
        own = np.empty((len(steps), count), np.float32)
        if count:
            raw = self._unshuffled(ref.file, Block(*record["protected"]), 4, own.nbytes)
            own = np.frombuffer(raw, np.float32).reshape(own.shape)
        return SuperStep.checked(codes, steps, own, f"'{record['fqn']}'")

    @names_file
    def _plain_values(self, ref: RecordRef, workers: Workers) -> F32:
        tensor = self.tensor(ref, False, workers)
        if tensor.dtype not in QUANTIZABLE:
            raise CorruptCheckpoint(f"record {ref.record} does not fit its chain: {tensor.dtype}")
        values: F32 = tensor.to(torch.float32).view(-1).numpy()
        return values

    @names_file
    def _values(
        self, ref: RecordRef, record: dict[str, Any], codes: Codes, refined: bool, workers: Workers, out: F32,
        onto: bool, part: slice | None,
    ) -> None:
        """Dequantize a record into `out`, float32 flat, its blocks in parallel; `onto`: add it to what is there."""
        book, protected = self.codebook(ref), self._protected(ref.file, record)
        name = f"{Path(ref.file).stem}.refinement"
        entry = self.reader(name).contents["records"].get(str(ref.record)) if refined and name in self._sizes else None
        bits = 0 if entry is None else entry["bits"]
        if entry is not None and not (type(bits) is int and 1 <= bits <= 8):
            raise CorruptCheckpoint(f"'{self.directory / name}' record {ref.record} has {bits} bits per element")
        if entry is not None and len(protected):
            raw = self._unshuffled(name, Block(*entry["protected"]), 4, 4 * len(protected))
            protected = np.frombuffer(raw, np.uint32)
        source = self.reader(ref.file if entry is None else name)
        step = block_elements(source)
        starts = range(0, len(codes), step)
        if entry is not None and len(entry["blocks"]) != len(starts):
            raise CorruptCheckpoint(f"'{source.path}': {len(entry['blocks'])} blocks for {len(starts)} of codes")
        before = [0]
        for start in starts:
            count = int(np.count_nonzero(codes[start : start + step] == book.protected)) if len(protected) else 0
            before.append(before[-1] + count)
        if before[-1] != len(protected):
            raise CorruptCheckpoint(
                f"'{record['fqn']}': {before[-1]} codes are protected but {len(protected)} protected values are stored"
            )
        dequantizer = Dequantizer(book, _exponent(record), bits)

        def work(place: int) -> None:
            where = slice(place * step, (place + 1) * step)
            symbols = None
            try:
                if entry is not None:
                    symbols = np.empty(len(codes[where]), np.uint8)
                    layered.decode(source.read(Block(*entry["blocks"][place])), codes[where], bits, symbols)
                piece = np.empty_like(out[where]) if onto else out[where]
                dequantizer.block(codes[where], protected[before[place] : before[place + 1]], symbols, piece)
                if onto:
                    add(out[where], piece, out[where])
            except (CodingError, ValueError) as error:
                raise CorruptCheckpoint(f"'{source.path}', {record['fqn']}: {error}") from error

        for _ in workers.map(work, range(len(starts))[_blocks_of(part, step)]):
            pass

    def _model(self, file: str, group: str) -> tuple[Codebook, Coder]:
        key = (file, group)
        if key not in self._models:
            tree = self.reader(file).contents["groups"][group]
            self._models[key] = (Codebook.from_json(tree["codebook"]), self._coder(file, tree))
        return self._models[key]

    def _coder(self, file: str, tree: dict[str, Any]) -> Coder:
        with self.naming(file):
            return coder_class(tree["coder"]).from_bytes(self.reader(file).read(Block(*tree["model"])))

    @names_file
    def _layer(self, ref: RecordRef, count: int) -> Layer:
        """Return the codes of a record of `count` elements, for its place in a chain."""
        record, reader = self.record(ref), self.reader(ref.file)
        merged = record["type"] == "merged"
        coder = self._coder(ref.file, record) if merged else self._model(ref.file, record["group"])[1]
        step = block_elements(reader)
        blocks = [None if block is None else Block(*block) for block in record["blocks"]]
        if len(blocks) != -(-count // step):
            raise CorruptCheckpoint(f"'{reader.path}': {len(blocks)} blocks of {step} codes for {count} elements")
        return Layer(reader, coder, step, blocks)

    def _protected(self, file: str, record: dict[str, Any]) -> U32:
        if not (count := _protected_count(record)):
            return np.empty(0, np.uint32)
        raw = self._unshuffled(file, Block(*record["protected"]), 2, 2 * count)
        return np.frombuffer(raw, np.uint16).astype(np.uint32) << np.uint32(16)


def _blocks_of(part: slice | None, step: int) -> slice:
    """Return which blocks of `step` elements a part of a chunk consists of."""
    return slice(None) if part is None else slice(part.start // step, -(-part.stop // step))


def _slices(workers: Workers, values: F32, part: slice | None) -> Iterator[slice]:
    """Yield slices of a part of a chunk, for threads to work on."""
    start, stop = (0, len(values)) if part is None else (part.start, part.stop)
    return (slice(start + one.start, start + one.stop) for one in workers.blocks(stop - start))


def _protected_count(record: dict[str, Any]) -> int:
    count = record.get("protected_count", 0)
    if type(count) is not int or not 0 <= count <= math.prod(record["shape"]):
        raise CorruptCheckpoint(f"'{record['fqn']}' of shape {record['shape']} has {count} protected values")
    return count


def _exponent(record: dict[str, Any]) -> float:
    """Return log2 of the factor that a record's levels are multiplied by."""
    parts = record.get("exponent", 0), record.get("shift", 0)
    for name, part in zip(("exponent", "shift"), parts, strict=True):
        if type(part) not in (int, float) or not -_MOST_EXPONENT <= part <= _MOST_EXPONENT:
            raise CorruptCheckpoint(f"'{record['fqn']}' has the {name} {part!r}")
    return float(sum(parts))


def within(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert finite float32 values to another dtype; values beyond its largest number become that number."""
    if dtype in (torch.float32, torch.float64):
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of this name.

    Raises:
        CorruptCheckpoint: there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(f"unknown dtype {json.dumps(name)}: written by a newer torch?")
    return dtype
