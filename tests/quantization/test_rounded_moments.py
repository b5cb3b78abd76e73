"""First moments whose update is not known, since the optimizer keeps state of its own beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt


@pytest.mark.parametrize("kind, method, said", [
    (torch.optim.Adamax, "quantize", True), (torch.optim.Adamax, "bf16", False), (torch.optim.NAdam, "quantize", False),
])
def test_first_moments_of_other_optimizers_are_rounded_and_told_of_at_a_keyframe(
    tmp_path, recwarn, kind, method, said
) -> None:
    """Adamax divides them by `exp_inf`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(70, 80)
    optimizer = kind(model.parameters())
    for number in range(2):
        model(torch.randn(9, 70)).square().sum().backward()
        optimizer.step()
        config = {"quantize": {"exp_avg": {"method": method}}}
        dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / str(number), config=config)
    messages = [str(warning.message) for warning in recwarn if "beside exp_avg" in str(warning.message)]
    assert len(messages) == said and all("keeps 'exp_inf' beside" in text for text in messages)
    names = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(80, 70), "exp_inf": torch.zeros(80, 70)}}}}
    if kind is torch.optim.Adamax:
        dsq_ckpt.load(names, tmp_path / "1")
        own, got = optimizer.state[model.weight], names["optimizer"]["state"][0]
        assert got["exp_inf"].equal(own["exp_inf"]) and got["exp_avg"].equal(own["exp_avg"].bfloat16().float())


@pytest.mark.parametrize("betas", [(0.99, 0.95), (0.95, 0.99)])
@pytest.mark.parametrize("way", ["save", "Compressor", "dcp", "compress"])
def test_first_moments_that_last_longer_than_second_ones_are_rounded(tmp_path, recwarn, way, betas) -> None:
    """Else they keep the error of second moments, in whose units they are restored."""
    torch.manual_seed(0)
    model = torch.nn.Linear(80, 80, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas)
    model(torch.randn(9, 80)).square().sum().backward()
    optimizer.step()
    moment = optimizer.state[model.weight]["exp_avg"]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for number in range(2):
        if way == "save":
            dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / str(number))
        elif way == "Compressor":
            dsq_ckpt.Compressor(model, optimizer).save(tmp_path / str(number))
        elif way == "compress":
            dsq_ckpt.compress(state, tmp_path / str(number))
        else:
            dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / str(number)), no_dist=True)
    said = [str(warning.message) for warning in recwarn if "rounded to bf16" in str(warning.message)]
    first, second = betas
    assert bool(said) == (first > second) and all("first of the optimizer's betas is larger" in text for text in said)
    name = "optimizer.state.weight.exp_avg" if way == "Compressor" else "optimizer.state.0.exp_avg"
    target = torch.zeros(80, 80)
    dcp.load({name: target}, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "1"), no_dist=True)
    assert target.equal(moment.bfloat16().float()) == (first > second)


def test_first_moments_without_second_ones_are_quantized_whatever_the_betas(tmp_path, recwarn) -> None:
    """Lion has no second moments: its first ones are in units of their own size."""
    torch.manual_seed(0)
    model = torch.nn.Linear(80, 80, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.99, 0.9))
    optimizer.state[model.weight]["exp_avg"] = moment = torch.randn(80, 80)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dsq_ckpt.save(state, tmp_path / "0")
    assert not any("rounded to bf16" in str(warning.message) for warning in recwarn)
    target = torch.zeros(80, 80)
    name = "optimizer.state.0.exp_avg"
    dcp.load({name: target}, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "0"), no_dist=True)
    assert not target.equal(moment.bfloat16().float())


class Rotated(torch.optim.Optimizer):
    """Adam in a basis of its own, which it keeps in a tuple or an object, beside moments or in its groups."""

    def __init__(self, parameters: Any, holder: str = "tuple") -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99)})
        self.holder = holder

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                if not own:
                    own |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter), "k": 1.0}
                basis = torch.eye(parameter.shape[-1])
                ways = {"tuple": (basis, 1), "nested": {"inner": (basis,)}, "object": Basis(basis), "group": (basis, 1)}
                (group if self.holder == "group" else own)["basis"] = ways[self.holder]
                own["exp_avg"].lerp_(parameter.grad, 0.1)
                own["exp_avg_sq"].lerp_((parameter.grad @ basis).square(), 0.01)
                parameter.sub_(own["exp_avg"], alpha=group["lr"])


class Basis:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


def rotated(holder: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(80, 80, bias=False)
        optimizer = Rotated(model.parameters(), holder)
        model(torch.randn(9, 80)).square().sum().backward()
    optimizer.step()
    return model, optimizer, optimizer.state[model.weight]["exp_avg"]


@pytest.mark.parametrize("holder", ["tuple", "nested", "object", "group"])
@pytest.mark.parametrize("way", ["save", "async_save", "dcp", "cached", "quantize", "Compressor", "compress"])
def test_first_moments_beside_objects_are_rounded(tmp_path, way, holder) -> None:
    """A basis in a tuple or an object tells as much as one that is a tensor; by every way of saving."""
    model, optimizer, moment = rotated(holder)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.warns(UserWarning, match="the optimizer keeps 'basis' beside exp_avg"):
        if way == "save":
            dsq_ckpt.save(state, tmp_path / "a")
        elif way == "async_save":
            dsq_ckpt.async_save(state, tmp_path / "a").result()
        elif way == "quantize":
            dsq_ckpt.async_save(state, tmp_path / "a", config={"storage": {"stage": "quantize"}}).result()
        elif way == "Compressor":
            dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a")
        elif way == "compress":
            dsq_ckpt.compress(state, tmp_path / "a")
        else:
            for _ in range(2 if way == "cached" else 1):
                writer = dsq_ckpt.DSQStorageWriter(tmp_path / "a", overwrite=True)
                planner = dcp.DefaultSavePlanner(enable_plan_caching=way == "cached")
                dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    name = "optimizer.state.weight.exp_avg" if way == "Compressor" else "optimizer.state.0.exp_avg"
    target = torch.zeros(80, 80)
    dcp.load({name: target}, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "a"), no_dist=True)
    assert target.equal(moment.bfloat16().float())
