"""Conversions between DCP's items, metadata and results and those of this package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from dsq_ckpt.core.tensor_subclasses import name_object_errors
from dsq_ckpt.dcp.nested_planners import NestedSavePlanner
from dsq_ckpt.engine.commit import SaveContents
from dsq_ckpt.engine.local_state import LocalShard
from dsq_ckpt.engine.writing import RankResult
from dsq_ckpt.errors import SaveFailed, described
from dsq_ckpt.quantization.chunk import ChunkKey

_Result = TypeVar("_Result")
_LOOKUP_METHODS = ("resolve_data", "lookup_object", "transform_object")
"""Methods by which DCP's planner and `NestedSavePlanner` return tensors of the state dict unchanged."""


def get_chunk_key(item: WriteItem) -> ChunkKey:
    """Return name, offsets and shape of an item's chunk."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return ChunkKey(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))


def get_item_name(item: WriteItem) -> ChunkKey | str:
    """Return the chunk key of a tensor's item, or the name of an object."""
    return item.index.fqn if item.tensor_data is None else get_chunk_key(item)


def make_shards(write_items: Iterable[WriteItem], planner: SavePlanner | None = None) -> list[LocalShard]:
    """Return the tensor chunks among DCP's items.

    Args:
        write_items: items of one rank.
        planner: planner by which `LocalShard.load` returns the local tensor or its staged payload; None: shards
            without data.

    Raises:
        SaveFailed: a shape is not of numbers, as of a nested tensor of the layout torch.jagged; the message names it.
    """
    kind = type(planner)
    is_view = issubclass(kind, DefaultSavePlanner) and all(
        getattr(kind, name) in (getattr(DefaultSavePlanner, name), getattr(NestedSavePlanner, name))
        for name in _LOOKUP_METHODS
    )
    return [
        LocalShard(
            get_chunk_key(item), _get_shape(item), item.tensor_data.properties.dtype,
            partial(_resolve, planner, item), partial(_resolve_chunk_of, planner, item),
            is_view,
        )
        for item in write_items if item.tensor_data is not None
    ]


def _get_shape(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    shape = tuple(item.tensor_data.size)
    if not {*map(type, shape)} <= {int}:  # torch.SymInt
        raise SaveFailed(
            f"'{item.index.fqn}' has the shape {shape}, as a nested tensor of the layout torch.jagged. In a dict, and "
            "not sharded, it is stored by dsq_ckpt.save, async_save and Compressor; else save the tensors that it "
            "consists of (values(), offsets())"
        )
    return shape


def _resolve(planner: SavePlanner | None, item: WriteItem) -> Any:
    assert planner is not None and item.tensor_data is not None, "shards that are only planned hold no data"
    try:
        data = planner.resolve_data(item)
    except Exception as error:
        kind, name = type(planner).__name__, item.index.fqn
        raise SaveFailed(f"{kind} cannot resolve '{name}': {described(error)}") from error
    if isinstance(data, torch.Tensor):
        shape, dtype = tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype
        # Shards without elements have any shape.
        if data.dtype != dtype or (tuple(data.shape) != shape and (data.numel() or math.prod(shape))):
            raise SaveFailed(
                f"'{item.index.fqn}' is planned as {dtype} of shape {shape}, but {type(planner).__name__} gives "
                f"{data.dtype} of shape {tuple(data.shape)} for it: a planner that changes tensors says so in "
                "create_local_plan, in the items' tensor_data"
            )
    return data


def _resolve_chunk_of(planner: SavePlanner | None, item: WriteItem, fqn: str) -> Any:
    """Return the same chunk of another tensor, whose replicas the planner may have assigned to another rank."""
    assert planner is not None, "shards that are only planned hold no data"
    try:
        _check_chunk_is_local(planner, get_chunk_key(item)._replace(fqn=fqn))
        return planner.resolve_data(replace(item, index=replace(item.index, fqn=fqn)))
    except Exception as error:
        raise SaveFailed(
            f"'{item.index.fqn}' is measured by '{fqn}', which this rank does not write, and which "
            f"{type(planner).__name__} does not give it ({described(error)}); save both in one layout, or set "
            "quantize.exp_avg.method to exact, or quantize.exp_avg.codebook.fit to kmeans"
        ) from error


def _check_chunk_is_local(planner: SavePlanner, key: ChunkKey) -> None:
    """Raise if a chunk is not on this rank: for a DTensor planners return the local shard whatever the offsets.

    Raises:
        LookupError: this rank has other chunks of the tensor.
    """
    state = getattr(planner, "state_dict", None)
    if isinstance(state, Mapping) and isinstance(state.get(key.fqn), DTensor):
        items = create_default_local_save_plan({key.fqn: state[key.fqn]}, True).items
        local_keys = [get_chunk_key(item) for item in items if item.tensor_data is not None]
        if key not in local_keys:
            chunks_text = ", ".join(f"{chunk.offsets} of shape {chunk.shape}" for chunk in local_keys) or "nowhere"
            raise LookupError(f"this rank has it at {chunks_text}, and not at {key.offsets} of shape {key.shape}")


def iterate_objects(write_items: Iterable[WriteItem], planner: SavePlanner) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of objects.

    Raises:
        SaveFailed: on iteration, if the planner cannot pickle one.
    """
    for item in write_items:
        if item.type == WriteItemType.BYTE_IO:
            with name_object_errors(item.index.fqn):
                data = planner.resolve_data(item).getvalue()  # type: ignore[union-attr]
            yield item.index.fqn, data


def make_write_results(items: list[WriteItem], result: RankResult) -> list[WriteResult]:
    """Return DCP's result of each item; the first one carries the `RankResult`."""
    results: list[WriteResult] = []
    for item in items:
        written = result.written[get_item_name(item)]
        data = {"rank": result} if not results else {}
        results.append(WriteResult(item.index, written.base + written.refinement, data))
    return results


def done_future(result: _Result) -> Future[_Result]:
    """Return a completed future, as DCP requires."""
    future: Future[_Result] = Future()
    future.set_result(result)
    return future


def make_contents(metadata: Metadata, nesting: dict[str, Any], results: list[RankResult]) -> SaveContents:
    """Return the contents of a save of all ranks."""
    tensors, objects = {}, []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[fqn] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."), "shape": list(entry.size),
                "chunks": [ChunkKey(fqn, tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks],
            }
        else:
            objects.append(fqn)
    return SaveContents(results, tensors, objects, nesting)


def check_metadata_complete(contents: SaveContents, planner: str) -> None:
    """Raise if the metadata of a save lacks a written chunk or object.

    The reverse is checked by `commit`, which other integrations use too.

    Raises:
        SaveFailed: there is such a chunk or object.
    """
    planned: set[ChunkKey | str] = set(contents.objects)
    planned.update(chunk for tensor in contents.tensors.values() for chunk in tensor["chunks"])
    for result in contents.results:
        for name in result.written.keys() - planned:
            raise SaveFailed(
                f"{name!r} was written by rank {result.rank}, but the metadata that {planner} made of the global plan "
                "lacks it, so that it could not be loaded; nothing was committed"
            )
