"""A planner whose `finish_plan` fails on one rank, while the others write already: argv = an empty directory.

All ranks get the error, soon, nothing is left of the save, and the next save works, with the same planner too.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import HANG, depth, done, fails_everywhere, normal, world
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dsq_ckpt import DSQStorageWriter
from dsq_ckpt.dcp.call_stack import AsyncCall
from tests.dcp.planners import Unfinished

SAYS = "this plan cannot be finished"
Save = Callable[[Path, int, SavePlanner, DSQStorageWriter], None]


def state(step: int = 0) -> dict[str, Any]:
    own = f"own{dist.get_rank()}"
    return {"w.weight": normal(96, 64, seed=1) * (1 + 1e-3 * step), own: normal(40, 64, seed=2), "step": step}


def check(name: str, root: Path, culprit: int, save: Save) -> None:
    """Save a keyframe, fail, and save a delta, with the planner and the writer that failed."""
    planner, writer = Unfinished(culprit), DSQStorageWriter()
    planner.fails = False
    save(root / "0", 0, planner, DSQStorageWriter())
    planner.fails, attributes = True, vars(planner).keys()
    fails_everywhere(lambda: save(root / "1", 1, planner, writer), SAYS, culprit=culprit)
    assert vars(planner).keys() == attributes
    dist.barrier()
    assert sorted(path.name for path in root.iterdir()) == ["0"], list(root.iterdir())
    planner.fails = False
    save(root / "1", 1, planner, writer)
    dist.barrier()
    assert depth(root / "1") == 1
    done(f"{name} {culprit}")


def save(path: Path, step: int, planner: SavePlanner, writer: DSQStorageWriter) -> None:
    dcp.save(state(step), checkpoint_id=path, storage_writer=writer, planner=planner)


def save_in_thread(group: Any) -> Save:
    def save(path: Path, step: int, planner: SavePlanner, writer: DSQStorageWriter) -> None:
        future: Any = dcp.async_save(
            state(step), checkpoint_id=path, storage_writer=writer, planner=planner, process_group=group
        )
        future.result(timeout=HANG)

    return save


def save_in_process(path: Path, step: int, planner: SavePlanner, writer: DSQStorageWriter) -> None:
    future: Any = dcp.async_save(
        state(step), storage_writer=DSQStorageWriter(path), planner=planner,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    future.result(timeout=HANG)


def save_codes(path: Path, step: int, planner: SavePlanner, writer: DSQStorageWriter) -> None:
    """Save with codes, which need no collectives when they are written."""
    writer = DSQStorageWriter(path, {"storage": {"stage": "quantize"}})
    writer.async_call = AsyncCall(default_planner=True)
    dcp.save(writer.stage(state(step)), storage_writer=writer, planner=planner)


def check_cached_plans(root: Path, culprit: int) -> None:
    """Fail where the cached plan is missing on one rank."""
    for step in range(4):
        if step == 2:
            fails_everywhere(lambda: save_without_cached_plan(root / "2", culprit), "KeyError", culprit=culprit)
        save(root / str(step), step, DefaultSavePlanner(enable_plan_caching=True), DSQStorageWriter())
        dist.barrier()
        assert depth(root / str(step)) == step
    done(f"cached plans {culprit}")


def save_without_cached_plan(path: Path, culprit: int) -> None:
    planner, writer = DefaultSavePlanner(enable_plan_caching=True), DSQStorageWriter()
    prepare, cached = writer.prepare_local_plan, dict(SavePlanner._cached_final_save_plan)

    def lose_plan(plan: SavePlan) -> SavePlan:
        prepared = prepare(plan)
        if dist.get_rank() == culprit:
            SavePlanner._cached_final_save_plan.clear()
        return prepared

    writer.prepare_local_plan = lose_plan  # type: ignore[method-assign]
    try:
        save(path, 2, planner, writer)
    finally:
        SavePlanner._cached_final_save_plan.update(cached)


if __name__ == "__main__":
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    with world() as (_, ranks):
        own = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=HANG))
        ways = {"sync": save, "thread": save_in_thread(own), "process": save_in_process, "codes": save_codes}
        for rank in range(ranks):
            for way, function in ways.items():
                check(way, base / f"{way}-{rank}", rank, function)
            check_cached_plans(base / f"cached-{rank}", rank)
