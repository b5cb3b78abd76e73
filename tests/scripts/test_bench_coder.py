"""The comparison of coders: it measures the codes of checkpoints, and gives sizes that are those of the coder."""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_coder import _groups, measure, measure_htscodecs

import dsq_ckpt

CONFIG = {"storage": {"fsync": False}, "quantize": {"min_elements": 100}}


def test_it_measures_the_codes_of_checkpoints(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {"large": torch.randn(300, 200, generator=generator), "small": torch.randn(20, 200, generator=generator)}
    for number in range(2):
        dsq_ckpt.save(state, tmp_path / str(number), config=CONFIG, no_dist=True)
        for tensor in state.values():
            tensor += 0.01 * torch.randn(tensor.shape, generator=generator)
    (codes, parent), = _groups(tmp_path / "0").values()
    assert codes.size == 64_000 and parent is None
    later, before = _groups(tmp_path / "1")["weights"]
    assert before is not None
    np.testing.assert_array_equal(before, codes)
    assert 0.7 < np.mean(later == before) < 1
    rows = measure(later, before, repeats=1)
    assert rows.keys() == {"lanes", "two", "lists"}  # few codes change
    for row in rows.values():
        assert row["encode"] > 0 and row["decode"] > 0
        assert row["bits"] < measure(later, None, repeats=1)["lanes"]["bits"]
    assert rows["lists"]["bits"] < 1.01 * rows["lanes"]["bits"]
    rng = np.random.default_rng(0)
    assert measure(rng.integers(0, 9, 1000).astype(np.uint8), before[:1000], repeats=1).keys() == {"lanes", "two"}


@pytest.mark.skipif(ctypes.util.find_library("htscodecs") is None, reason="htscodecs is not installed")
def test_htscodecs() -> None:
    codes = (np.arange(100_000) % 7).astype(np.uint8)
    library = ctypes.CDLL(str(ctypes.util.find_library("htscodecs")))
    assert measure_htscodecs(codes, library, repeats=1)["bits"] < 0.1
