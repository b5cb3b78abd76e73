"""Loads of names with other prefixes of wrappers than were saved: nothing is left out without a word."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import dsq_ckpt
from dsq_ckpt.codebooks import CodebookConfig
from dsq_ckpt.errors import LoadFailed
from tests.helpers.stateful_modules import EXTRA, Remembering


class Wrapped(nn.Module):
    """A module inside another, as DDP has it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def inside(model: nn.Sequential) -> nn.Sequential:
    model[1] = compiled(model[1])
    return model


def training(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 30}


def refused(state: Any, path: Path) -> str:
    with pytest.raises(LoadFailed) as caught:
        dsq_ckpt.load(state, path)
    assert "allow_partial_load" not in str(caught.value)
    return str(caught.value)


def test_wrappers_in_another_order_are_reported(tmp_path) -> None:
    dsq_ckpt.save({"model": Wrapped(compiled(make_model())).state_dict()}, tmp_path / "a", config="exact")
    said = refused({"model": compiled(Wrapped(make_model())).state_dict()}, tmp_path / "a")
    assert said.endswith("it has 'model.module._orig_mod.0.weight' and 3 more, with its wrappers in another order: "
                         "wrap the model as when it was saved")


@pytest.mark.parametrize("wrap, of, keys", [
    (compiled, "'_orig_mod' of torch.compile", ["_orig_mod"]),
    (Wrapped, "'module' of DistributedDataParallel", ["module"]),
    (lambda model: Wrapped(compiled(model)), "'module' of DistributedDataParallel and '_orig_mod' of torch.compile",
     ["module", "_orig_mod"]),
])
@pytest.mark.parametrize("whole", [True, False])
def test_the_error_says_what_to_pass_for_what_was_saved_wrapped(tmp_path, wrap, of, keys, whole) -> None:
    """Below a key; the value that it names loads every weight."""
    model, other = make_model(), make_model()
    saved_state, state = training(wrap(model)), training(other)
    for tree in (saved_state, state) if not whole else ():
        del tree["optimizer"], tree["step"]
    dsq_ckpt.save(saved_state, tmp_path / "a", config="exact")
    passed = "state_dict"
    for key in reversed(["model", *keys]):
        passed = f"{{'{key}': {passed}}}"
    prefix = ".".join(["model", *keys])
    says = f"; it was saved with {of} in its names, as '{prefix}.0.weight' and 3 more: pass {passed}"
    assert refused(state, tmp_path / "a").endswith(says)
    state |= eval(passed, {"state_dict": other.state_dict()})
    dsq_ckpt.load(state, tmp_path / "a")
    assert all(one.equal(two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("wrap", [compiled, inside])
def test_the_error_says_what_to_pass_into_a_compiled_model(tmp_path, wrap) -> None:
    model, other = make_model(), make_model()
    dsq_ckpt.save(training(model), tmp_path / "a", config="exact")
    module = wrap(other)
    state = training(module)
    says = refused(state, tmp_path / "a")
    assert "; it was saved without '_orig_mod' of torch.compile in its names, as 'model." in says
    assert says.endswith("get_model_state_dict of torch.distributed.checkpoint.state_dict returns for the model")
    dsq_ckpt.load({**state, "model": get_model_state_dict(module)}, tmp_path / "a")
    assert all(one.equal(two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_the_error_names_what_was_saved_from_a_model_with_a_compiled_part(tmp_path) -> None:
    model, other = make_model(), make_model()
    dsq_ckpt.save(training(inside(model)), tmp_path / "a", config="exact")
    says = refused(training(other), tmp_path / "a")
    assert says.endswith("as 'model.1._orig_mod.0.weight' and 1 more: load into a model that is wrapped likewise")
    dsq_ckpt.load(training(inside(other)), tmp_path / "a")
    assert all(one.equal(two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_few_names_that_are_there_are_no_model_that_has_grown(tmp_path) -> None:
    names = [f"layers.{number}.weight" for number in range(9)]
    dsq_ckpt.save({"model": {name: torch.ones(3) for name in ["head", *names]}, "step": 3}, tmp_path / "a")
    other = {"model": {f"h.{name}": torch.ones(3) for name in names} | {"head": torch.ones(3)}, "step": 3}
    assert "did you mean" in refused(other, tmp_path / "a")


@pytest.mark.parametrize("grown", [False, True])
def test_a_partial_load_that_fills_nothing_of_a_model_is_reported(tmp_path, grown) -> None:
    """Once, by name and count; one that fills a part says nothing."""
    model, state = make_model(), training(make_model())
    dsq_ckpt.save(training(model if grown else compiled(model)), tmp_path / "a", config="exact")
    if grown:
        state["model"] = {**state["model"], "2.weight": torch.ones(8, 8)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load(
            state, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "a"),
            planner=dcp.DefaultLoadPlanner(allow_partial_load=True), no_dist=True,
        )
    messages = [str(warning.message) for warning in caught if "is loaded from" in str(warning.message)]
    assert len(messages) == (not grown)
    says = (
        r"nothing below 'model' is loaded from '.*a': it has none of the 4 tensors there, such as 'model\.0\.weight', "
        r"and 4 of other names, such as 'model\._orig_mod\..*'; it was saved with '_orig_mod' of torch\.compile"
    )
    assert grown or re.match(says, messages[0])


def _said(path, state, through_dcp):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if through_dcp:
            dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(path), no_dist=True)
        else:
            dsq_ckpt.load(state, path)
    return [str(warning.message) for warning in caught if "was saved of an extra state" in str(warning.message)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("through_dcp", [False, True])
def test_an_extra_state_that_has_grown_since_a_state_dict_was_made_is_reported(tmp_path, through_dcp):
    """A state dict is loaded by its names, so the rest of an extra state would be lost, also of a plain dict."""
    given, before = EXTRA["grown"][0], {"counts": {"<unk>": 0}}
    dsq_ckpt.save({"model": Remembering(given)}, tmp_path / "a", config="exact")
    for kind in (dict, lambda state: state):
        messages = _said(tmp_path / "a", {"model": kind(Remembering(copy.deepcopy(before)).state_dict())}, through_dcp)
        assert len(messages) == 1
        assert "'model._extra_state.counts.the', 'model._extra_state.amax' was saved of an extra state" in messages[0]
    same = {"counts": {"<unk>": 0, "the": 0}, "amax": torch.zeros(4)}
    assert _said(tmp_path / "a", {"model": Remembering(same).state_dict()}, through_dcp) == []
    if not through_dcp:
        assert _said(tmp_path / "a", {"model": Remembering(before)}, through_dcp) == []


def test_second_moments_on_a_linear_axis_are_told_of(tmp_path, monkeypatch, recwarn) -> None:
    """As former versions stored them, where a configuration said so."""
    state, config = training(nn.Sequential(nn.Linear(80, 80))), {"fit": "lattice"}
    dsq_ckpt.save(state, tmp_path / "octaves")
    dsq_ckpt.load(copy.deepcopy(state), tmp_path / "octaves")
    assert not any("linear axis" in str(warning.message) for warning in recwarn)
    with monkeypatch.context() as patch:
        patch.setattr(CodebookConfig, "explain_misfit", lambda codebook, kind, in_use=True: None)
        dsq_ckpt.save(state, tmp_path / "a", config={"quantize": {"exp_avg_sq": {"codebook": config}}})
    with pytest.warns(UserWarning, match="a' has second moments of fit 'lattice' on a linear axis"):
        dsq_ckpt.load(copy.deepcopy(state), tmp_path / "a")
