"""Several ranks, `FileSystemWriter` and ours side by side: argv = an empty directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import HANG, done, normal, world
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dcp.conformance.sides import Side, outcome, plain, ruined, sides, summarize
from tests.dcp.planners import Balancing, Extra, Half, PlusOne, Recording, Renaming, calls


def state(rank: int, *, dim: int = 0) -> dict[str, Any]:
    """Sharded, replicated, plain and different tensors, and objects."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rows": distribute_tensor(normal(101, 64, seed=1), mesh, [Shard(dim)]),
        "replica": distribute_tensor(normal(90, 64, seed=2), mesh, [Replicate()]),
        "uneven": distribute_tensor(normal(1, 50, seed=3), mesh, [Shard(0)]),
        "plain": {"x": normal(70, 66, seed=4), "bias": normal(9, seed=5)}, f"own {rank}": normal(80, 60, seed=6 + rank),
        "step": 3, "names": ["a", {"b": (1, 2)}],
    }


def zeros(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeros(entry) for key, entry in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def save_state(side: Side, rank: int, way: str, background: Any, name: str = "a", **options: Any) -> Any:
    """What a save tells, in one of three ways."""
    mine, writer = state(rank), side.writer(side.path(name))
    if way == "sync":
        return summarize(dcp.save(mine, storage_writer=writer, **options))
    options |= {"process_group": background} if way == "thread" else {
        "async_checkpointer_type": AsyncCheckpointerType.PROCESS
    }
    future: Any = dcp.async_save(mine, storage_writer=writer, **options)
    ruined(mine)
    return summarize(future.result(timeout=HANG))


def planners(side: Side, rank: int, way: str, background: Any) -> Any:
    results: list[Any] = []
    for number, make in enumerate((None, DefaultSavePlanner, PlusOne, lambda: Extra([1, (2,)]))):
        metadata = save_state(side, rank, way, background, str(number), planner=make and make())
        dist.barrier()
        results.append((metadata, *(side.load(zeros(state(rank, dim=dim)), str(number)) for dim in (0, 1))))
    save_state(side, rank, way, background, "renamed", planner=Renaming())
    dist.barrier()
    results.append(side.load({"renamed." + key: value for key, value in zeros(state(rank)).items()}, "renamed"))
    return results


def replicated(side: Side, rank: int, way: str, background: Any) -> Any:
    """Under DDP all ranks have the same; rank 0's items are dealt to all, and tensors become half as wide."""
    results = []
    for planner, dtype in ((Balancing(), torch.float32), (Half(), torch.float16)):
        mine = {"x": normal(64, 64, seed=1), "y": normal(33, 32, seed=2), "z": normal(128, seed=3), "k": 5}
        writer, name = side.writer(side.path(type(planner).__name__)), type(planner).__name__
        if way == "sync":
            metadata = dcp.save(mine, storage_writer=writer, planner=planner)
        else:
            options: dict[str, Any] = {"process_group": background} if way == "thread" else {
                "async_checkpointer_type": AsyncCheckpointerType.PROCESS
            }
            future: Any = dcp.async_save(mine, storage_writer=writer, planner=planner, **options)
            ruined(mine)
            metadata = future.result(timeout=HANG)
        dist.barrier()
        like: dict[str, Any] = {key: torch.zeros_like(mine[key], dtype=dtype) for key in ("x", "y", "z")}
        results.append((summarize(metadata), side.load({**like, "k": 0}, name)))
    return results


def order(side: Side, rank: int, way: str, background: Any) -> Any:
    """The planner's calls, on this rank."""
    side.root.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    record = side.root / "record"
    save_state(side, rank, way, background, "recorded", planner=Recording(record, rank))
    resolving = [call for call in calls(record, rank) if call.startswith(("lookup", "transform"))]
    return [call for call in calls(record, rank) if call not in resolving], sorted(set(resolving))


def others(side: Side, rank: int, way: str, background: Any) -> Any:
    """Groups, parts of a state, and what is not there."""
    if way != "sync":
        return None
    save_state(side, rank, "sync", None, "all", process_group=background)
    dist.barrier()
    missing = {"absent": torch.ones(2)} if rank == 1 else {"plain": {"bias": torch.zeros(9)}}
    alone = side.path(f"alone {rank}")
    dcp.save({"x": torch.full((3,), float(rank))}, storage_writer=side.writer(alone), no_dist=True)
    mine = {"x": torch.zeros(3)}
    dcp.load(mine, storage_reader=side.reader(alone), no_dist=True)
    later, single = side.path(f"later {rank}"), {"x": torch.full((3,), float(rank))}
    future: Any = dcp.async_save(single, storage_writer=side.writer(later), no_dist=True)
    ruined(single)
    future.result(timeout=HANG)
    dcp.load(single, storage_reader=side.reader(later), no_dist=True)
    return (
        single,
        side.load(zeros(state(rank)), "all", process_group=background), mine,
        outcome(lambda: side.load(missing, "all")),
        side.load({"plain": {"bias": torch.zeros(9)}, "more": torch.ones(1)}, "all",
                  planner=DefaultLoadPlanner(allow_partial_load=True)),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, _):
        own = dist.new_group(backend="gloo")
        for case in (planners, replicated, order, others):
            for how in ("sync", "thread", "process"):
                torch_outcome, dsq_outcome = (
                    plain(case(side, me, how, own)) for side in sides(Path(sys.argv[1]) / f"{case.__name__}-{how}")
                )
                assert torch_outcome == dsq_outcome, (case.__name__, how, torch_outcome, dsq_outcome)
            done(f"{case.__name__}")
