"""Between DCP's items, metadata and results and those of a save."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dsq_ckpt.chunk import ChunkKey
from dsq_ckpt.dcp.staging import Payload, StagedTensor
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.session import Coded, Item, RankResult


def key_of(item: WriteItem) -> ChunkKey:
    """Name, offsets and shape of an item's chunk."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return ChunkKey(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))


def loader(item: WriteItem, planner: SavePlanner) -> Callable[[], Any]:
    """Gives the item's local tensor, or what was staged in its place."""
    return lambda: planner.resolve_data(item)


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
    return unflatten_state_dict(staged, mappings)


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


def planner_json(planner_data: Any) -> Any:
    """DCP's flattening paths as JSON; None for planners that keep other things."""
    if not isinstance(planner_data, dict):
        return None
    paths = {}
    for fqn, path in planner_data.items():
        if not isinstance(path, tuple) or not all(isinstance(part, str | int) for part in path):
            return None
        paths[fqn] = list(path)
    return paths
