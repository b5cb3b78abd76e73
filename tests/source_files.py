"""A state dict, and the forms in which others hand out checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file


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
