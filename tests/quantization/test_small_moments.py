"""Moments of tensors that are not quantized: bf16 unless something asks for exact ones; weights are exact always."""

from __future__ import annotations

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import is_equal

KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def state() -> dict:
    generator = torch.Generator().manual_seed(0)
    weights = {"norm.weight": (5000,), "fc.bias": (300,), "fc.weight": (30, 40)}
    model = {name: torch.randn(shape, generator=generator) for name, shape in weights.items()}
    return {"model": model, "optim": {"state": {
        name: {
            "step": torch.tensor(7.0), "exp_avg": torch.randn(w.shape, generator=generator) * 1e-4,
            "exp_avg_sq": torch.rand(w.shape, generator=generator) * 1e-40, "momentum_buffer": w * 3,
        } for name, w in model.items()
    }}}


def restored(path, like, **options):
    empty = {"model": {k: torch.zeros_like(v) for k, v in like["model"].items()}, "optim": {"state": {
        name: {k: torch.zeros_like(v) for k, v in part.items()} for name, part in like["optim"]["state"].items()
    }}}
    dsq_ckpt.load(empty, path, **options)
    return empty


def test_they_are_bf16_and_all_else_is_exact(tmp_path):
    original = state()
    original["optim"]["state"]["fc.bias"]["exp_avg"][:3] = torch.tensor([torch.nan, torch.inf, torch.finfo().max])
    for name in "ab":
        dsq_ckpt.save(original, tmp_path / "run" / name)
        got = restored(tmp_path / "run" / name, original)
        for parameter, value in original["model"].items():
            assert is_equal(got["model"][parameter], value)
            part, back = original["optim"]["state"][parameter], got["optim"]["state"][parameter]
            assert is_equal(back["step"], part["step"])
            for kind in KINDS:
                finite = part[kind].isfinite()
                assert torch.equal(back[kind].isfinite(), finite)
                assert torch.equal(back[kind].isnan(), part[kind].isnan())
                assert torch.equal(back[kind], back[kind].bfloat16().float()) or not finite.all()
                most = 2.0**-8 * part[kind][finite].abs() + torch.finfo(torch.bfloat16).smallest_normal * 2**-7
                assert ((back[kind] - part[kind])[finite].abs() <= most).all()
    with Checkpoint(tmp_path / "run" / "b") as checkpoint:
        records = [checkpoint.read_record(ref) for _, ref in checkpoint.iter_chunks()]
        stored = {record["fqn"]: record.get("stored") for record in records}
    assert {name for name, how in stored.items() if how == "bfloat16"} == {
        f"optim.state.{parameter}.{kind}" for parameter in original["model"] for kind in KINDS
    }
    kinds = Manifest.read(tmp_path / "run" / "b").kinds
    assert kinds["exp_avg"].base < 0.6 * kinds["exp_avg"].logical


@pytest.mark.parametrize("config", [
    "exact", "moments_exact", {"quantize": {"small_moments": "exact"}}, {"system": "inshrinkerator"},
    {"quantize": {"rules": [{"pattern": "optim.*", "exact": True}]}},
    {"quantize": {"min_elements": 10**9, "small_moments": "exact"}},
])
def test_exact_ones_can_be_asked_for(tmp_path, config):
    original = state()
    dsq_ckpt.save(original, tmp_path / "run" / "a", config=config)
    got = restored(tmp_path / "run" / "a", original)
    for parameter, part in original["optim"]["state"].items():
        assert all(is_equal(got["optim"]["state"][parameter][kind], value) for kind, value in part.items())


def test_a_raised_limit_keeps_matrices_exact(tmp_path):
    moments = {"exp_avg": torch.randn(80, 80), "exp_avg_sq": torch.rand(80, 80, dtype=torch.float64)}
    dsq_ckpt.save({"optim": {"state": {"w": moments}}}, tmp_path / "a", config={"quantize": {"min_elements": 10**9}})
    empty = {name: torch.zeros_like(value) for name, value in moments.items()}
    dsq_ckpt.load({"optim": {"state": {"w": empty}}}, tmp_path / "a")
    assert all(torch.equal(empty[name], value) for name, value in moments.items())
