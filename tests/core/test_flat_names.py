"""Two entries of one name are refused with the keys of both; DCP names neither."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import dsq_ckpt
from dsq_ckpt.core.flat_names import flatten
from dsq_ckpt.dcp.nested_planners import NestedSavePlanner
from dsq_ckpt.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COLLIDING = {
    r"\['x'\]\[1\] and \['x'\]\['1'\] .*, 'x\.1'": {1: torch.ones(2), "1": torch.zeros(2)},
    r"\['x'\]\['a\.b'\] and \['x'\]\['a'\]\['b'\] .*, 'x\.a\.b'": {"a.b": 1, "a": {"b": 2}, "c": [3]},
    r"\['x'\]\['a'\]\[1\] and \['x'\]\['a\.1'\] .*, 'x\.a\.1'": {"a": [torch.ones(2), 5], "a.1": 1},
}


@pytest.mark.parametrize("message", COLLIDING)
@pytest.mark.parametrize("way", ["save", "async_save", "extra", "compress", "dcp.save", "load", "flatten"])
def test_both_entries_are_named(tmp_path, message, way):
    state = {"w": torch.ones(70, 70), "x": COLLIDING[message]}
    if way == "load":
        dsq_ckpt.save({"w": state["w"], "x": {"1": torch.ones(2)}}, tmp_path / "a")
    ways = {
        "save": lambda: dsq_ckpt.save(state, tmp_path / "a"),
        "async_save": lambda: dsq_ckpt.async_save(state, tmp_path / "a").result(),
        "extra": lambda: dsq_ckpt.Compressor(nn.Linear(70, 70)).save(tmp_path / "a", extra={"x": state["x"]}),
        "compress": lambda: dsq_ckpt.compress(state, tmp_path / "a"),
        "load": lambda: dsq_ckpt.load(state, tmp_path / "a"),
        "flatten": lambda: flatten(state),
    }
    if way == "dcp.save":
        with pytest.raises(dcp.api.CheckpointException, match=message):
            dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / "a"), planner=NestedSavePlanner())
    else:
        with pytest.raises(ConfigError, match=message + ", .*: rename a key of one of them"):
            ways[way]()
    assert way == "load" or not (tmp_path / "a" / "dsq_manifest.json").exists()


def test_other_errors_are_raised_as_they_are():
    class Broken(dict):
        def items(self):
            raise ValueError("of its own")

    with pytest.raises(ValueError, match=r"^of its own$"):
        flatten({"x": Broken(a=1)})
