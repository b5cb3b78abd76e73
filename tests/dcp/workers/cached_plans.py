"""Plans that DCP's planner caches, on several ranks: argv = an empty directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import depth, done, fails_everywhere, normal, whole, world, zeros
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt import DSQStorageReader, DSQStorageWriter
from dsq_ckpt.storage.files import CheckpointFiles

EXACT = dsq_ckpt.DSQConfig.preset("exact")


class Counted(dcp.DefaultSavePlanner):
    """Counts the items that reach the coordinator."""

    items = 0

    def _create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        Counted.items += sum(len(plan.items) for plan in all_plans)
        return super()._create_global_plan(all_plans)


def plain_at(step: int) -> torch.Tensor:
    return normal(80, 64, seed=3) + 0.001 * step * normal(80, 64, seed=5, scale=1.0)


def state_at(step: int, size: int) -> dict[str, Any]:
    """Sharded and replicated tensors, and objects; a function of `step`."""
    mesh = init_device_mesh("cpu", (size,))
    rows = normal(101, 64, seed=1) + 0.001 * step * normal(101, 64, seed=2, scale=1.0)
    return {
        "rows.weight": distribute_tensor(rows, mesh, [Shard(0)]), "plain.weight": plain_at(step),
        "bias": normal(64, seed=4) - step, "step": step,
    }


def save(path: Path, state: dict[str, Any], config: Any = EXACT, cached: bool = True, **options: Any) -> None:
    dcp.save(
        state, storage_writer=DSQStorageWriter(path, config), planner=Counted(enable_plan_caching=cached), **options
    )


def check(path: Path, state: dict[str, Any]) -> None:
    """The checkpoint holds this state, bit for bit."""
    back = zeros(state)
    dsq_ckpt.load(back, path)
    expected, loaded = whole(state), whole(back)
    assert back.get("step") == state.get("step")
    assert all(
        loaded[name].dtype == value.dtype and torch.equal(loaded[name], value) for name, value in expected.items()
    )
    stored: dict[str, Any] = {}
    dsq_ckpt.load(stored, path, no_dist=True)
    assert stored.keys() >= state.keys(), (path, stored.keys())


def chain(run: Path, rank: int, size: int) -> None:
    """As without cached plans; only the first save is planned."""
    for step in range(3):
        state = state_at(step, size)
        save(run / "cached" / str(step), state, config=None)
        if step == 0:
            first = Counted.items
        save(run / "plain" / str(step), state, config=None, cached=False)
        Counted.items = first
        back, other = zeros(state), zeros(state)
        dsq_ckpt.load(back, run / "cached" / str(step))
        dsq_ckpt.load(other, run / "plain" / str(step))
        loaded, expected = whole(back), whole(other)
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        assert depth(run / "cached" / str(step)) == step
        before = Counted.items
        save(run / "again" / str(step), state, config=None)
        assert Counted.items == before, "planned again"
    assert (first > 0) == (rank == 0)


def changed(run: Path, rank: int, size: int) -> None:
    """One rank's state changes and is the other's no more; DCP does not compare dtypes."""
    for number, extra in enumerate([None, "own", "own", torch.float64, None, torch.float64]):
        state = state_at(number, size)
        if extra == "own" and rank == 1:
            state["own"] = torch.arange(5000)
        if isinstance(extra, torch.dtype):
            state["plain.weight"] = state["plain.weight"].to(extra)
        save(run / str(number), state)
        check(run / str(number), state)


def failed(run: Path, rank: int, size: int) -> None:
    """The coordinator has cached the plans of a save that failed."""
    for number in range(3):
        state = state_at(number, size)
        if number:
            state[f"new{number}"] = torch.arange(300)
            fails_everywhere(lambda state=state: save(run / "0", state), "overwrite")  # type: ignore[misc]
        save(run / str(number), state)
        check(run / str(number), state)


def alone(run: Path, rank: int, size: int) -> None:
    """Rank 0 saves by itself in between, with a planner of the same name."""
    state = state_at(0, size)
    save(run / "0", state)
    for number in range(1, 5):
        if rank == 0 and number % 2:
            own = {"plain.weight": plain_at(10 + number), "step": number}
            save(run / "alone" / str(number), own, no_dist=True)
        dist.barrier()
        state = state_at(number, size)
        save(run / str(number), state)
        check(run / str(number), state)
    if rank == 0:
        for number in (1, 3):
            own = {"plain.weight": torch.zeros(80, 64), "step": 0}
            dsq_ckpt.load(own, run / "alone" / str(number), no_dist=True)
            assert own["step"] == number and torch.equal(own["plain.weight"], plain_at(10 + number))


def background(run: Path, rank: int, size: int) -> None:
    """In a thread, with a group of its own, and in DCP's process."""
    group = dist.new_group(backend="gloo")
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        for number in range(3):
            state = state_at(number, size)
            if number == 2:
                state["bias"] = state["bias"].double()
            path, thread = run / kind.name / str(number), kind is AsyncCheckpointerType.THREAD
            dcp.async_save(
                state, storage_writer=DSQStorageWriter(path, EXACT, process_group=group if thread else None),
                planner=Counted(enable_plan_caching=True), process_group=group if thread else None,
                async_checkpointer_type=kind,
            ).result()
            check(path, state)


def index(run: Path, rank: int, size: int) -> None:
    """The index, which has the chunks of all ranks, is read by the coordinator alone at a delta, and once at a load."""
    original, reads = CheckpointFiles._read_index, list[Path]()

    def counted(self: CheckpointFiles) -> dict[str, Any]:
        reads.append(self.directory)
        return original(self)

    CheckpointFiles._read_index = counted  # type: ignore[method-assign]
    group = dist.new_group(backend="gloo")
    for number in range(6):
        state, path = state_at(number, size), run / str(number)
        reads.clear()
        if number % 2:
            dsq_ckpt.async_save(state, path, process_group=group).result()
        else:
            save(path, state, config=None)
        assert depth(path) == number and (rank == 0 or not reads), (number, reads)
        if number in (2, 3):
            reads.clear()
            dcp.load(zeros(state), storage_reader=DSQStorageReader(path))
            assert len(reads) == 1, reads
    CheckpointFiles._read_index = original  # type: ignore[method-assign]


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    with world() as (rank, size):
        for work in (chain, changed, failed, alone, background, index):
            work(directory / work.__name__, rank, size)
            done(work.__name__)
