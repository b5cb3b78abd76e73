"""Asynchronous saves on several ranks: argv = an empty directory."""

from __future__ import annotations

import datetime
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import depth, done, equal_everywhere, error_of, fails_everywhere, normal, whole, world, zeros
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt import DSQStorageWriter
from dsq_ckpt.engine.options import CompressorInputs
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import FINE


def state_at(step: int, size: int) -> dict[str, Any]:
    """Sharded, replicated and plain tensors, and objects; a function of `step`."""
    mesh = init_device_mesh("cpu", (size,))

    def value(seed: int, *shape: int) -> torch.Tensor:
        return normal(*shape, seed=seed) + 0.001 * step * normal(*shape, seed=100 + seed, scale=1.0)

    return {
        "rows.weight": distribute_tensor(value(1, 101, 64), mesh, [Shard(0)]),
        "columns.weight": distribute_tensor(value(2, 96, 64), mesh, [Shard(1)]),
        "replica.weight": distribute_tensor(value(3, 90, 64), mesh, [Replicate()]),
        "empty.weight": distribute_tensor(value(4, 1, 5000, 2), mesh, [Shard(0)]),
        "plain.weight": value(5, 88, 64),
        "list": [value(6, 80, 64), value(7, 80, 64), value(8, 5)],
        "exp": {"p.exp_avg": value(9, 80, 64) * 1e-3, "p.exp_avg_sq": value(10, 80, 64).square()},
        "bias": value(11, 64),
        "step": step,
        "settings": {"names": ["a", "b"], "step": step},
    }


def flat(state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state)[0]


def train_on(state: dict[str, Any]) -> None:
    """What training does right after the call: everything changes in place."""
    for value in flat(state).values():
        if isinstance(value, torch.Tensor):
            value.fill_(1e9)
    state["settings"]["names"].append("changed")
    state["settings"]["step"] = -1


def read(path: Path, size: int, **options: Any) -> dict[str, Any]:
    target = zeros(flat(state_at(0, size)))
    dsq_ckpt.load(target, path, **options)
    return {**target, **whole(target)}


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for fqn, value in a.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, b[fqn]), fqn
        else:
            assert value == b[fqn], fqn


def reference(root: Path, steps: int, size: int) -> list[dict[str, Any]]:
    """Return the values that synchronous saves decode to, in a process that has loaded a checkpoint, as all have."""
    dsq_ckpt.save(state_at(0, size), root / "before")
    read(root / "before", size)
    values, history = [], dsq_ckpt.SaveHistory()
    for step in range(steps):
        dsq_ckpt.save(state_at(step, size), root / "sync" / str(step), config=FINE, pinned=True, history=history)
        assert depth(root / "sync" / str(step)) == step
    for step in range(steps):
        values.append(read(root / "sync" / str(step), size))
        truth = whole(flat(state_at(step, size)))
        for fqn, value in truth.items():
            limit = 0.2 if "exp_avg" in fqn else 0.03
            assert error_of(value, values[-1][fqn]) < limit, (fqn, error_of(value, values[-1][fqn]))
            assert equal_everywhere(values[-1][fqn]), fqn
        assert values[-1]["step"] == step and values[-1]["settings.step"] == step
    done("synchronous reference")
    return values


def chain(root: Path, values: list[dict[str, Any]], size: int, processes: bool, stage: str) -> None:
    """A chain of asynchronous saves while training goes on; equal to the synchronous one, bit for bit."""
    futures, told, history = [], list[dsq_ckpt.SaveResult](), dsq_ckpt.SaveHistory()
    config = {**FINE, "storage": {"stage": stage}}
    for step in range(len(values)):
        state = state_at(step, size)
        futures.append(dsq_ckpt.async_save(
            state, root / str(step), config=config, processes=processes, pinned=True, on_save=told.append,
            history=history,
        ))
        train_on(state)
    for step, future in enumerate(futures):
        future.result(timeout=240)
        assert depth(root / str(step)) == step, [depth(root / str(n)) for n in range(step + 1)]
        dist.barrier()
        same(read(root / str(step), size), values[step])
    committed = [future.result() for future in futures] if dist.get_rank() == 0 else []
    assert told == committed, (dist.get_rank(), told)
    names = {file.name for file in Manifest.read(root / "0").files} | {"manifest.json"}
    assert names == {path.name for path in (root / "0").iterdir()}
    done(f"chain, processes={processes}, {stage}")


def mixed(root: Path, values: list[dict[str, Any]], size: int) -> None:
    """Synchronous and asynchronous saves, and loads between them, in one chain."""
    options: dict[str, Any] = {"config": FINE, "history": dsq_ckpt.SaveHistory()}
    dsq_ckpt.save(state_at(0, size), root / "0", pinned=True, **options)
    dsq_ckpt.async_save(state_at(1, size), root / "1", pinned=True, **options).result()
    dsq_ckpt.save(state_at(2, size), root / "2", pinned=True, **options)
    for step in range(3):
        same(read(root / str(step), size, history=options["history"]), values[step])
    assert [depth(root / str(n)) for n in range(3)] == [0, 1, 2]
    dsq_ckpt.async_save(state_at(2, size), root / "3", processes=True, **options).result()
    assert Manifest.read(root / "3").parent_name == "2"
    dsq_ckpt.load(zeros(flat(state_at(0, size))), root / "1", history=options["history"])
    dsq_ckpt.async_save(state_at(2, size), root / "4", **options).result()
    assert Manifest.read(root / "4").parent_name == "1", "the loaded checkpoint is the parent, not a later one"
    done("sync and async in one chain")


def failing(root: Path, rank: int, size: int) -> None:
    """A failure is reported by the future, or by the call where all ranks know already; then saving goes on."""
    dsq_ckpt.save(state_at(0, size), root / "0")
    fails_everywhere(lambda: dsq_ckpt.async_save(state_at(1, size), root / "0").result(timeout=240), "overwrite=True")

    state = state_at(1, size)
    if rank == 1:
        state["settings"]["broken"] = Unpicklable()
    fails_everywhere(lambda: dsq_ckpt.async_save(state, root / "1").result(timeout=240), "cannot be copied")
    bad = state_at(1, size)
    bad["plain.weight"][3, 3] = float("nan")
    config = {"quantize": {"nonfinite": "error"}}
    fails_everywhere(lambda: dsq_ckpt.async_save(bad, root / "2", config=config).result(timeout=240), "plain.weight")
    seen_by_one = state_at(1, size)
    if rank == 1:
        seen_by_one["running"] = torch.tensor([1.0, float("nan")])
    fails_everywhere(lambda: dsq_ckpt.async_save(seen_by_one, root / "2", config=config).result(timeout=240), "running")
    assert not list(root.glob("[12]/manifest.json"))
    dsq_ckpt.async_save(state_at(1, size), root / "3").result(timeout=240)
    assert Manifest.read(root / "3").parent_name == "0"
    done("failures")


class Unpicklable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("cannot be copied")


def plain_calls(root: Path, values: list[dict[str, Any]], size: int) -> None:
    """`dcp.async_save` itself, with a group of its own for the thread, and in DCP's process."""
    background = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=40))
    history = dsq_ckpt.SaveHistory()
    writer = DSQStorageWriter(config=FINE, history=history)
    for step in range(2):
        state = state_at(step, size)
        # the path must be known when the call begins: checkpoint_id comes only after staging
        step_writer = writer if step == 0 else DSQStorageWriter(root / str(step), FINE, pinned=True, history=history)
        if step == 0:
            step_writer.path = root / "0"
        future: Any = dcp.async_save(state, storage_writer=step_writer, process_group=background)
        train_on(state)
        future.result(timeout=240)
        dist.barrier()
    state = state_at(2, size)
    future = dcp.async_save(
        state, storage_writer=DSQStorageWriter(root / "2", FINE, history=history),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    train_on(state)
    future.result(timeout=240)
    dist.barrier()
    for step in (1, 2):  # only now, since first moments are finer in the save after a load
        same(read(root / str(step), size), values[step])
    assert [depth(root / str(n)) for n in range(3)] == [0, 1, 2]
    writer = DSQStorageWriter(root / "3", FINE, on_save=None if dist.get_rank() else print)
    fails_everywhere(
        lambda: dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS),
        "on_save is a function of this process",
    )
    assert not (root / "3").exists()
    done("plain calls")


def another_stager(root: Path) -> None:
    """A copy that torch staged is saved on the group of the call, while training uses the default group."""
    background = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=40))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
    model[0].requires_grad_(False)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model[1:].parameters(), 1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(8, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(1)
    for ahead in (False, True):
        stager = DefaultStager(StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=ahead, use_non_blocking_copy=False
        ))
        path = root / f"{ahead}"
        writer = DSQStorageWriter(path, FINE, model=model)
        future: Any = dcp.async_save(
            {"model": get_model_state_dict(model)}, storage_writer=writer, process_group=background, async_stager=stager
        )
        if ahead:
            future.staging_completion.result(timeout=120)
        before = whole(model.state_dict())
        train(40)
        (future.upload_completion if ahead else future).result(timeout=120)
        dist.barrier()
        target = {"model": {name: torch.zeros_like(value) for name, value in before.items()}}
        dsq_ckpt.load(target, path)
        for name, value in before.items():
            error = error_of(value, target["model"][name])
            assert error == 0 if name == "0.weight" else error < 0.03, (name, error)
    inputs = CompressorInputs(policy=lambda *_: pytest.fail("searched beside training"))
    writer = DSQStorageWriter(root / "search", FINE, inputs=inputs)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    call = partial(dcp.async_save, process_group=background, async_stager=stager, storage_writer=writer)
    fails_everywhere(lambda: call({"model": get_model_state_dict(model)}).result(timeout=120), "async_stager")
    done("another stager")


def overlapping(root: Path, decoded: list[dict[str, Any]], size: int) -> None:
    """A group of whose ranks one is in more groups than the other: torch would name its group otherwise."""
    dist.new_group([1])
    pair = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=60))
    future = dsq_ckpt.async_save(state_at(0, size), root / "0", config=FINE, process_group=pair)
    future.result(timeout=120)
    same(read(root / "0", size), decoded[0])
    done("overlapping groups")


def trainings(root: Path, size: int) -> None:
    """Another training of the same names and shapes, half of each tensor on each rank: its line begins anew."""
    mesh = init_device_mesh("cpu", (size,))
    for processes in (False, True):
        for seed, number in product(range(2), range(3)):
            weights = normal(160, 64, seed=seed) + 0.1 * normal(160, 64, seed=10 + number)
            path = root / f"{processes}" / f"{seed}-{number}"
            state = {"w": distribute_tensor(weights, mesh, [Shard(0)])}
            dsq_ckpt.async_save(state, path, processes=processes).result(timeout=120)
            assert (Manifest.read(path).previous is None) == (number == 0), path
    done("trainings")


if __name__ == "__main__":
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    with world() as (me, ranks):
        decoded = reference(base / "reference", 4, ranks)
        for way, how in product(("threads", "processes"), ("copy", "quantize")):
            chain(base / way / how, decoded, ranks, processes=way == "processes", stage=how)
        mixed(base / "mixed", decoded, ranks)
        failing(base / "failing", me, ranks)
        plain_calls(base / "plain", decoded, ranks)
        another_stager(base / "stager")
        overlapping(base / "overlapping", decoded, ranks)
        trainings(base / "trainings", ranks)
