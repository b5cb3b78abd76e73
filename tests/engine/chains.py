"""Chains of checkpoints to damage, saved in every way, and which of them can still be read."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import torch

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.parent_checks import finish_checks
from tests.helpers.saving import save_parts
from tests.helpers.states import load_copy


def weights(number: int = 0) -> dict:
    g = torch.Generator().manual_seed(1)
    return {"weight": torch.randn(80, 90, generator=g) + 0.001 * number}


def in_background(state, path, **options):
    dsq_ckpt.async_save(state, path, **options).result()


def directly(state, path, config=None, parent="auto"):
    tensor = state["weight"]
    key = ChunkKey("weight", (0, 0), tuple(tensor.shape))
    part = LocalShard(key, tuple(tensor.shape), tensor.dtype, partial(lambda value: value, tensor))
    contribution = LocalState([part], nesting={"weight": ("weight",)})
    save_parts(Path(path), lambda: contribution, DSQConfig.create(config), SingleProcess(), parent=parent)


def flip(path: Path, at: float = 0.5) -> None:
    """Flip a bit, at this fraction of the file: of all checkpoints that share it."""
    finish_checks()
    with open(path, "r+b") as file:
        place = int(at * path.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def data_file(directory: Path, role: str = "own") -> Path:
    [name] = [file.name for file in Manifest.read(directory).files if file.role == role and file.name.endswith("dsq")]
    return directory / name


def saves(run: Path, count: int, save=dsq_ckpt.save, first: int = 0, **options) -> list[str]:
    """Save `count` checkpoints; what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        for number in range(first, first + count):
            save(weights(number), run / f"{number:02d}", **options)
    return [str(warning.message) for warning in caught]


def readable(run: Path) -> list[str]:
    names = []
    for path in sorted(run.iterdir()):
        try:
            load_copy(path, weights(), refinement=False)
            names.append(path.name)
        except dsq_ckpt.DSQError:
            pass
    return names
