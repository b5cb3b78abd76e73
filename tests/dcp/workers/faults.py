"""One rank fails, at every stage of a save and of a load: argv = an empty directory.

All ranks get an error within seconds, no manifest appears, and the earlier checkpoints load as before.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import depth, done, fails_everywhere, normal, whole, world, zeros
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt import DSQStorageWriter
from dsq_ckpt.dcp import copies, quantized_staging
from dsq_ckpt.engine import chain, commit, inheritance, pipeline, quantizing, retention
from dsq_ckpt.storage.container import ContainerWriter
from dsq_ckpt.storage.manifest import Manifest


def state_at(step: int, rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    value = normal(200, 64, seed=1) + 0.001 * step * normal(200, 64, seed=2, scale=1.0)
    return {
        "w.weight": distribute_tensor(value, mesh, [Shard(0)]),
        f"own{rank}.weight": normal(90, 64, seed=rank) * (1 + 0.01 * step),
        f"own{rank}.bias": normal(90, seed=rank),
        "step": step,
    }


class Earlier:
    """The checkpoints that must survive."""

    def __init__(self, root: Path, rank: int, size: int) -> None:
        self.rank, self.size, self.paths = rank, size, [root / "0", root / "1"]
        for step, path in enumerate(self.paths):
            dsq_ckpt.save(state_at(step, rank, size), path, pinned=True)
        self.values = [self.read(path) for path in self.paths]

    def read(self, path: Path) -> dict[str, torch.Tensor]:
        target = zeros(state_at(0, self.rank, self.size))
        dsq_ckpt.load(target, path)
        return whole(target)

    def check(self) -> None:
        for path, value in zip(self.paths, self.values, strict=True):
            again = self.read(path)
            assert all(torch.equal(again[fqn], tensor) for fqn, tensor in value.items()), path


def fault(number: int = errno.EIO) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def culprits(size: int) -> tuple[int, int]:
    """The coordinator, and one of the others: all of them do the same."""
    return 0, size - 1


@contextmanager
def broken(active: bool, target: Any, name: str, what: Callable[..., Any]) -> Iterator[None]:
    """`target.name` replaced on this rank, if `active`."""
    if not active:
        yield
        return
    with mock.patch.object(target, name, what):
        yield


class BrokenPlanner(DefaultSavePlanner):
    """Cannot give the tensor whose name holds `name`."""

    name = ""

    def resolve_data(self, write_item: Any) -> Any:
        if self.name and self.name in write_item.index.fqn:
            raise RuntimeError(f"no data of {write_item.index.fqn}")
        return super().resolve_data(write_item)


def planners(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """Data that cannot be had: before the all-reduce if it is lossy, after it if it is exact."""
    for culprit in culprits(size):
        for kind in ("weight", "bias"):
            for parent in ("auto", None):
                planner = BrokenPlanner()
                if rank == culprit:
                    planner.name = f"own{rank}.{kind}"
                path = root / f"planner-{culprit}-{kind}-{parent}"
                writer = DSQStorageWriter(path, parent=parent)
                fails_everywhere(
                    lambda: dcp.save(state_at(2, rank, size), storage_writer=writer, planner=planner),  # noqa: B023
                    f"own{culprit}.{kind}",
                )
                dist.barrier()
                assert not path.exists(), "nothing is left"
    earlier.check()
    done("data that cannot be had")


def writing(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """Files that cannot be written on one rank, at every step of writing them."""
    steps: list[tuple[Any, str]] = [
        (ContainerWriter, "add"), (ContainerWriter, "finish"), (os, "fsync"), (os, "replace"),
    ]
    for culprit in culprits(size):
        for target, name in steps:
            path = root / f"writing-{culprit}-{name}"
            with broken(rank == culprit, target, name, fault(errno.ENOSPC)):
                fails_everywhere(lambda: dsq_ckpt.save(state_at(2, rank, size), path), "No space left")  # noqa: B023
            dist.barrier()
            assert not path.exists(), "nothing is left"
    earlier.check()
    done("files that cannot be written")


def linking(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """Ancestors that cannot be linked on one rank."""
    for culprit in culprits(size):
        earlier.read(earlier.paths[1])  # the parent
        path = root / f"linking-{culprit}"
        with broken(rank == culprit, inheritance, "link_files", fault()):
            fails_everywhere(lambda: dsq_ckpt.save(state_at(2, rank, size), path), "Input/output")  # noqa: B023
        dist.barrier()
        assert not path.exists(), "nothing is left"
    earlier.check()
    done("ancestors that cannot be linked")


def committing(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """The coordinator's last steps."""
    for target, name in ((commit, "write_index"), (Manifest, "write"), (chain, "choose_parent")):
        path = root / f"committing-{name}"
        with broken(rank == 0, target, name, fault()):
            fails_everywhere(lambda: dsq_ckpt.save(state_at(2, rank, size), path), "Input/output")  # noqa: B023
        dist.barrier()
        assert not path.exists(), "nothing is left"
    earlier.read(earlier.paths[1])
    path = root / "committing-retention"
    with broken(rank == 0, retention, "drop_refinements", fault()):  # the checkpoint is whole by then
        dsq_ckpt.save(state_at(2, rank, size), path)
    assert depth(path) == 2
    earlier.check()
    done("a commit that fails")


def parents(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """A parent whose files one rank cannot read."""
    for culprit in culprits(size):
        path = root / f"parents-{culprit}"

        def unreadable(*args: Any, **kwargs: Any) -> Any:
            raise dsq_ckpt.CorruptCheckpoint("the parent cannot be read here")

        with broken(rank == culprit, quantizing, "ParentCheckpoint", unreadable):
            fails_everywhere(
                lambda: dsq_ckpt.save(  # the parent is not in memory
                    state_at(2, rank, size), path, parent=earlier.paths[1], history=dsq_ckpt.SaveHistory()  # noqa: B023
                ),
                "cannot be read here",
            )
    fails_everywhere(
        lambda: dsq_ckpt.save(state_at(2, rank, size), root / "x", parent=root / "nowhere"), "does not exist"
    )
    dsq_ckpt.save(state_at(2, rank, size), root / "fine", parent=earlier.paths[1])
    assert depth(root / "fine") == 2
    earlier.check()
    done("a parent that cannot be read")


def staging(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """One rank fails in the call of an asynchronous save, or in its background."""
    earlier.read(earlier.paths[1])
    staged = {"quantize": (quantized_staging, "make_staged_state_dict"), "copy": (copies, "copy_bare_state_dict")}
    for culprit, (stage, own) in product(culprits(size), staged.items()):
        for target, name in (
            (DefaultSavePlanner, "create_local_plan"), (DefaultSavePlanner, "resolve_data"), own,
            (pipeline, "write_rank"), (ContainerWriter, "finish"),
        ):
            path = root / f"staging-{culprit}-{stage}-{name}"

            def save() -> Any:
                config = {"storage": {"stage": stage}}  # noqa: B023
                return dsq_ckpt.async_save(state_at(2, rank, size), path, config=config).result(timeout=240)  # noqa: B023

            with broken(rank == culprit, target, name, fault()):
                fails_everywhere(save, "Input/output")
            dist.barrier()
            assert not path.exists(), "nothing is left"
    dsq_ckpt.async_save(state_at(2, rank, size), root / "staged").result(timeout=240)
    assert Manifest.read(root / "staged").parent_name == "1"
    earlier.check()
    done("asynchronous saves")


def loading(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """One rank cannot read its part, or asks for what is not there."""
    from dsq_ckpt.dcp.reader import DSQStorageReader
    from dsq_ckpt.storage.checkpoint import Checkpoint

    for culprit in culprits(size):
        for target, name in (
            (Checkpoint, "prepare_load"), (Checkpoint, "read_record"), (DSQStorageReader, "read_metadata"),
        ):

            def damaged(*args: Any, **kwargs: Any) -> Any:
                raise dsq_ckpt.CorruptCheckpoint("damaged on one rank")

            with broken(rank == culprit, target, name, damaged):
                fails_everywhere(lambda: earlier.read(earlier.paths[0]), "damaged on one rank")
        target_state = zeros(state_at(0, rank, size))
        if rank == culprit:
            target_state["absent"] = torch.zeros(3)
        fails_everywhere(lambda: dsq_ckpt.load(target_state, earlier.paths[0]), "absent")  # noqa: B023
    earlier.check()
    done("loads that fail on one rank")


class Hooked(torch.nn.Module):
    """Its hooks of saves and loads fail, while they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fails = torch.nn.Linear(64, 64), ""

    def get_extra_state(self) -> dict[str, int]:
        if self.fails == "get":
            raise RuntimeError("a hook that tells")
        return {"steps": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if self.fails == "set":
            raise RuntimeError("a hook that takes")


class Counter:
    """A plain object with a state dict, which it does not take back."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise ValueError("an object that takes nothing")


def giving(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """The user's code, which is given its state back, fails on one rank."""
    module = Hooked()
    optimizer = torch.optim.AdamW(module.parameters())
    module.inner(torch.ones(64)).sum().backward()
    optimizer.step()  # else the failure of a hook is taken for that of a first step
    compressor = dsq_ckpt.Compressor(module, optimizer, "exact")
    compressor.save(root / "giving-compressor" / "a")
    dsq_ckpt.save(module, root / "giving-module" / "a")
    dsq_ckpt.save({"module": module, "count": Counter(False), "more": {"a": 1}}, root / "giving-state" / "a")
    for culprit in culprits(size):
        text = f"rank {culprit} failed: RuntimeError: a hook that takes"
        module.fails = "set" if rank == culprit else ""
        fails_everywhere(lambda: dsq_ckpt.load(module, root / "giving-module" / "a"), text)
        more: dict[str, Any] = {}
        fails_everywhere(lambda: dsq_ckpt.load({"module": module, "more": more}, root / "giving-state" / "a"), text)  # noqa: B023
        assert not more, "empty again"
        fails_everywhere(lambda: compressor.load(root / "giving-compressor" / "a"), text)
        module.fails = "get" if rank == culprit else ""
        text = f"rank {culprit} failed: RuntimeError: a hook that tells"
        fails_everywhere(lambda: dsq_ckpt.load(module, root / "giving-module" / "a"), text)
        fails_everywhere(lambda: compressor.load(root / "giving-compressor" / "a"), text)
        fails_everywhere(
            lambda: dsq_ckpt.load({"count": Counter(rank == culprit)}, root / "giving-state" / "a"),  # noqa: B023
            f"rank {culprit} failed: ValueError: an object that takes nothing",
        )
    module.fails = ""
    compressor.load(root / "giving-compressor" / "a")
    earlier.check()
    done("state that is not taken")


def afterwards(root: Path, earlier: Earlier, rank: int, size: int) -> None:
    """After all that, the run goes on, and its newest checkpoint is a whole one."""
    earlier.read(earlier.paths[1])
    dsq_ckpt.save(state_at(3, rank, size), root / "afterwards")
    assert depth(root / "afterwards") == 2
    assert dsq_ckpt.latest(root) == str(root / "afterwards")
    earlier.read(root / "afterwards")
    earlier.check()
    done("the run goes on")


if __name__ == "__main__":
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    with world() as (me, ranks):
        survivors = Earlier(base, me, ranks)
        for part in (planners, writing, linking, committing, parents, staging, loading, giving, afterwards):
            part(base, survivors, me, ranks)
