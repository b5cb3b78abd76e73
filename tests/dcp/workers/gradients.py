"""Average gradients on several ranks: every rank has its part of what one process has that sees all batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from harness import done, equal_everywhere, world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dsq_ckpt.gradients.sensitivity import GradientAverage, get_named_parameters
from tests.helpers.gradients import Net, RecordedGradients, make_tokens

STEPS = 3
MICRO = 2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def reference(size: int, clip: bool = False) -> dict[str, torch.Tensor]:
    """Averages of one process that sees the batches of all ranks."""
    model = Net()
    optimizer, recorded = optimizer_of(model), RecordedGradients(model)
    for step in range(STEPS):
        for rank in range(size):
            for part in range(MICRO):
                (model(make_tokens(100 * step + 10 * rank + part)) / (size * MICRO)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        recorded.add()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.float() for name, value in recorded.averages.items()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, clip: bool, after: Callable[[], None]) -> None:
    """The batches of this rank; gradients are reduced with the last micro-batch only."""
    for step in range(STEPS):
        for part in range(MICRO):
            last = part == MICRO - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            with model.no_sync() if not last and hasattr(model, "no_sync") else nullcontext():
                (model(make_tokens(100 * step + 10 * rank + part)) / MICRO).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        after()
        optimizer.zero_grad()


def close(value: torch.Tensor | None, expected: torch.Tensor, name: str) -> None:
    assert value is not None, name
    assert value.dtype == torch.float32 and value.shape == expected.shape, (name, value.shape, expected.shape)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-8, msg=lambda text: f"{name}: {text}")


def same_mean_squares(average: GradientAverage, expected: dict[str, torch.Tensor]) -> None:
    """What ranks report adds up to the mean square of the whole."""
    held = average.mean_squares()
    every = [held] * dist.get_world_size()
    dist.all_gather_object(every, held)
    for name, value in expected.items():
        squares, elements = (sum(sums[name][part] for sums in every) for part in range(2))
        assert elements % value.numel() == 0 and elements, name  # replicas count more than once
        torch.testing.assert_close(squares / elements, float(value.double().square().mean()), rtol=1e-4, atol=0.0)


def shards(average: GradientAverage, model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in get_named_parameters(model).items():
        if name in average.aliases or name not in expected:
            continue
        assert isinstance(parameter, DTensor)
        whole = distribute_tensor(expected[name], parameter.device_mesh, parameter.placements)
        close(average.average(name), whole.to_local(), name)
    assert average.average("unused.weight") is None
    same_mean_squares(average, expected)


def fsdp2(mesh: DeviceMesh, rank: int, size: int, drive: str, clip: bool) -> None:
    model = Net()
    for layer in (model.up, model.unused, model.frozen):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, average = optimizer_of(model), GradientAverage(get_named_parameters(model))
    if drive == "step":
        average.attach(optimizer)
    else:
        average.attach(optimizer, "manual")
        average.attach_to_parameters(settle=False)
    train(model, optimizer, rank, clip, lambda: None)
    assert average.steps == STEPS
    shards(average, model, reference(size, clip))
    done(f"FSDP2 on {tuple(mesh.shape)}, {drive}, clip={clip}")


def inside_backward(mesh: DeviceMesh, rank: int, size: int) -> None:
    """FSDP2 with an optimizer per parameter, whose hook frees the gradient."""
    model = Net()
    fully_shard(model, mesh=mesh)
    average = GradientAverage(get_named_parameters(model))

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in trained}
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(step)
    average.attach_to_parameters()
    nothing = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    train(model, nothing, rank, False, lambda: None)
    assert average.steps == STEPS
    shards(average, model, reference(size))
    done("optimizers inside backward")


def ddp(rank: int, size: int, views: bool) -> None:
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True, gradient_as_bucket_view=views)
    optimizer, average = optimizer_of(model), GradientAverage(get_named_parameters(model))
    average.attach(optimizer)
    train(model, optimizer, rank, True, lambda: None)
    expected = reference(size, True)
    for name, value in expected.items():
        own_average = average.average(name)
        close(own_average, value, name)
        assert own_average is not None and equal_everywhere(own_average), name
    same_mean_squares(average, expected)
    done(f"DDP, buckets={views}")


def fsdp1(rank: int, size: int) -> None:
    """Flat shards: parts of parameters, or nothing of them."""
    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer, average = optimizer_of(model), GradientAverage(get_named_parameters(model))
    average.attach(optimizer)
    train(model, optimizer, rank, False, lambda: None)
    assert average.steps == STEPS
    expected = reference(size)
    for name, value in expected.items():
        part = average.average(name)
        parts = [part] * size
        dist.all_gather_object(parts, part)
        held = torch.cat([part.reshape(-1) for part in parts if part is not None])
        close(held, value.reshape(-1), name)
    same_mean_squares(average, expected)
    done("FSDP1")


def tensor_parallel(mesh: DeviceMesh, rank: int, size: int) -> None:
    """The same batch on all ranks, columns and rows of layers apart."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    model.load_state_dict(whole.state_dict())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    recorded, average = RecordedGradients(whole), GradientAverage(get_named_parameters(model))
    optimizers = [optimizer_of(model), optimizer_of(whole)]
    average.attach(optimizers[0])
    for step in range(STEPS):
        batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        for module in (model, whole):
            module(batch).square().mean().backward()
        recorded.add()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in get_named_parameters(model).items():
        assert isinstance(parameter, DTensor)
        expected = distribute_tensor(recorded.averages[name].float(), mesh, parameter.placements)
        close(average.average(name), expected.to_local(), name)
    done("tensor parallel")


def partial_gradients(mesh: DeviceMesh, rank: int, size: int) -> None:
    """Gradients that are not reduced, or lie otherwise than their parameters, are left out and named once."""
    parameters = {
        "good": nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])),
        "partial": nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()])),
        "other": nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])),
    }
    plane = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ranks", "alone"))
    alike = nn.Parameter(distribute_tensor(torch.zeros(4, 4), plane, [Shard(0), Replicate()]))
    average = GradientAverage({**parameters, "alike": alike})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            parameters["good"].grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            parameters["partial"].grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
            parameters["other"].grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
            alike.grad = distribute_tensor(torch.ones(4, 4), plane, [Shard(0), Shard(1)])  # over one rank: the same
            if rank == 0:  # without any other rank: no communication
                average.capture()
                average.settle()
    if rank == 0:
        assert sorted(str(warning.message)[:28] for warning in caught if "gradient of" in str(warning.message)) == [
            "the gradient of 'other' is p", "the gradient of 'partial' is",
        ], [str(warning.message) for warning in caught]
        assert average.steps == 2 and average.average("partial") is None and average.average("other") is None
        close(average.average("good"), torch.ones(4 // size, 4), "good")
        close(average.average("alike"), torch.ones(4 // size, 4), "alike")
    done("partial gradients")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, ranks):
        line = init_device_mesh("cpu", (ranks,))
        fsdp2(line, me, ranks, "step", clip=False)
        fsdp2(line, me, ranks, "step", clip=True)
        fsdp2(line, me, ranks, "hooks", clip=False)
        fsdp2(init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards")), me, ranks, "step", False)
        inside_backward(line, me, ranks)
        ddp(me, ranks, views=False)
        ddp(me, ranks, views=True)
        fsdp1(me, ranks)
        tensor_parallel(line, me, ranks)
        partial_gradients(line, me, ranks)
