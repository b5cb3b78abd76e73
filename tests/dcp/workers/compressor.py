"""`Compressor` on several ranks: all choose the same, models stay as they were, and come back."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from harness import done, equal_everywhere, fails_everywhere, whole, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest, is_complete
from tests.helpers.training import Net, compute_loss, train


def wrapped(kind: str, size: int, seed: int = 0) -> nn.Module:
    model: nn.Module = Net(seed)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        return model
    return DistributedDataParallel(model)


def check(kind: str, system: str, parallel: bool, run: Path, rank: int, size: int) -> None:
    model = wrapped(kind, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = {"system": system, "search": {"parallel_trials": parallel}}
    looked_at = model.module if isinstance(model, DistributedDataParallel) else model
    history = dsq_ckpt.SaveHistory()
    compressor = dsq_ckpt.Compressor(
        model, optimizer, config, lambda: compute_loss(looked_at), check=lambda: compute_loss(looked_at, 10_001 + rank),
        history=history,
    )
    for number in range(2):
        train(model, optimizer, 40 * number, 40 * number + 40, rank)
        for buffer in looked_at.buffers():  # each rank has its own, and a restore gives all ranks those of one
            dist.broadcast(buffer, 0)
        before = whole(looked_at.state_dict())
        metric = compute_loss(looked_at, 10_001 + rank)
        compressor.save(run / str(number))
        assert all(torch.equal(value, before[name]) for name, value in whole(looked_at.state_dict()).items())
        told = [None] * size
        dist.all_gather_object(told, {key: value for key, value in compressor.quality.items() if key != "seconds"})
        assert all(quality == told[0] for quality in told), told
    manifest = Manifest.read(run / "1")
    assert manifest.depth == 1 and manifest.quality["satisfied"]
    assert manifest.quality["check_degradation"] <= 0.05 and manifest.quality["checks"] >= 2
    other = wrapped(kind, size, seed=7)
    fresh = torch.optim.AdamW(other.parameters(), lr=3e-3)
    plain = other.module if isinstance(other, DistributedDataParallel) else other
    resumed = dsq_ckpt.Compressor(
        other, fresh, config, lambda: compute_loss(plain), check=lambda: compute_loss(plain, 10_001 + rank),
        history=history,
    )
    resumed.load(run / "1")
    lost = torch.tensor([compute_loss(plain, 10_001 + rank) - metric])
    dist.all_reduce(lost)
    bound = manifest.quality.get("restore_may_lose", 0.05 * manifest.quality["metric"])
    assert float(lost) / size <= 1.01 * bound + 1e-6, (lost, manifest.quality)
    assert ("restore_loses" in manifest.quality) == (system == "dsq")
    if system == "dsq":
        assert abs(abs(float(lost)) / size - manifest.quality["restore_loses"]) < 1e-5, (lost, manifest.quality)
    train(other, fresh, 80, 85, rank)
    resumed.save(run / "2")
    assert Manifest.read(run / "2").lossy_resumes == 1
    done(f"{kind} {system} {'parallel' if parallel else 'together'}")


def refused(size: int) -> None:
    """Ranks that hold parts of one model cannot try different configurations."""
    model = wrapped("fsdp", size)
    fails_everywhere(
        lambda: dsq_ckpt.Compressor(
            model, config={"search": {"parallel_trials": True}}, evaluate=lambda: compute_loss(model)
        ),
        "ConfigError: search.parallel_trials is true, but the model is sharded",
    )
    done("fsdp dsq parallel")


def changed_on_one_rank(kind: str, path: Path, rank: int, size: int) -> None:
    """Its `evaluate` changes the model: no rank saves."""
    model = wrapped(kind, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    looked_at = model.module if isinstance(model, DistributedDataParallel) else model
    train(model, optimizer, 0, 5, rank)

    def evaluate() -> float:
        loss = compute_loss(looked_at)
        if rank == 1:
            for module in looked_at.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            looked_at.hidden.weight.data.mul_(0.5)
        return loss

    compressor = dsq_ckpt.Compressor(model, optimizer, None, evaluate)
    before = whole(looked_at.state_dict())
    fails_everywhere(lambda: compressor.save(path), "`evaluate` changed 'hidden.weight'")
    assert all(torch.equal(value, before[name]) for name, value in whole(looked_at.state_dict()).items())
    assert not is_complete(path)
    done(f"{kind} changed")


def functions_on_one_rank(path: Path, rank: int, size: int) -> None:
    """Ranks evaluate together: one that has an `evaluate` or a `check` alone would wait for the others."""
    model = wrapped("ddp", size)
    inner = model.module
    assert isinstance(inner, nn.Module)

    def confirm() -> float:
        return compute_loss(inner, 1)

    for name, evaluate, check in (
        ("check", lambda: compute_loss(inner), confirm if rank == 1 else None),
        ("evaluate", confirm if rank == 1 else None, None),
    ):
        compressor = dsq_ckpt.Compressor(model, evaluate=evaluate, check=check)
        told = f"rank 1 was given a function `{name}`, and rank 0 none"
        fails_everywhere(lambda: compressor.save(path), told)  # noqa: B023
        fails_everywhere(lambda: compressor.save(path, background=True), told)  # noqa: B023
    assert not is_complete(path)
    done("functions on one rank")


def check_that_fails_on_one_rank(path: Path, rank: int, size: int) -> None:
    """All ranks store the same, with the most conservative configuration."""
    model = wrapped("ddp", size)
    inner = model.module
    assert isinstance(inner, nn.Module)
    calls: list[int] = []

    def confirm() -> float:
        calls.append(1)
        if rank == 1 and len(calls) == 4:
            raise RuntimeError("no more data")
        return compute_loss(inner, 1)

    compressor = dsq_ckpt.Compressor(model, evaluate=lambda: compute_loss(inner), check=confirm)
    compressor.save(path)
    quality = Manifest.read(path).quality
    line = confirm.__code__.co_firstlineno + 3
    says = f"`check` raised RuntimeError: no more data (compressor.py, line {line})"
    assert not quality["satisfied"] and quality["reason"] == says, quality
    done("check fails on one rank")


def buffers_that_differ(parallel: bool, path: Path, rank: int, size: int) -> None:
    """DDP gives all ranks the buffers of rank 0, without gradients in the first forward pass alone."""
    model = wrapped("ddp", size)
    inner = model.module
    assert isinstance(inner, Net)
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), 0, 5, rank)
    own, seen = inner.norm.running_mean.clone(), list[torch.Tensor]()
    assert not equal_everywhere(own)

    def evaluate() -> float:
        loss = compute_loss(model)
        seen.append(inner.norm.running_mean.clone())
        return loss

    config = {"search": {"parallel_trials": parallel}}
    quality = dsq_ckpt.Compressor(model, None, config, evaluate).save(path).quality
    assert quality is not None and "noise" not in quality, quality
    assert len(seen) > 2 and all(mean.equal(seen[0]) for mean in seen) and equal_everywhere(seen[0])
    assert inner.norm.running_mean.equal(own)
    compute_loss(model)
    assert equal_everywhere(inner.norm.running_mean)
    done("buffers that differ")


def group_left_out(path: Path, rank: int, size: int) -> None:
    """The state of sharded parameters that the optimizer no longer has is not asked for."""
    def make_training(*layers: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wrapped("fsdp", size, len(layers))
        rates = {"hidden": 0.1, "head": 0.2}
        groups = [{"params": model.get_submodule(name).parameters(), "lr": rates[name]} for name in layers]
        return model, torch.optim.AdamW(groups)

    model, optimizer = make_training("hidden", "head")
    train(model, optimizer, 0, 1, rank)
    dsq_ckpt.Compressor(model, optimizer, "exact").save(path)
    other, fresh = make_training("head")
    fresh.param_groups[0]["lr"] = 0.0
    dsq_ckpt.Compressor(other, fresh).load(path)
    assert fresh.param_groups[0]["lr"] == 0.2
    moments = [own.state[net.head.weight]["exp_avg"].to_local() for own, net in ((optimizer, model), (fresh, other))]
    assert moments[0].equal(moments[1])
    done("group left out")


def frozen_layers(path: Path, rank: int, size: int) -> None:
    """Their state comes back, which torch drops; a warning tells where nothing says how it is sharded."""
    def make_training(kind: str, frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model: nn.Module = Net()
        for layer in model.children():
            layer.requires_grad_(not (frozen and layer is model.hidden))
        if kind == "fsdp1":
            for name, layer in list(model.named_children()):
                setattr(model, name, FullyShardedDataParallel(layer, device_id=torch.device("cpu")))
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        return model, torch.optim.AdamW(model.parameters())

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        states = {
            name: optimizer.state[parameter] for name, parameter in model.named_parameters()
            if parameter in optimizer.state
        }
        local = {f"{name}.{key}": value for name, own in states.items() for key, value in own.items()}
        return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in local.items()}

    for kind in ("fsdp2", "fsdp1"):
        model, optimizer = make_training(kind, False)
        train(model, optimizer, 0, 2, rank)
        expected = {name: value.clone() for name, value in state(model, optimizer).items()}
        dsq_ckpt.Compressor(model, optimizer, "exact").save(path / kind)
        for parameter in (parameter for name, parameter in model.named_parameters() if "hidden" in name):
            parameter.requires_grad_(False)
        fresh = make_training(kind, True)
        for target in ((model, optimizer), fresh):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dsq_ckpt.Compressor(*target).load(path / kind)
            told = any(
                "is not loaded: these parameters need no gradient now" in str(warning.message) for warning in caught
            )
            loaded = state(*target)
            assert loaded.keys() <= expected.keys() and all(loaded[name].equal(expected[name]) for name in loaded)
            less = loaded.keys() < expected.keys()
            assert less == (kind == "fsdp1" and target is fresh), (kind, loaded.keys())
            assert told == (less and rank == 0), (kind, told)
    done("frozen layers")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with world() as (rank, size):
        for number, (kind, system, parallel) in enumerate(
            [("fsdp", "dsq", False), ("ddp", "dsq", False), ("ddp", "dsq", True), ("fsdp", "uniform", False)]
        ):
            check(kind, system, parallel, Path(sys.argv[1]) / str(number), rank, size)
        refused(size)
        for kind in ("fsdp", "ddp"):
            changed_on_one_rank(kind, Path(sys.argv[1]) / kind / "a", rank, size)
        functions_on_one_rank(Path(sys.argv[1]) / "one" / "a", rank, size)
        check_that_fails_on_one_rank(Path(sys.argv[1]) / "fails" / "a", rank, size)
        for parallel in (False, True):
            buffers_that_differ(parallel, Path(sys.argv[1]) / f"buffers-{parallel}" / "a", rank, size)
        group_left_out(Path(sys.argv[1]) / "left" / "a", rank, size)
        frozen_layers(Path(sys.argv[1]) / "frozen", rank, size)
