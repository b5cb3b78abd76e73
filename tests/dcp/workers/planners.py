"""Planners of the user's own, synchronous and not, on several ranks: argv = an empty directory."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import HANG, depth, done, fails_everywhere, world
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dsq_ckpt
from dsq_ckpt import DSQStorageReader, DSQStorageWriter
from dsq_ckpt.dcp.call_stack import AsyncCall
from dsq_ckpt.engine.options import CompressorInputs
from dsq_ckpt.storage.manifest import Manifest
from tests.dcp.planners import Balancing, Half, Hiding, Losing, PlusOne, Recording, Renaming, Untrue, calls
from tests.helpers.new_process import begin_new_process

PROCESS = AsyncCheckpointerType.PROCESS


def state(step: int = 0) -> dict[str, Any]:
    """The same on all ranks."""
    return {
        "x": torch.ones(64, 64) + step, "y": torch.ones(33, 32), "z": torch.ones(128), "k": 5,
        "w.weight": torch.randn(80, 64, generator=torch.Generator().manual_seed(0)) + 1e-3 * step,
    }


def ruin(state: dict[str, Any]) -> None:
    """What training does right after the call."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(-9)


def content(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint."""
    target: dict[str, Any] = {}
    dsq_ckpt.load(target, path)
    return target


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys() and len(a), (a.keys(), b.keys())
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name
        elif isinstance(value, dict):
            same(value, b[name])
        else:
            assert value == b[name], name


def three_ways(root: Path, background: Any) -> None:
    """Each planner saves the same in a synchronous save, from a thread and from DCP's process, in chains of two."""
    for make in (None, Balancing, Half, Renaming, PlusOne):
        name = "default" if make is None else make.__name__
        for way in ("sync", "thread", "process"):
            history = dsq_ckpt.SaveHistory()
            for step in range(2):
                path, mine = root / name / way / str(step), state(step)
                writer = DSQStorageWriter(path, pinned=True, history=history)
                planner = None if make is None else make()
                if way == "sync":
                    dcp.save(mine, storage_writer=writer, planner=planner)
                elif way == "thread":
                    future: Any = dcp.async_save(
                        mine, storage_writer=writer, planner=planner, process_group=background
                    )
                    ruin(mine)
                    future.result(timeout=HANG)
                else:
                    future = dcp.async_save(
                        mine, storage_writer=writer, planner=planner, async_checkpointer_type=PROCESS
                    )
                    ruin(mine)
                    future.result(timeout=HANG)
                dist.barrier()
                assert depth(path) == step, (name, way, depth(path))
        for step in range(2):
            expected = content(root / name / "sync" / str(step))
            for way in ("thread", "process"):
                same(expected, content(root / name / way / str(step)))
    values = content(root / "Balancing" / "thread" / "1")
    assert sorted(values) == ["k", "w.weight", "x", "y", "z"] and torch.equal(values["z"], torch.ones(128))
    assert torch.equal(content(root / "PlusOne" / "process" / "0")["z"], torch.full((128,), 2.0))
    assert content(root / "Half" / "thread" / "0")["y"].dtype == torch.float16
    assert torch.equal(content(root / "Renaming" / "thread" / "0")["renamed.y"], torch.ones(33, 32))
    done("the same content three ways")


def same_calls(root: Path, background: Any, rank: int) -> None:
    """A planner is asked the same in the background as in a synchronous save, and sees tensors."""
    root.mkdir(exist_ok=True)
    dcp.save(state(), storage_writer=DSQStorageWriter(root / "sync"), planner=Recording(root / "record-sync", rank))
    future: Any = dcp.async_save(
        state(), storage_writer=DSQStorageWriter(root / "thread"), planner=Recording(root / "record-thread", rank),
        process_group=background,
    )
    future.result(timeout=HANG)
    future = dcp.async_save(
        state(), storage_writer=DSQStorageWriter(root / "process"), planner=Recording(root / "record-process", rank),
        async_checkpointer_type=PROCESS,
    )
    future.result(timeout=HANG)
    expected = calls(root / "record-sync", rank)
    assert "'x': 'Tensor'" in expected[0]
    for way in ("thread", "process"):
        assert calls(root / f"record-{way}", rank) == expected, way
    done("the same calls")


def runs_go_on(root: Path) -> None:
    """What this process loaded is the parent in DCP's process too, and its loss is counted; and the other way round."""
    begin_new_process()
    dsq_ckpt.save(state(0), root / "0", pinned=True)
    dsq_ckpt.save(state(1), root / "1")
    dist.barrier()
    dsq_ckpt.load(state(0), root / "0")
    for step, way in ((2, PROCESS), (3, PROCESS)):
        future: Any = dcp.async_save(
            state(step), storage_writer=DSQStorageWriter(root / str(step)), planner=Balancing(),
            async_checkpointer_type=way,
        )
        future.result(timeout=HANG)
        dist.barrier()
    dsq_ckpt.save(state(4), root / "4")
    manifests = [Manifest.read(root / str(step)) for step in range(5)]
    assert [manifest.parent_name for manifest in manifests] == [None, "0", "0", "2", "3"], [
        m.parent_name for m in manifests
    ]
    assert [manifest.lossy_resumes for manifest in manifests] == [0, 0, 1, 1, 1], [m.lossy_resumes for m in manifests]
    done("runs go on")


def failures(root: Path, background: Any, rank: int) -> None:
    """Whatever a planner does, what was planned is written, or nothing is committed; the tensor is named."""

    def thread(planner: Any, mine: dict[str, Any] | None = None, **writer: Any) -> Any:
        return dcp.async_save(
            state() if mine is None else mine, storage_writer=DSQStorageWriter(root / "a", **writer), planner=planner,
            process_group=background,
        ).result(timeout=HANG)  # type: ignore[union-attr]

    for planner, says in ((Losing, "'z'"), (Hiding, "'z'"), (Untrue, "torch.float64")):
        fails_everywhere(lambda p=planner: dcp.save(state(), storage_writer=DSQStorageWriter(root / "a"), planner=p()),
                         says)
        fails_everywhere(lambda p=planner: thread(p()), says)

    # Tensors were quantized for DCP's planner, and another one gets them. They are too large to be one rank's.
    large = {name: torch.cat([value] * 256) if torch.is_tensor(value) else value for name, value in state().items()}
    quantized = {"storage": {"stage": "quantize"}}
    wrong = (Balancing, "'w.weight' at (0, 0), staged by rank 1, is in no rank's plan"), (Losing, "'z'"), (Half, "'x'")
    for other, says in wrong:
        def mixed_up(other: Any = other) -> None:
            writer = DSQStorageWriter(root / "a", quantized)
            writer.async_call = AsyncCall(default_planner=True)
            dcp.save(writer.stage(large), storage_writer=writer, planner=other())

        fails_everywhere(mixed_up, says)
    broken = state()
    if rank == 1:
        broken["broken"] = Uncopyable()
    fails_everywhere(lambda: thread(Balancing(), broken), "cannot be copied")
    fails_everywhere(lambda: thread(Balancing() if rank else None, broken), "cannot be copied")  # parted ranks
    searched = CompressorInputs(lambda *arguments: None)
    fails_everywhere(lambda: thread(Balancing(), inputs=searched), "leave out planner=")
    assert not (root / "a" / "manifest.json").exists()
    thread(Balancing() if rank else None)
    assert sorted(content(root / "a")) == ["k", "w.weight", "x", "y", "z"]
    done("failures")


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copy of this")


def one_rank_alone(root: Path, rank: int) -> None:
    """`no_dist` leaves the default group alone: the other ranks go on with collectives of their own."""
    total = torch.tensor([1.0 + rank])
    if rank == 0:
        kinds = (None, False), (Balancing(), False), (None, True), (Balancing(), True)
        for number, (planner, told) in enumerate(kinds):
            writer = DSQStorageWriter(root / str(number), no_dist=told)
            future: Any = dcp.async_save(state(number), storage_writer=writer, planner=planner, no_dist=True)
            future.result(timeout=HANG)
        dsq_ckpt.async_save(state(4), root / "4", no_dist=True).result(timeout=HANG)
        dsq_ckpt.save(state(5), root / "5", no_dist=True)
        assert [depth(root / str(number)) for number in range(6)] == list(range(6))
    dist.all_reduce(total)
    assert float(total) == sum(range(1, dist.get_world_size() + 1))
    done("one rank alone")


def refused(root: Path, background: Any) -> None:
    """What cannot work is refused at once, on all ranks."""
    says = "use_collectives=False lets every rank"
    fails_everywhere(
        lambda: dcp.save(state(), storage_writer=DSQStorageWriter(root / "a"), use_collectives=False), says
    )
    for planner in (None, Balancing()):
        fails_everywhere(
            lambda p=planner: dcp.async_save(
                state(), storage_writer=DSQStorageWriter(root / "a"), planner=p, use_collectives=False,
                process_group=background,
            ), says,
        )
    fails_everywhere(
        lambda: dcp.async_save(
            state(), storage_writer=DSQStorageWriter(root / "a"), no_dist=True, async_checkpointer_type=PROCESS
        ), "save in a thread",
    )
    fails_everywhere(
        lambda: dcp.save(state(), storage_writer=DSQStorageWriter(root / "a", no_dist=True)), "no_dist=True"
    )
    assert not (root / "a").exists()
    done("refused at once")


def paths(root: Path, background: Any) -> None:
    """The path may come with the call, for a writer that has none or that of its last save."""
    writer = DSQStorageWriter()
    for step, planner in enumerate((None, Balancing(), None)):
        future: Any = dcp.async_save(
            state(step), checkpoint_id=root / str(step), storage_writer=writer, planner=planner,
            process_group=background,
        )
        future.result(timeout=HANG)
        dist.barrier()
    assert [depth(root / str(step)) for step in range(3)] == [0, 1, 2]
    fails_everywhere(
        lambda: dcp.async_save(
            state(), checkpoint_id=root / "1", storage_writer=writer, process_group=background
        ), f"{root / '1'}",
    )
    fails_everywhere(
        lambda: dcp.async_save(state(), storage_writer=DSQStorageWriter(), process_group=background), "no path"
    )
    future = dcp.async_save(
        state(3), checkpoint_id=root / "3", storage_writer=DSQStorageWriter(), planner=Balancing(),
        async_checkpointer_type=PROCESS,
    )
    future.result(timeout=HANG)
    dist.barrier()
    target = state()
    dcp.load(target, storage_reader=DSQStorageReader(root / "3"))
    assert torch.allclose(target["x"], torch.full((64, 64), 4.0), rtol=0.05) and depth(root / "3") == 3
    done("paths")


def subgroups(root: Path, rank: int) -> None:
    """A save of some ranks is one of theirs, whichever way it is told."""
    pairs = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    for number, planner in enumerate((None, Balancing())):
        path = root / str(rank) / str(number)
        future: Any = dcp.async_save(
            state(number), storage_writer=DSQStorageWriter(path), planner=planner, process_group=pairs[rank]
        )
        future.result(timeout=HANG)
        assert Manifest.read(path).ranks == 1
    done("subgroups")


if __name__ == "__main__":
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    with world() as (me, _):
        own = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=HANG))
        three_ways(base / "ways", own)
        same_calls(base / "calls", own, me)
        runs_go_on(base / "runs")
        failures(base / "failures", own, me)
        one_rank_alone(base / "alone", me)
        refused(base / "refused", own)
        paths(base / "paths", own)
        subgroups(base / "subgroups", me)
