"""A program may set a default device, as `torch.set_default_device("cuda")`; here that is one without any memory."""

from __future__ import annotations

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.convert.export import export_dcp, export_safetensors, export_torch
from tests.helpers.reading import read_checkpoint
from tests.helpers.states import is_equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def nowhere():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.fixture
def state():
    return {
        "w": torch.randn(80, 80), "half": torch.randn(80, 80).half(), "bf16": torch.randn(80, 80).bfloat16(),
        "n": torch.arange(40_000), "none": torch.zeros(0), "s": [torch.ones(3)],
        "optimizer": {"state": {"w": {"exp_avg": torch.randn(80, 80), "exp_avg_sq": torch.rand(80, 80)}}},
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_saves_and_loads(tmp_path, state, threads, request):
    targets = [{}, {"bf16": torch.zeros(80, 80).bfloat16(), "s": [torch.zeros(3)]}]
    request.getfixturevalue("nowhere")
    for number, stage in enumerate(("auto", "copy", "quantize")):
        config = {"storage": {"stage": stage, "threads": threads}}
        dsq_ckpt.save(state, tmp_path / f"{number}a", config=config)
        dsq_ckpt.async_save(state, tmp_path / f"{number}b", config=config).result()
    for target in targets:
        dsq_ckpt.load(target, tmp_path / "2b")
        assert (target["bf16"] - state["bf16"]).norm() < 0.02 * state["bf16"].norm()
        assert is_equal(target["s"][0], state["s"][0])
    assert targets[0]["w"].device.type == "cpu" and is_equal(targets[0]["n"], state["n"])


def test_files_of_others(tmp_path, state, request):
    request.getfixturevalue("nowhere")
    dsq_ckpt.save(state, tmp_path / "a", config="exact")
    assert is_equal(read_checkpoint(tmp_path / "a")["n"], state["n"])
    for export, name in ((export_torch, "a.pt"), (export_dcp, "dcp"), (export_safetensors, "a.safetensors")):
        export(tmp_path / "a", tmp_path / name)
        dsq_ckpt.compress(tmp_path / name, tmp_path / "again" / name, config="exact")
        assert is_equal(read_checkpoint(tmp_path / "again" / name)["w"], state["w"])


@pytest.mark.parametrize("system", ["dsq", "inshrinkerator"])
def test_a_search(tmp_path, system, request):
    """And averages of gradients, by which one system weighs elements."""
    model, data = torch.nn.Linear(80, 80), torch.randn(32, 80)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        return (model(data) - data).square().mean()

    request.getfixturevalue("nowhere")
    compressor = dsq_ckpt.Compressor(model, optimizer, {"system": system}, lambda: loss().item())
    loss().backward()
    optimizer.step()
    result = compressor.save(tmp_path / "a")
    before = loss().item()
    compressor.load(tmp_path / "a")
    assert result.quality["satisfied"] and loss().item() < 1.02 * before
