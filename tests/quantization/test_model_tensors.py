"""Whose a tensor is, told by the names of all that is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.quantization.groups import _kind, kind_of, layer_types, optimizer_prefix
from dsq_ckpt.quantization.model_tensors import exclude_parameter_state, find_model_tensors

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@pytest.mark.parametrize("word", ["state", "opt", "optim", "optimizer", "adam", "exp_avg", "momentum_buffer", "fp32"])
@pytest.mark.parametrize("model", ["model.", "net.", "app.net.", ""])
def test_modules_named_like_keys_of_optimizers_are_of_models(word: str, model: str) -> None:
    weights = {f"{model}{word}.0.weight", f"{model}{word}.0.bias", f"{model}a.{word}.table.weight", f"{model}b.weight"}
    key = "optimizer" if word != "optimizer" else "o"
    for owner in ("0", f"{word}.0.weight", f"a.{word}.table.weight"):
        state = {f"{key}.state.{owner}.{leaf}" for leaf in MOMENTS}
        assert find_model_tensors(weights | state, ()) == weights


@pytest.mark.parametrize("names", [
    [f"{key}{owner}.{leaf}" for owner in ("0", "1") for leaf in MOMENTS] + ([f"{key}0.hessian"] if more else [])
    for key in ("state.", "optimizer.state.", "app.optim.state.", "model.optimizer.state.", "muon.state.")
    for more in (True, False)
] + [
    ["optimizer.state.a.weight.step"],
    ["optimizer.state.a.weight.GG.0", "optimizer.state.a.weight.GG.1"],  # lists of SOAP
    ["app.optimizer.state.a.weight.hessian"],
    ["muon.state.0.m", "muon.state.1.m"],
    ["optimizer.a.weight.momentum_buffer", "optimizer.a.weight.hessian"],
    ["optimizer.state.a.weight.exp_avg", "optimizer.masters.a.weight", "optimizer.fp32.0"],
    ["model.opt.state.a.weight.exp_avg", "model.opt.masters.a.weight"],
    ["optimizer.0.state.0.m", "optimizer.0.masters.a.weight"],
    ["a.weight.exp_avg", "b.exp_avg_sq"],  # moments beside their parameters
])
def test_state_of_optimizers_is_not(names: list[str]) -> None:
    assert find_model_tensors(["m.a.weight", *names], ()) == {"m.a.weight"}


def test_known_model_tensors_stay_the_models() -> None:
    model = nn.Module()
    model.state = nn.ParameterDict({"exp_avg": nn.Linear(2, 2).weight, "table": nn.Linear(2, 2).weight})
    names = ["net.state.exp_avg", "net.state.table", "o.state.state.table.exp_avg"]
    assert find_model_tensors(names, ()) == set()
    assert find_model_tensors(names, names[:1]) == {names[0]}
    assert find_model_tensors(names, (), layer_types(model)) == {*names[:2]}


@pytest.mark.parametrize("model", ["", "model.", "app.net."])
def test_weights_of_modules_have_no_twins_and_state_by_the_names_of_weights_has(model: str) -> None:
    own = [f"{model}opt.0.weight", f"{model}state.0.weight"]
    state = ["opt_state.mu.0.a.weight", "opt_state.nu.0.a.weight", "optimizer.masters.a.weight"]
    beside = {"m.0.a.weight": (9, 9), "a.weight": (9, 9), "m.0.weight": (9, 8), "b": (9, 9)}
    assert exclude_parameter_state([*own, *state], dict.fromkeys([*own, *state], (9, 9)) | beside) == own


def test_whose_tensors_are_is_reported_once_for_a_save(tmp_path, monkeypatch):
    """Names are many: a model of 20,000 weights has 80,000 with its optimizer."""
    asked = []

    def counted(*arguments):
        asked.append(arguments)
        return find_model_tensors(*arguments)

    for module in ("layout", "numbered_state", "untrained_weights"):
        monkeypatch.setattr(f"dsq_ckpt.quantization.{module}.find_model_tensors", counted)
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(80)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for number in range(2):
        asked.clear()
        dsq_ckpt.save(state, tmp_path / str(number))
        assert len(asked) == 1


def test_kinds_of_many_names_are_remembered():
    names = [f"optimizer.state.many.{number}.weight.exp_avg" for number in range(20_000)]
    for known, cache in ((kind_of, _kind), (optimizer_prefix, optimizer_prefix)):
        for name in names:
            known(name)
        before = cache.cache_info().misses
        for name in names:
            known(name)
        assert cache.cache_info().misses == before
