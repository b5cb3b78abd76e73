"""Optimizers whose state is not only that of parameters and groups, of the kinds that published packages have."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class CountingAdamW(torch.optim.AdamW):
    """One that tells and takes more by methods of its own, as StableSPAM and Ranger21 of pytorch_optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, lr=lr)
        self.own: dict[str, Any] = {"steps": 0, "rates": {}, "noise": torch.zeros(3), "past": []}

    def step(self, closure: Any = None) -> Any:
        steps = self.own["steps"] + 1
        past = [*self.own["past"], torch.full((steps, 2), float(steps))][-3:]
        rates = {**self.own["rates"], f"of {steps}": 0.5 ** steps}
        self.own = {"steps": steps, "rates": rates, "noise": self.own["noise"] + 1, "past": past}
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": dict(self.own), "steps": self.own["steps"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.own = dict(state_dict["own"])
        assert state_dict["steps"] == self.own["steps"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class HookedSGD(torch.optim.SGD):
    """One that tells and takes more by hooks, as those of heavyball; its numbers are those of its parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.calls = 0
        self.register_state_dict_post_hook(HookedSGD._tell)
        self.register_load_state_dict_pre_hook(HookedSGD._take)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)

    def _tell(self, state_dict: dict[str, Any]) -> None:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        state_dict["hooked"] = {"pickled": pickle.dumps(self.calls), "by_number": dict.fromkeys(numbers, self.calls)}

    def _take(self, state_dict: dict[str, Any]) -> None:
        own = state_dict["hooked"]
        self.calls = pickle.loads(own["pickled"])
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        assert own["by_number"] == dict.fromkeys(numbers, self.calls)
        assert set(state_dict["state"]) <= set(numbers)


class GlobalStateSGD(torch.optim.SGD):
    """One with entries of its state that are of no parameter, as MADGRAD has `k`, and SPAM `total_step`."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.state["total_step"] = 0

    def step(self, closure: Any = None) -> Any:
        self.state["total_step"] += 1
        self.state.setdefault("weight", torch.zeros(1)).add_(2)
        self.state.setdefault("ema", {}).setdefault("short", torch.zeros(2)).add_(3)
        return super().step(closure)


class GradientWindow(torch.optim.Optimizer):
    """One that keeps the last gradients of each parameter in a dict, a list, and as rows of a tensor."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ):
            state = self.state[parameter]
            if not state:
                state.update(step=0, past={}, numbered={}, listed=[], rows=torch.zeros(0, 2), unset=None)
            step = state["step"]
            state["past"][f"of {step % 5}"] = parameter.grad.clone()
            state["numbered"][step % 5] = {"size": torch.tensor(float(step)), "step": step}
            state["listed"] = [*state["listed"], parameter.grad.clone()][-5:]
            state["rows"] = torch.cat([state["rows"], torch.full((1, 2), float(step))])
            if step == 4:
                state["unset"] = torch.ones(3)
            state["step"] += 1
            parameter.sub_(sum(state["past"].values()) / len(state["past"]), alpha=0.01)


class ForwardingAdamW(torch.optim.Optimizer):
    """One around another, whose state and state dict it has, and nothing else: neither hooks nor defaults."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=lr)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class SlowWeights(ForwardingAdamW):
    """One with slow weights and a count beside the state that it shares, which it tells in a state dict as torch's."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.slow: dict[int, torch.Tensor] = {}
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        self.slow = self.slow or {number: parameter.detach().clone() for number, parameter in enumerate(parameters)}
        loss = super().step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            with torch.no_grad():
                for parameter, slow in zip(parameters, self.slow.values(), strict=True):
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        inner = super().state_dict()
        state = {number: {**entry, "slow": self.slow[number]} for number, entry in inner["state"].items()}
        return {"state": state, "param_groups": [{**group, "steps": self.steps} for group in inner["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = [dict(group) for group in state_dict["param_groups"]]
        states = {number: dict(entry) for number, entry in state_dict["state"].items()}
        self.steps = groups[0]["steps"]
        for group in groups:
            del group["steps"]
        self.slow = {number: entry.pop("slow").clone() for number, entry in states.items()}
        super().load_state_dict({"state": states, "param_groups": groups})


class HiddenStateAdamW(ForwardingAdamW):
    """One around another, whose state is in its state dict but not in its attribute, as Lookahead of timm."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.defaults = self.optimizer.defaults

    @property
    def state(self) -> Any:
        return {}


def train_on_noise(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Train on batches of noise."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def leaves(node: Any, way: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return all values of nested dicts and lists by the keys that lead there, with those of tensors as bytes."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if entries is None or not node:
        if isinstance(node, torch.Tensor):
            whole = node.full_tensor() if hasattr(node, "full_tensor") else node
            return {way: (whole.dtype, whole.tolist())}
        return {way: node}
    return {key: value for place, inner in entries for key, value in leaves(inner, (*way, place)).items()}


KINDS = [
    CountingAdamW, HookedSGD, GlobalStateSGD, GradientWindow, torch.optim.AdamW, ForwardingAdamW, SlowWeights,
    HiddenStateAdamW,
]


def make_trained_pair(kind, steps=0, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(64, 64)
    optimizer = kind(model.parameters())
    train_on_noise(model, optimizer, steps, seed)
    return model, optimizer


def make_pair(kind, steps=0, **options):
    torch.manual_seed(steps)
    model = nn.Linear(80, 96, bias=False)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 80)).square().sum().backward()
        optimizer.step()
    return model, optimizer
