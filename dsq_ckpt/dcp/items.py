"""Between DCP's items, metadata and results and those of a save."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dsq_ckpt.chunk import ChunkKey
from dsq_ckpt.dcp.staging import Payload, StagedTensor
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.nesting import Nesting
from dsq_ckpt.parts import Part
from dsq_ckpt.session import Coded, Item, RankResult


def key_of(item: WriteItem) -> ChunkKey:
    """Name, offsets and shape of an item's chunk."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return ChunkKey(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))


def parts_of(write_items: Iterable[WriteItem], planner: SavePlanner | None = None) -> list[Part]:
    """The tensors among DCP's items; with a planner, `load` gives the local tensor, or what was staged in its place."""
    return [
        Part(
            key_of(item), tuple(item.tensor_data.size), item.tensor_data.properties.dtype,
            partial(_resolved, planner, item),
        )
        for item in write_items if item.tensor_data is not None
    ]


def _resolved(planner: SavePlanner | None, item: WriteItem) -> Any:
    assert planner is not None, "parts that are only planned hold no data"
    return planner.resolve_data(item)


def objects_of(write_items: Iterable[WriteItem], planner: SavePlanner) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of what is no tensor."""
    return (
        (item.index.fqn, planner.resolve_data(item).getvalue())  # type: ignore[union-attr]
        for item in write_items if item.type == WriteItemType.BYTE_IO
    )


def staged_payloads(
    items: list[Item], staged: frozenset[ChunkKey]
) -> tuple[Iterator[Coded], list[Item], dict[ChunkKey, ChunkKey]]:
    """What `stage` left of the items: coded, plain, and those that are tied to another."""
    coded: list[Coded] = []
    plain: list[Item] = []
    tied: dict[ChunkKey, ChunkKey] = {}
    seen: dict[int, ChunkKey] = {}
    alive: list[Any] = []
    for item in items:
        payload: Any = item.load()
        alive.append(payload)  # else its identity may be given to the next
        if (first := seen.setdefault(id(payload), item.key)) != item.key:
            tied[item.key] = first
        elif isinstance(payload, Coded):
            coded.append(payload)
        elif item.key in staged:
            raise SaveFailed("this writer holds an asynchronous save that failed; use a new DSQStorageWriter for each")
        else:
            plain.append(item)
    return iter(coded), plain, tied


def staged_state_dict(
    state_dict: dict[str, Any], items: list[WriteItem], payloads: dict[ChunkKey, Payload]
) -> dict[str, Any]:
    """The state dict with every tensor replaced by its staged chunks and every object copied."""
    flat, mappings = flatten_state_dict(state_dict)
    by_name: dict[str, list[WriteItem]] = {}
    for item in items:
        if item.tensor_data is not None:
            by_name.setdefault(item.index.fqn, []).append(item)
    staged: dict[str, Any] = {}
    for fqn, value in flat.items():
        if isinstance(value, torch.Tensor):  # without items where another rank writes it: its place must remain
            mine = by_name.get(fqn, [])
            staged[fqn] = StagedTensor(value.size(), value.dtype, mine, [payloads[key_of(item)] for item in mine])
        else:
            staged[fqn] = copy.deepcopy(value)
    return Nesting.of(state_dict, mappings).nested(staged)


def write_results(items: list[WriteItem], result: RankResult) -> list[WriteResult]:
    """DCP's record of each item; the first one carries what the rank wrote as a whole."""
    results: list[WriteResult] = []
    for item in items:
        key = item.index.fqn if item.tensor_data is None else key_of(item)
        written = result.written[key]
        data = {"rank": result} if not results else {}
        results.append(WriteResult(item.index, written.base + written.refinement, data))
    return results


def inventory(metadata: Metadata) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Tensors with their chunks, and names of objects, of a whole save."""
    tensors, objects = {}, []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[fqn] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."), "shape": list(entry.size),
                "chunks": [ChunkKey(fqn, tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks],
            }
        else:
            objects.append(fqn)
    return tensors, objects


def planner_json(planner_data: Any) -> dict[str, Any]:
    """The keys of the index by which nested state dicts are put together; null for planners that keep other things."""
    unknown: dict[str, Any] = {"planner": None, "typed_keys": [], "empty_dicts": None}
    if not isinstance(planner_data, dict):
        return unknown
    for path in planner_data.values():
        if not isinstance(path, tuple) or not all(isinstance(part, str | int) for part in path):
            return unknown
    return (planner_data if isinstance(planner_data, Nesting) else Nesting(planner_data)).as_json()
