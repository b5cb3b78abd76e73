"""Frozen tensors: those that need no gradient, beside others that do, as long as they stay as they are."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import dsq_ckpt
from dsq_ckpt.quantization import frozen_tensors
from dsq_ckpt.quantization.frozen_tensors import FrozenTensors, find_frozen


class Model(nn.Module):
    """A frozen and a trained layer, and a copy of the latter's weights that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(256, 512, bias=False).requires_grad_(False)
        self.head = nn.Linear(128, 64, bias=False)
        self.register_buffer("table", self.head.weight.detach().clone())


def train(model: Model) -> None:
    with torch.no_grad():
        model.head.weight.add_(0.01)


def find_unchanged(model: nn.Module) -> set[str]:
    frozen = find_frozen(model)
    return {name for name in frozen.unchanged if name in frozen}


def test_tensors_without_gradients_are_frozen_beside_trained_ones():
    model = Model()
    assert find_unchanged(model) == {"base.weight", "table"}
    model.requires_grad_(False)
    assert find_unchanged(model) == set()  # a model that is not in training, to be made small as any other
    model.requires_grad_(True)
    assert find_unchanged(model) == {"table"}


def test_tensors_that_change_twice_in_a_row_are_not_frozen():
    """The average of a student's weights; a layer that was loaded anew once is still frozen."""
    model = Model()
    for frozen_still in ({"base.weight", "table"}, {"base.weight", "table"}, {"base.weight"}, {"base.weight"}):
        assert find_unchanged(model) == find_unchanged(model) == frozen_still  # saved twice at a step
        train(model)
        model.table.lerp_(model.head.weight.detach(), 0.5)
    assert find_unchanged(model) == {"base.weight"}
    train(model)
    assert find_unchanged(model) == {"base.weight", "table"}
    nn.init.normal_(model.base.weight)
    train(model)
    assert find_unchanged(model) == {"base.weight", "table"}


def test_buffers_that_are_no_copies_of_parameters_are_frozen_whatever_they_do():
    """A covariance that was rounded is no longer positive definite, and its next factorization fails."""
    model = Model()
    model.register_buffer("covariance", torch.eye(96) + 0.1)
    for _ in range(4):
        assert "covariance" in find_unchanged(model)
        model.covariance *= 0.99
        train(model)


def test_buffers_near_no_parameter_are_frozen_whatever_they_do():
    """A codebook has the shape of weights by chance; a restore lost its rows of little use."""
    model = Model()
    model.register_buffer("codebook", torch.randn(64, 128))
    for number in range(5):
        assert find_unchanged(model) == {"base.weight", "codebook"} | ({"table"} if number < 2 else set())
        train(model)
        model.codebook.lerp_(torch.randn(64, 128), 0.1)
        model.table.lerp_(model.head.weight.detach(), 0.5)


def test_tensors_without_values_are_not_known():
    model = Model()
    model.add_module("lazy", nn.LazyBatchNorm1d())
    model.add_module("meta", nn.Linear(64, 64, device="meta").requires_grad_(False))
    assert find_unchanged(model) == {"base.weight", "table"}


def test_ranks_agree():
    """Somewhere something is trained, and a tensor rests wherever it lies."""
    first, second = FrozenTensors(False, {"a": True, "b": True}), FrozenTensors(True, {"b": False, "c": True})
    merged = FrozenTensors.merge([first, FrozenTensors(), second])
    assert merged == FrozenTensors(True, {"a": True, "b": False, "c": True})
    assert FrozenTensors.merge([]) == FrozenTensors()


def test_models_are_let_go():
    model = Model()
    find_unchanged(model)
    reference, known = weakref.ref(model), len(frozen_tensors._watches)
    del model
    gc.collect()
    assert reference() is None and len(frozen_tensors._watches) < known


def saves(model, tmp_path, config=None, count=3):
    """Save, train and save again; return the results."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    results = []
    for number in range(count):
        model.head.weight.grad = torch.randn_like(model.head.weight)
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        results.append(dsq_ckpt.save(state, tmp_path / f"step-{number}", config=config, model=model))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_exact_and_cost_nothing_more(dtype, tmp_path):
    model = Model().to(dtype)
    keyframe, *deltas = saves(model, tmp_path)
    assert all(delta.bytes_written < 0.5 * keyframe.bytes_written for delta in deltas)
    for number in range(3):
        target: dict[str, dict[str, torch.Tensor]] = {}
        dsq_ckpt.load(target, tmp_path / f"step-{number}")
        assert target["model"]["base.weight"].equal(model.base.weight)
        assert target["model"]["table"].equal(model.table)
        assert not target["model"]["head.weight"].equal(model.head.weight)


@pytest.mark.parametrize("config", [
    {"quantize": {"frozen": "lossy"}}, {"quantize": {"rules": [{"pattern": "*.base.weight", "group": "linear"}]}},
])
def test_they_are_lossy_where_asked_to(config, tmp_path):
    model = Model()
    saves(model, tmp_path, config, 1)
    target: dict[str, dict[str, torch.Tensor]] = {}
    dsq_ckpt.load(target, tmp_path / "step-0")
    assert not target["model"]["base.weight"].equal(model.base.weight)
    assert target["model"]["table"].equal(model.table) == ("rules" in config["quantize"])


@pytest.mark.parametrize("how", ["anew", "plans cached", "in the background", "quantized when staged"])
def test_a_teacher_that_moves_is_lossy_until_it_rests(how, tmp_path):
    """Each save tells by itself, with one writer for all of them."""
    model = Model()
    optimizer = torch.optim.AdamW([model.head.weight])
    stage = "quantize" if how.startswith("quantized") else "copy"
    writer = dsq_ckpt.DSQStorageWriter(config={"storage": {"stage": stage}}, model=model, no_dist=True)
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(dcp.planner.SavePlanner, f"_cached_{cache}").clear()
    for number, exact in enumerate([True, True, False, False, True]):
        if number < 4:
            with torch.no_grad():
                model.base.weight.add_(0.01)
        model.head.weight.grad = torch.randn_like(model.head.weight)
        optimizer.step()
        path = tmp_path / f"step-{number}"
        options = {"storage_writer": writer, "checkpoint_id": path, "no_dist": True}
        if how in ("anew", "plans cached"):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=how == "plans cached")
            dcp.save({"model": model.state_dict()}, planner=planner, **options)
        else:
            dcp.async_save({"model": model.state_dict()}, **options).result()
        target: dict[str, dict[str, torch.Tensor]] = {}
        dsq_ckpt.load(target, path)
        assert target["model"]["base.weight"].equal(model.base.weight) == exact
        assert target["model"]["table"].equal(model.table)
