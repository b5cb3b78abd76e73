"""Averages of trained weights, told from other tensors that move without a gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import dsq_ckpt
from dsq_ckpt.quantization.weight_averages import find_averages

SHAPE = (96, 80)


def weights(number: int = 4) -> list[torch.Tensor]:
    return [nn.Linear(SHAPE[1], SHAPE[0]).weight.detach() for _ in range(number)]


def test_averages_of_weights_in_training_are_reported() -> None:
    """From the first steps to the last, of any type; an average of all steps too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 96), nn.GELU(), nn.Linear(96, 80))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mean = torch.optim.swa_utils.AveragedModel(model)
    moving = {decay: copy.deepcopy(model) for decay in (0.9, 0.99, 0.999)}
    target = torch.randn(80, 80) / 9
    for step in range(200):
        inputs = torch.randn(32, 80)
        optimizer.zero_grad()
        (model(inputs) - torch.tanh(inputs @ target)).square().mean().backward()
        optimizer.step()
        mean.update_parameters(model)
        with torch.no_grad():
            for decay, average in moving.items():
                for one, other in zip(average.parameters(), model.parameters(), strict=True):
                    one.lerp_(other, 1 - decay)
        for dtype in (torch.float32, torch.bfloat16, torch.float64) if step % 20 == 0 else ():
            trained = [parameter.detach().to(dtype) for parameter in model.parameters()]
            for decay, average in moving.items():
                moved = {
                    f"{kind} {place}": part[place].weight.detach().to(dtype)
                    for kind, part in (("moving", average), ("mean", mean.module)) for place in (0, 2)
                }
                assert find_averages(moved, trained) == moved.keys(), (step, dtype, decay)


def test_other_tensors_of_the_shape_of_weights_are_none() -> None:
    """Codes and their sums, squares, counts, queues, steps, copies of another size, and what holds no number."""
    torch.manual_seed(0)
    trained = weights(40)
    use = torch.logspace(-2, 1, SHAPE[0])[:, None]
    moved = {
        "codes": torch.randn(SHAPE) * 0.07, "their sums": torch.randn(SHAPE) * use, "queue": torch.randn(SHAPE),
        "weights by use": trained[0] * use, "squares": trained[0].square(), "sizes": trained[0].abs(),
        "counts": torch.rand(SHAPE), "another size": trained[0] / 30, "steps": torch.randn(SHAPE) * 1e-4,
        "around another mean": trained[0] + 1, "against it": -trained[0], "zeros": torch.zeros(SHAPE),
        "nan": torch.full(SHAPE, torch.nan), "inf": torch.full(SHAPE, torch.inf),
    }
    assert not find_averages(moved, [*trained, torch.zeros(SHAPE)])


def test_sums_by_code_are_none_beside_their_codes() -> None:
    """Codes are a parameter that nothing trains, and sums are codes times their use, which falls as that of words."""
    torch.manual_seed(0)
    codes = torch.randn(512, 64)
    use = 1 / torch.arange(1, 513).float()[torch.randperm(512)][:, None]
    for scale in torch.logspace(-1, 3, 30):
        moved = {"sums": codes * use * scale, "codes before": codes + 0.3 * torch.randn_like(codes)}
        assert find_averages(moved, [codes]) == {"codes before"}


def test_only_tensors_of_one_form_are_compared() -> None:
    torch.manual_seed(0)
    first, = weights(1)
    moved = {"same": first.clone(), "turned": first.t().contiguous(), "flat": first.flatten(), "few": first[:1, :40]}
    assert find_averages(moved, [first]) == {"same"}
    assert find_averages({"few": first[:1, :40]}, [first[:1, :40]]) == set()
    assert find_averages({"in other memory": first.t().contiguous().t()}, [first]) == {"in other memory"}
    assert find_averages(moved, []) == find_averages({}, [first]) == set()


class Codes(nn.Module):
    """A trained layer, and codes of its shape that follow inputs, in one of the ways in which modules keep these."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(SHAPE[1], SHAPE[0])
        codes = torch.randn(SHAPE)
        if kind == "buffer":
            self.register_buffer("codes", codes)
        else:
            self.codes = nn.Parameter(codes, requires_grad=kind == "parameter")
        self.register_buffer("layerweight", self.layer.weight.detach().clone())  # an average, by another name

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codes.lerp_(torch.randn(SHAPE), 0.1)
            self.layerweight.lerp_(self.layer.weight, 0.1)
        return self.layer(inputs)


@pytest.mark.parametrize("kind, by", [
    ("buffer", "name"), ("buffer", "number"), ("frozen parameter", "name"), ("frozen parameter", "number"),
    ("parameter", "name"),
])
def test_codes_that_move_are_exact_and_averages_are_not(tmp_path, kind: str, by: str) -> None:
    torch.manual_seed(0)
    model = Codes(kind)
    own = ("weight", "bias")
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(4):
        optimizer.zero_grad()
        model(torch.randn(30, SHAPE[1])).square().mean().backward()
        optimizer.step()
        state, by_name = get_state_dict(model, optimizer)
        if by == "number" or kind == "parameter":
            by_name = optimizer.state_dict()
        if kind == "parameter":  # which has number 0, and no state
            by_name = {"state": {f"layer.{name}": by_name["state"][1 + place] for place, name in enumerate(own)}}
        dsq_ckpt.save({"model": state, "optimizer": by_name}, tmp_path / str(number), model=model)
        target: dict[str, dict[str, torch.Tensor]] = {"model": {}}
        dsq_ckpt.load(target, tmp_path / str(number))
        assert target["model"]["codes"].equal(model.codes)
        assert target["model"]["layerweight"].equal(model.layerweight) == (number < 2)
        if by == "name":
            assert not target["model"]["layer.weight"].equal(model.layer.weight)


def test_weights_that_need_no_gradient_when_saved_are_lossy_where_an_optimizer_trains_them(tmp_path) -> None:
    """A discriminator, while the generator is trained."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(*SHAPE), "judge": nn.Linear(*SHAPE)})
    optimizers = {name: torch.optim.AdamW(part.parameters()) for name, part in model.items()}
    for number in range(4):
        for name, part in model.items():
            part.requires_grad_(True)
            part(torch.randn(30, SHAPE[0])).square().mean().backward()
            optimizers[name].step()
        model["judge"].requires_grad_(False)
        state = {
            "model": model.state_dict(), **{name: optimizer.state_dict() for name, optimizer in optimizers.items()}
        }
        dsq_ckpt.save(state, tmp_path / str(number), model=model)
        target: dict[str, dict[str, torch.Tensor]] = {"model": {}}
        dsq_ckpt.load(target, tmp_path / str(number))
        assert target["model"]["judge.weight"].equal(model["judge"].weight) == (number < 2)
