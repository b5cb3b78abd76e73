"""Placements and process groups on 3 ranks: argv = an empty directory."""

from __future__ import annotations

import datetime
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import depth, done, equal_everywhere, error_of, fails_everywhere, normal, whole, world, zeros
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt import DSQStorageReader, DSQStorageWriter
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest

SHAPES = {
    "even.weight": (99, 64), "uneven.weight": (100, 64), "empty.weight": (2, 3000), "one.weight": (1, 5000, 2),
    "half.weight": (80, 64), "small.bias": (7,), "tiny": (2,), "scalar": (),
}


def source(seed: int) -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    state = {fqn: normal(*shape, seed=seed + place) for place, (fqn, shape) in enumerate(SHAPES.items())}
    state["half.weight"] = state["half.weight"].bfloat16()
    return state


def placed(state: dict[str, torch.Tensor], how: str, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    if how == "plain":
        return {fqn: value.clone() for fqn, value in state.items()}
    out: dict[str, Any] = {}
    for fqn, value in state.items():
        placement: Any = Replicate()
        if how == "rows" and value.dim():
            placement = Shard(0)
        elif how == "columns" and value.dim() > 1:
            placement = Shard(1)
        out[fqn] = distribute_tensor(value.clone(), mesh, [placement])
    return out


def check(state: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    for fqn, value in state.items():
        assert got[fqn].dtype == value.dtype and got[fqn].shape == value.shape
        if value.numel() < 4096:
            assert torch.equal(got[fqn], value), fqn
        else:
            assert error_of(value, got[fqn]) < 0.02, (fqn, error_of(value, got[fqn]))


def placements(root: Path, size: int) -> None:
    """Saved with one placement, loaded with every other: all the same. Each replica is written once."""
    for how in ("rows", "columns", "replicated", "plain"):
        for number in range(2):
            state, first = source(10 * number), None
            path = root / how / str(number)
            dsq_ckpt.save(placed(state, how, size), path)
            for into in ("plain", "rows", "columns", "replicated") if number == 0 else ("plain", "rows", "columns"):
                target = zeros(placed(state, into, size))
                dsq_ckpt.load(target, path, refinement=number == 0 and "auto")
                got = whole(target)
                if number == 0:
                    check(state, got)
                first = first or got
                for fqn, value in got.items():
                    assert torch.equal(value, first[fqn]), (how, into, fqn)
                    assert equal_everywhere(value), (how, into, fqn)
            with Checkpoint(path) as checkpoint:
                elements: dict[str, int] = {}
                for key, _ in checkpoint.iter_chunks():
                    elements[key.fqn] = elements.get(key.fqn, 0) + key.elements
                assert elements == {fqn: value.numel() for fqn, value in state.items()}, elements
                records = sum(
                    len(checkpoint.open_reader(file.name).contents["records"])
                    for file in checkpoint.manifest.files if file.role == "own"
                )
                if how in ("replicated", "plain"):
                    assert records == len(state), "each replica is written once"
                assert checkpoint.manifest.ranks == size
        target = zeros(placed(state, how, size))
        dsq_ckpt.load(target, path)
        check(state, whole(target))
        exact = root / how / "exact"
        dsq_ckpt.save(placed(state, how, size), exact, config=dsq_ckpt.DSQConfig.preset("exact"))
        target = zeros(placed(state, "columns" if how == "rows" else "rows", size))
        dsq_ckpt.load(target, exact)
        assert all(torch.equal(value, state[fqn]) for fqn, value in whole(target).items())
        done(f"placement {how}")


def sharded_tensors(root: Path, rank: int, size: int) -> None:
    """The older ShardedTensor, one shard of another length on every rank."""
    table, starts = normal(120, 64, seed=3), [0, 20, 60, 120]
    mine = slice(starts[rank], starts[rank + 1])

    def sharded(value: torch.Tensor) -> ShardedTensor:
        local = LocalShard.from_tensor_and_offsets(value[mine].clone(), [mine.start, 0], rank)
        return sharded_tensor.init_from_local_shards([local], *table.shape)

    dsq_ckpt.save({"embed.weight": sharded(table)}, root / "a")
    dsq_ckpt.save({"embed.weight": sharded(table * 1.001)}, root / "b")
    assert depth(root / "b") == 1
    target = {"embed.weight": sharded(torch.zeros_like(table))}
    dsq_ckpt.load(target, root / "b")
    local = target["embed.weight"].local_shards()[0].tensor
    assert error_of(table[mine] * 1.001, local) < 0.02
    plain = {"embed.weight": torch.zeros_like(table)}
    dsq_ckpt.load(plain, root / "b")
    assert torch.equal(plain["embed.weight"][mine], local)
    future = dsq_ckpt.async_save({"embed.weight": sharded(table)}, root / "c")
    future.result()
    dsq_ckpt.load(plain, root / "c")
    assert error_of(table, plain["embed.weight"]) < 0.02
    done("ShardedTensor")


def different_on_each_rank(root: Path, rank: int) -> None:
    """Names that only one rank has, and a rank that has nothing to save."""
    state: dict[str, Any] = {f"layer{rank}.weight": normal(80, 64, seed=rank), "step": 7} if rank else {}
    for number in range(2):
        dsq_ckpt.save(state, root / str(number))
    assert depth(root / "1") == 1
    target: dict[str, Any] = {f"layer{n}.weight": torch.zeros(80, 64) for n in (1, 2)}
    dsq_ckpt.load(target, root / "1")
    for n in (1, 2):
        assert error_of(normal(80, 64, seed=n), target[f"layer{n}.weight"]) < 0.02
    dsq_ckpt.async_save(state, root / "2").result()
    dsq_ckpt.load(target, root / "2")
    names = {file.name for file in Manifest.read(root / "1").files} | {"manifest.json"}
    dist.barrier()
    assert names == {path.name for path in (root / "1").iterdir()}, "no file that no manifest names"
    done("different names on each rank")


def groups(root: Path, rank: int, size: int) -> None:
    """Subgroups: the same group for DCP and the writer works; anything else is an error, and nothing hangs."""
    pair = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=40))
    state = {"w": normal(80, 64, seed=1), "n": 3}
    if rank < 2:
        dsq_ckpt.save(state, root / "sub" / "0", process_group=pair)
        writer = DSQStorageWriter(root / "sub" / "1", process_group=pair)
        dcp.save(state, storage_writer=writer, process_group=pair)
        assert depth(root / "sub" / "1") == 1
        target = {"w": torch.zeros(80, 64), "n": 0}
        dsq_ckpt.load(target, root / "sub" / "1", process_group=pair)
        assert error_of(state["w"], target["w"]) < 0.02 and target["n"] == 3
        for name in ("2", "3"):
            dsq_ckpt.async_save(state, root / "sub" / name, process_group=pair).result()
        assert depth(root / "sub" / "3") == 3
    done("subgroup")

    def only_dcp() -> None:
        if rank == 2:
            raise ValueError("not a member")
        dcp.save(state, storage_writer=DSQStorageWriter(root / "x"), process_group=pair)

    fails_everywhere(only_dcp, "same process_group")
    fails_everywhere(
        lambda: dcp.save(state, storage_writer=DSQStorageWriter(root / "y", process_group=pair)), "process_group"
    )
    assert not list(root.glob("[xy]/manifest.json"))
    fails_everywhere(lambda: dsq_ckpt.async_save(state, root / "p", process_group=pair, processes=True), "processes")
    done("wrong group")


def small_shards(root: Path, rank: int, size: int) -> None:
    """Rows of one rank that are small beside those of others, at a keyframe and from a delta on; gradients tell."""
    mesh = init_device_mesh("cpu", (size,))
    values = normal(99, 90, seed=0), 1e-3 * normal(99, 90, seed=1)
    for number, small in enumerate([slice(33, 66), slice(0, 99, 7), slice(33, 66), slice(40, 44)]):
        history = dsq_ckpt.SaveHistory()
        for step in range(2):
            weights, gradients = (value.clone() for value in values)
            if step or number < 2:
                weights[small] /= 300
                gradients[small] *= 300
            state = {"model.w.weight": weights, "optimizer.state.w.weight.exp_avg_sq": gradients.square()}
            state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}
            path = root / f"{number}" / f"{step}"
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dsq_ckpt.save(state, path, history=history)
            target = zeros(state)
            dsq_ckpt.load(target, path, history=history)
            loaded = whole(target)["model.w.weight"]
            if step or number < 2:
                assert torch.equal(loaded[small], weights[small]), (number, step)
            assert error_of(weights, loaded) < 0.03, (number, step)
            messages = [warning for warning in caught if "stored exactly" in str(warning.message)]
            expected = rank == 0 and ((number < 2 and not step) or (number == 3 and step == 1))
            assert len(messages) == expected, (number, step, [str(warning.message) for warning in messages])
    done("small shards")


def moments_apart(root: Path, size: int) -> None:
    """Second moments whose chunks lie on other ranks than those of the first ones, in the same places.

    Measured by the gradients of other elements, first moments would be off by factors.
    """
    value = normal(99, 64, seed=0)
    first, second = (f"optimizer.state.w.{kind}" for kind in ("exp_avg", "exp_avg_sq"))
    for order in ([2, 1, 0], [1, 0, 2]):
        state = {
            first: distribute_tensor(value, init_device_mesh("cpu", (size,)), [Shard(0)]),
            second: distribute_tensor(value.square(), DeviceMesh("cpu", order), [Shard(0)]),
        }
        for stage in ("copy", "quantize"):
            config = {"storage": {"stage": stage}}
            work = partial(dsq_ckpt.async_save, state, root / "s", config=config)
            fails_everywhere(lambda work=work: work().result(), "in one layout")
        fails_everywhere(partial(dsq_ckpt.save, state, root / "s"), "in one layout")
        dsq_ckpt.save(state, root / str(order[0]), config={"quantize": {"exp_avg": {"method": "exact"}}})
        target = {first: torch.zeros(99, 64)}
        dsq_ckpt.load(target, root / str(order[0]))
        assert torch.equal(target[first], value)
    done("moments apart")


def alone(root: Path, rank: int) -> None:
    """no_dist on every rank, each with a path of its own, and on one rank only."""
    state = {"w": normal(80, 64, seed=rank), "n": rank}
    mine = root / f"rank{rank}"
    dsq_ckpt.save(state, mine / "0", no_dist=True)
    dcp.save(state, storage_writer=DSQStorageWriter(mine / "1"), no_dist=True)
    target = {"w": torch.zeros(80, 64), "n": -1}
    dsq_ckpt.load(target, mine / "1", no_dist=True)
    dcp.load(target, storage_reader=DSQStorageReader(mine / "1"), no_dist=True)
    assert depth(mine / "1") == 1 and error_of(state["w"], target["w"]) < 0.02 and target["n"] == rank
    if rank == 1:
        dsq_ckpt.save(state, root / "single", no_dist=True)
        dsq_ckpt.load(target, root / "single", no_dist=True)
    done("no_dist")


def plain_calls(root: Path, size: int) -> None:
    """`dcp.save` and `dcp.load` themselves."""
    state = source(5)
    dcp.save(placed(state, "rows", size), storage_writer=DSQStorageWriter(root / "a"))
    dcp.save(placed(state, "rows", size), checkpoint_id=root / "b", storage_writer=DSQStorageWriter())
    assert depth(root / "b") == 1
    for reader, extra in (
        (DSQStorageReader(root / "b"), {}), (DSQStorageReader(), {"checkpoint_id": root / "b"}),
    ):
        target = zeros(placed(state, "columns", size))
        dcp.load(target, storage_reader=reader, **extra)
        check(state, whole(target))
    writer = DSQStorageWriter()
    for name in "cd":
        dcp.save(placed(state, "rows", size), checkpoint_id=root / name, storage_writer=writer)
    assert depth(root / "d") == 3
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load(zeros(placed(state, "rows", size)), root / "a", history=history)
    dsq_ckpt.save(placed(state, "rows", size), root / "e", history=history)
    assert Manifest.read(root / "e").parent_name == "a"
    done("plain calls")


if __name__ == "__main__":
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    with world() as (me, ranks):
        placements(base / "placements", ranks)
        sharded_tensors(base / "sharded", me, ranks)
        different_on_each_rank(base / "different", me)
        groups(base / "groups", me, ranks)
        small_shards(base / "small", me, ranks)
        moments_apart(base / "apart", ranks)
        alone(base / "alone", me)
        plain_calls(base / "plain", ranks)
