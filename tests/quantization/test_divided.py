"""First moments of gradients that were divided before: the error of the next update keeps its bound there too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.engine.local_state import LocalItems, LocalShard, make_items, make_layout
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.layout import Layout
from tests.helpers.training import Net, train


class LaProp(torch.optim.Optimizer):
    """One that keeps what LaProp keeps, and makes its update."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-15})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                    state.update(exp_avg_lr_1=0.0, exp_avg_lr_2=0.0)
                state["exp_avg_lr_1"] = state["exp_avg_lr_1"] * first + (1 - first) * lr
                state["exp_avg_lr_2"] = state["exp_avg_lr_2"] * second + 1 - second
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                root = (state["exp_avg_sq"] / state["exp_avg_lr_2"]).sqrt() + group["eps"]
                state["exp_avg"].mul_(first).addcdiv_(parameter.grad, root, value=(1 - first) * lr)
                if lr:  # torch makes a step without one, before a load
                    parameter.add_(state["exp_avg"], alpha=-lr / state["exp_avg_lr_1"])


class Adopt(torch.optim.Optimizer):
    """One that keeps what ADOPT keeps, and makes its update."""

    own: ClassVar[dict[str, Any]] = {"clip_exp": 0.25, "decoupled": False}

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.9999), "eps": 1e-6, **self.own})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
                    state["exp_avg_sq"] = parameter.grad.square()
                    continue
                state["step"] += 1
                divided = parameter.grad / state["exp_avg_sq"].sqrt().clamp(min=group["eps"])
                most = float(state["step"]) ** 0.25
                state["exp_avg"].lerp_(divided.clamp_(-most, most), 1 - first)
                parameter.add_(state["exp_avg"], alpha=-group["lr"])
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)


class OfficialAdopt(Adopt):
    """The same with the settings of the paper's authors."""

    own: ClassVar[dict[str, Any]] = {"decouple": False, "foreach": None, "maximize": False, "capturable": False}


@pytest.mark.parametrize(
    ("kind", "steps"), [(LaProp, 3), (LaProp, 12), (LaProp, 40), (Adopt, 3), (OfficialAdopt, 3)]
)  # later, ADOPT's errors are small in units of Adam's too
def test_updates_of_optimizers_that_average_divided_gradients(tmp_path, kind, steps) -> None:
    """The update is the first moment itself, so its error is that of the update, and no units of Adam's keep it."""
    model = Net()
    optimizer = kind(model.parameters())
    train(model, optimizer, 0, steps)
    dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a")
    model_too = Net(1)
    restored = kind(model_too.parameters())
    dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
    for parameter, other in zip(model.parameters(), model_too.parameters(), strict=True):
        now, before = restored.state[other]["exp_avg"], optimizer.state[parameter]["exp_avg"]
        assert (now - before).norm() <= 0.275 * before.norm()


def shards() -> list[LocalShard]:
    size = (64, 64)
    return [
        LocalShard(ChunkKey(f"optimizer.state.w.{name}", (0, 0), size), size, torch.float32, lambda: torch.ones(size))
        for name in ("exp_avg", "exp_avg_sq")
    ]


def test_knowledge_of_one_rank_holds_for_all() -> None:
    """Options are written by one rank, and lie there alone where a planner of one's own does so."""
    options = SaveOptions(DSQConfig())
    own = make_layout(shards(), options)
    assert own.tensors["optimizer.state.w.exp_avg"] == "exp_avg/linear/update"
    told = make_layout([], options, objects={"optimizer.param_groups.0.clip_exp": 0.25})
    agreed = Layout.union([own, told])
    assert agreed.tensors["optimizer.state.w.exp_avg"] == "exp_avg/linear/relative"
    assert Layout.union([agreed]) == agreed
    local = LocalItems(make_items(shards(), options)).apply_layout(agreed)
    first = next(item for item in local.items if item.key.fqn.endswith("exp_avg"))
    assert first.group == "exp_avg/linear/relative" and first.second_moment is None
    assert first.config == agreed.groups[first.group]
