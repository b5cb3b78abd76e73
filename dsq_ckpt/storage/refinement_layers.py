"""Layers of refinement of a chunk: its own, and the older one to which its blocks may be differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dsq_ckpt.core.workers import Scratch
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage.chain_decoding import read_block_elements
from dsq_ckpt.storage.container import Block, ContainerReader
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.shard import RecordRef


class RefinementLayer(NamedTuple):
    """Refinement of a chunk in a file: its blocks, the bits of a symbol, and the elements of a block."""

    source: ContainerReader
    blocks: list[Any]
    bits: int
    step: int


def get_refinement_name(base_name: str) -> str:
    """Return the name of the refinement file of a base file."""
    return f"{Path(base_name).stem}.refinement"


def read_refinement(files: CheckpointFiles, ref: RecordRef) -> list[RefinementLayer]:
    """Return the layers of refinement that a coded record is decoded with; none without refinement.

    The first is its own, the second the older one to which its blocks may be differences.

    Raises:
        CorruptCheckpoint: the older layer is missing, or a layer does not fit.
    """
    if not files.names_file(name := get_refinement_name(ref.file)):
        return []
    with files.translate_errors(name):
        entry = files.open_reader(name).contents["records"].get(str(ref.record))
        if entry is None:
            return []
        count = math.prod(files.read_record(ref)["shape"])
        layers = [_read_layer(files, name, entry, count)]
        if "older" in entry:
            file, record = entry["older"]
            if file != f"{Path(file).stem}.dsq":
                raise CorruptCheckpoint(f"'{name}' is the difference to {str(file)[:80]!r}, not to a base file")
            older_name = get_refinement_name(file)
            older = files.open_reader(older_name).contents["records"][str(record)]
            layers.append(_read_layer(files, older_name, older, count))
            if layers[0].step != layers[1].step:
                raise CorruptCheckpoint(f"'{name}' has blocks of {layers[0].step} elements, the older one others")
        return layers


def _read_layer(files: CheckpointFiles, name: str, entry: dict[str, Any], count: int) -> RefinementLayer:
    source = files.open_reader(name)
    step = read_block_elements(source)
    layer = RefinementLayer(source, entry["blocks"], entry["bits"], step)
    if type(layer.bits) is not int or not 1 <= layer.bits <= 8:
        raise CorruptCheckpoint(f"'{source.path}' has a record with {layer.bits} bits per element")
    if len(layer.blocks) != -(-count // step):
        raise CorruptCheckpoint(f"'{source.path}': {len(layer.blocks)} blocks for {-(-count // step)} of codes")
    return layer


def read_layers(
    layers: Iterable[RefinementLayer], index: int, scratch: Scratch
) -> Iterator[tuple[bytes | memoryview, int]]:
    """Yield a block of each layer, in memory of the thread that the next one reuses, and the bits of its symbols."""
    for layer in layers:
        yield layer.source.borrow(Block(*layer.blocks[index]), scratch), layer.bits
