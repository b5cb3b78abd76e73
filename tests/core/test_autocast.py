"""Saves within autocast: the same values as outside, for weights in any dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

import dsq_ckpt
from dsq_ckpt import DSQStorageReader, DSQStorageWriter


def state(dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"square": (256, 256), "wide": (64, 512), "rows": (600, 96), "bias": (512,)}
    model = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    model["rows"][5] /= 1000  # a small row, which saves look for with products of matrices
    return {"model": model}


def stored(path: Path) -> dict[str, torch.Tensor]:
    target: dict[str, dict[str, torch.Tensor]] = {"model": {}}
    dsq_ckpt.load(target, path)
    return target["model"]


@pytest.mark.parametrize("through", ["save", "dcp"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_save_within_autocast_stores_what_one_outside_does(tmp_path: Path, dtype: torch.dtype, through: str) -> None:
    for name, enabled in (("outside", False), ("within", True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for step in range(2):
                path = tmp_path / name / str(step)
                moved = {"model": {key: value * (1 + step * 2**-6) for key, value in state(dtype)["model"].items()}}
                if through == "save":
                    dsq_ckpt.save(moved, path)
                else:
                    dcp.save(moved, storage_writer=DSQStorageWriter(path))
            loaded = state(dtype)
            dcp.load(loaded, storage_reader=DSQStorageReader(tmp_path / name / "1"))
            assert all(torch.equal(value, loaded["model"][key]) for key, value in stored(path).items())
    for step in "01":
        within, outside = (stored(tmp_path / name / step) for name in ("within", "outside"))
        assert within.keys() == outside.keys()
        assert all(torch.equal(within[key], outside[key]) for key in outside)
