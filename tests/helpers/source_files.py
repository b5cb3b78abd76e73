"""A state dict, and the forms in which others hand out checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

import dsq_ckpt
from dsq_ckpt.dcp.nested_planners import NestedSavePlanner


def plain_state() -> dict[str, torch.Tensor]:
    """A flat state dict as a hub has it."""
    g = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (128, 48), "layers.0.weight": (96, 64), "layers.1.weight": (64, 80), "norm.weight": (96,)}
    state = {name: torch.randn(shape, generator=g) * 0.02 for name, shape in shapes.items()}
    state["layers.1.weight"] = state["layers.1.weight"].bfloat16()
    return state | {"steps": torch.tensor(7)}


def write_sharded(state, directory: Path) -> Path:
    directory.mkdir()
    names = sorted(state)
    files = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def write_safetensors(state, path: Path) -> Path:
    save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def write_torch(state, path: Path, **options) -> Path:
    torch.save(state, path.with_suffix(".pt"), **options)
    return path.with_suffix(".pt")


def write_dcp(state, path: Path) -> Path:
    dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    return path


class _Quarters(DefaultSavePlanner):
    """Cuts every matrix in two, by rows and by columns, as ranks of a mesh would."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            if data is None or len(data.size) != 2:
                items.append(item)
                continue
            halves = [((0, size // 3), (size // 3, size - size // 3)) for size in data.size]
            for place, (rows, columns) in enumerate((a, b) for a in halves[0] for b in halves[1]):
                offsets, sizes = (torch.Size(pair) for pair in zip(rows, columns, strict=True))
                items.append(replace(
                    item, index=MetadataIndex(item.index.fqn, offsets, place), type=WriteItemType.SHARD,
                    tensor_data=replace(data, chunk=ChunkStorageMetadata(offsets, sizes)),
                ))
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item):
        data = write_item.tensor_data
        if data is None:
            return super().resolve_data(write_item)
        whole = self.lookup_object(write_item.index)
        return whole[tuple(slice(start, start + n) for start, n in zip(data.chunk.offsets, data.chunk.sizes,
                                                                       strict=True))]

    def lookup_object(self, index):
        return self.state_dict[index.fqn]


class _NestedQuarters(_Quarters, NestedSavePlanner):
    pass


def write_dcp_in_parts(state, path: Path) -> Path:
    dcp.save(dict(state), checkpoint_id=path, planner=_Quarters(), no_dist=True)
    return path


def write_dsq_in_parts(state, path: Path) -> Path:
    writer = dsq_ckpt.DSQStorageWriter(path, parent=None)
    dcp.save(dict(state), storage_writer=writer, planner=_NestedQuarters(), no_dist=True)
    return path
