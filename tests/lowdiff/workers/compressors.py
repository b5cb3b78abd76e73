"""Compressors as communication hooks of DDP, on as many ranks as there are; prints "[ok] name" for each check."""

from __future__ import annotations

import copy
import datetime
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.compressors import GradientCompressor, GradientInfo, gradient_compressor

SPECS = ("topk:0.05", "topk:0.3,feedback=off", "fp16", "bf16", "kmeans:16", "kmeans:5,feedback=off")
SMALL = 0.0005
"""MB: every bucket holds few parameters, and their order changes after the first step."""
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def perceptron() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))


def images() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, (3, 1)), nn.Flatten(), nn.Linear(4 * 4 * 6, 2))
    return model.to(memory_format=torch.channels_last)


def batch(model: nn.Module, step: int) -> Tensor:
    """Other data on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    first = next(iter(model.parameters()))
    shape = (5, 12) if first.dim() == 2 else (2, 3, 8, 8)
    return torch.randn(shape, generator=generator)


def backward(model: nn.Module, step: int) -> None:
    model(batch(model, step)).square().mean().backward()


def inner(model: DDP) -> dict[str, nn.Parameter]:
    return dict(model.module.named_parameters())


def gathered(tensor: Tensor) -> list[Tensor]:
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.detach().contiguous())
    return tensors


def same_everywhere(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        for other in gathered(tensor):
            assert torch.equal(other.view(torch.int32), tensor.detach().contiguous().view(torch.int32))


def local_gradients(model: DDP, run: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Gradients of this rank, of a copy that DDP knows nothing of."""
    alone = copy.deepcopy(model.module)
    for p in alone.parameters():
        p.grad = None
    run(alone)
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def mean_of(sent: Tensor) -> Tensor:
    total = torch.zeros_like(sent)
    for other in gathered(sent):
        total += other
    return total / dist.get_world_size()


def valid(info: GradientInfo, gradient: Tensor) -> None:
    flat = gradient.reshape(-1)
    if info.support is not None:
        outside = torch.ones(flat.numel(), dtype=torch.bool)
        outside[info.support] = False
        assert not flat[outside].any()
    if info.dtype is not None:
        assert torch.equal(flat.to(info.dtype).to(flat.dtype), flat)
    if info.levels is not None:
        assert len(info.levels) <= 256
        assert torch.isin(flat.float(), info.levels).all()
    if info.probe is not None:
        assert torch.equal(flat[info.probe[0]], info.probe[1])
    elif info.support is None:
        assert not flat.numel()


def follow_topk(model: DDP, ratio: float, feedback: bool, steps: int = 5) -> None:
    """Every step against torch.topk, on this rank's own gradients."""
    topk = gradient_compressor(f"topk:{ratio},feedback={'on' if feedback else 'off'}")
    topk.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    residuals = {name: torch.zeros(p.shape).reshape(-1) for name, p in inner(model).items()}
    for step in range(steps):
        local = local_gradients(model, lambda alone, step=step: backward(alone, step))
        optimizer.zero_grad()
        backward(model, step)
        infos = topk.take()
        assert topk.take() == {}
        for name, p in inner(model).items():
            whole = residuals[name] + local[name].reshape(-1)
            k = max(1, round(ratio * p.numel()))
            sent = torch.zeros_like(whole)
            chosen = whole.abs().topk(k).indices
            sent[chosen] = whole[chosen]
            assert torch.equal(p.grad.reshape(-1), mean_of(sent)), (step, name)
            if feedback:
                residuals[name] = torch.where(sent != 0, 0, whole)
                assert torch.equal(topk.state()[name].reshape(-1), residuals[name]), (step, name)
                assert torch.equal(residuals[name] + sent, whole)
            assert set(chosen.tolist()) <= set(infos[p].support.tolist())
            valid(infos[p], p.grad)
        same_everywhere(p.grad for p in model.parameters())
        optimizer.step()


@check
def topk_follows_the_oracle() -> None:
    follow_topk(DDP(perceptron()), 0.05, True)
    follow_topk(DDP(perceptron()), 0.2, False)


@check
def topk_survives_rebuilt_buckets() -> None:
    follow_topk(DDP(perceptron(), bucket_cap_mb=SMALL), 0.05, True)
    follow_topk(DDP(perceptron(), bucket_cap_mb=SMALL, gradient_as_bucket_view=True), 0.05, True)


@check
def topk_of_channels_last() -> None:
    follow_topk(DDP(images()), 0.1, True, 3)
    follow_topk(DDP(images(), bucket_cap_mb=SMALL, gradient_as_bucket_view=True), 0.1, True, 3)


@check
def traces_hold_and_ranks_agree() -> None:
    for spec in SPECS:
        for make in (perceptron, images):
            model = DDP(make(), bucket_cap_mb=SMALL)
            compressor = gradient_compressor(spec)
            compressor.attach(model)
            optimizer = torch.optim.Adam(model.parameters())
            for step in range(4):
                optimizer.zero_grad()
                backward(model, step)
                infos = compressor.take()
                assert set(infos) == set(model.parameters())
                for p, info in infos.items():
                    valid(info, p.grad)
                same_everywhere(p.grad for p in model.parameters())
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
            same_everywhere(model.parameters())


@check
def kmeans_conserves_across_rebuilds() -> None:
    model = DDP(perceptron(), bucket_cap_mb=SMALL)
    kmeans = gradient_compressor("kmeans:4")
    kmeans.attach(model)
    before = {name: torch.zeros(p.shape) for name, p in inner(model).items()}
    owners = []
    for step in range(5):
        local = local_gradients(model, lambda alone, step=step: backward(alone, step))
        model.zero_grad()
        backward(model, step)
        after, moved = {}, []
        for name, p in inner(model).items():
            held = gathered(kmeans.state()[name])
            assert ((torch.stack(held) != 0).sum(0) <= 1).all()  # every element has one owner
            moved.append(torch.stack(held) != 0)
            after[name] = torch.stack(held).sum(0)
            mean = torch.stack(gathered(local[name])).mean(0)
            torch.testing.assert_close(after[name] + p.grad, before[name] + mean, rtol=1e-5, atol=1e-6)
        before = after
        owners.append(moved)
    if dist.get_world_size() > 1:  # the buckets of the first step were others
        assert any((a[0] & b[1]).any() for a, b in zip(owners[0], owners[1], strict=True))


@check
def mean_is_right_in_the_long_run() -> None:
    steps = 80
    for spec, bound in (("topk:0.05", 0.3), ("kmeans:3", 0.1), ("kmeans:2", 0.3)):
        model = DDP(nn.Linear(40, 1, bias=False))
        gradient_compressor(spec).attach(model)
        x = torch.randn(1, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
        total = torch.zeros(1, 40)
        for _ in range(steps):
            model.zero_grad()
            model(x).sum().backward()
            total += model.module.weight.grad
        worst = (total / steps - mean_of(x)).abs().max().item()
        assert worst < bound, (spec, worst)


class Branches(nn.Module):
    """Parts that are used on demand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


@check
def residuals_of_unused_parameters_wait() -> None:
    for spec in ("topk:0.1", "kmeans:3"):
        model = DDP(Branches(), find_unused_parameters=True)
        compressor = gradient_compressor(spec)
        compressor.attach(model)
        weight, world = model.module.sometimes.weight, dist.get_world_size()
        pending = torch.zeros(weight.shape)
        for step, users in enumerate((world, 0, 1, 0, world)):  # ranks that use it
            def run(module: nn.Module, step: int = step, users: int = users) -> None:
                module(batch(module, step), dist.get_rank() < users).square().sum().backward()

            local = local_gradients(model, run).get("sometimes.weight", torch.zeros(weight.shape))
            model.zero_grad(set_to_none=True)
            run(model)
            infos = compressor.take()
            assert (weight.grad is None) == (users == 0) and (weight in infos) == (users > 0)
            left = torch.stack(gathered(compressor.state()["sometimes.weight"])).sum(0)
            if spec.startswith("topk"):  # of each rank its own
                left /= world
            applied = torch.zeros(weight.shape) if weight.grad is None else weight.grad
            pending += torch.stack(gathered(local)).mean(0)
            torch.testing.assert_close(left, pending - applied, rtol=1e-5, atol=1e-5)
            pending -= applied
            for p, info in infos.items():
                valid(info, p.grad)


@check
def accumulation_without_synchronization() -> None:
    def accumulate(module: nn.Module) -> None:
        backward(module, 0)
        backward(module, 1)
        backward(module, 2)

    model = DDP(perceptron())
    topk = gradient_compressor("topk:0.1")
    topk.attach(model)
    local = local_gradients(model, accumulate)
    with model.no_sync():
        backward(model, 0)
        backward(model, 1)
    assert topk.take() == {}
    backward(model, 2)
    infos = topk.take()
    for name, p in inner(model).items():
        whole = local[name].reshape(-1)
        sent = torch.zeros_like(whole)
        chosen = whole.abs().topk(max(1, round(0.1 * p.numel()))).indices
        sent[chosen] = whole[chosen]
        assert torch.equal(p.grad.reshape(-1), mean_of(sent))
        valid(infos[p], p.grad)


def run_of(model: DDP, compressor: GradientCompressor, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@check
def a_loaded_state_goes_on_bit_for_bit() -> None:
    # k-means of shards depends on the buckets, which DDP rebuilds: one bucket and one parameter stay as they are.
    for spec, make in (("topk:0.05", perceptron), ("kmeans:4", lambda: nn.Sequential(nn.Linear(12, 5, bias=False)))):
        torch.manual_seed(4)
        model = DDP(make(), bucket_cap_mb=SMALL if make is perceptron else 25)
        compressor = gradient_compressor(spec)
        compressor.attach(model)
        optimizer = torch.optim.Adam(model.parameters())
        run_of(model, compressor, optimizer, range(3))
        weights, moments = copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict())
        residuals = {name: value.clone() for name, value in compressor.state().items()}
        run_of(model, compressor, optimizer, range(3, 6))

        again = DDP(make(), bucket_cap_mb=SMALL if make is perceptron else 25)
        again.module.load_state_dict(weights)
        other = gradient_compressor(spec)
        other.attach(again)
        other.load_state(residuals)
        resumed = torch.optim.Adam(again.parameters())
        resumed.load_state_dict(moments)
        run_of(again, other, resumed, range(3, 6))
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
        for name, value in compressor.state().items():
            assert torch.equal(value, other.state()[name])


@check
def nan_reaches_all_ranks() -> None:
    for spec in SPECS:
        model = DDP(perceptron())
        gradient_compressor(spec).attach(model)
        with torch.no_grad():
            x = batch(model, 0)
            if dist.get_rank() == dist.get_world_size() - 1:
                x[0, 0] = torch.nan
        model(x).square().mean().backward()
        assert model.module[0].weight.grad.isnan().any(), spec


@check
def compressors_take_turns() -> None:
    model = DDP(perceptron())
    topk = gradient_compressor("topk:0.05")
    topk.attach(model)
    fails(lambda: gradient_compressor("fp16").attach(model), "has compressor 'topk:0.05' already")
    fails(lambda: topk.attach(DDP(perceptron())), "attached to a model already")
    topk.detach()
    local = local_gradients(model, lambda alone: backward(alone, 0))
    backward(model, 0)
    assert topk.take() == {}
    for name, p in inner(model).items():
        torch.testing.assert_close(p.grad, torch.stack(gathered(local[name])).mean(0))
    half = gradient_compressor("fp16")
    half.attach(model)
    backward(model, 1)
    assert {info.dtype for info in half.take().values()} == {torch.float16}
    taken = DDP(perceptron())
    taken.register_comm_hook(None, default_hooks.allreduce_hook)
    fails(lambda: gradient_compressor("kmeans").attach(taken), "cannot be the communication hook")
    fails(lambda: gradient_compressor("topk").attach(nn.Sequential(model)), "contains a DistributedDataParallel")
    gradient_compressor("none").attach(taken)


def fails(action: Callable[[], None], message: str) -> None:
    try:
        action()
    except ConfigError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"expected: {message}")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=45))
    for function in CHECKS:
        function()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"[ok] {function.__name__}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
