"""torchtitan's parts with our manager: `ranks.py DIRECTORY`. Two ranks save and compare; one then loads that."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import MODEL, CheckpointManager
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import dsq_ckpt
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, DSQError, LoadFailed
from dsq_ckpt.integrations.torchtitan import DSQCheckpointManager
from dsq_ckpt.storage.checkpoint import Checkpoint

RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


class Numbers(IterableDataset):
    """Batches that differ by rank; where it is, is its state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while True:
            self.place += 1
            generator = torch.Generator().manual_seed(1000 * RANK + self.place)
            yield torch.randn(8, 64, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Job:
    """The parts of torchtitan's trainer, and its calls of a checkpoint manager."""

    def __init__(self, folder: Path, kind: type[CheckpointManager] = DSQCheckpointManager, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        mesh = init_device_mesh("cpu", (RANKS,))
        for module in (*self.model, self.model):
            if not isinstance(module, nn.GELU):
                fully_shard(module, mesh=mesh)
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=4)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=20)
        self.dataset = Numbers()
        self.data = ParallelAwareDataloader(self.dataset, dp_rank=RANK, dp_world_size=RANKS, batch_size=None)
        self.step = 0
        if kind is DSQCheckpointManager:
            options = {"compression": "exact", **options}
        config = kind.Config(**{"enable": True, "interval": 2, "folder": "checkpoints", "keep_latest_k": 0, **options})
        self.manager = config.build(
            dataloader=self.data, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.schedulers,
            states={"train_state": self}, sd_adapter=None, base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 64 * self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        assert state["ntokens_seen"] == 64 * self.step

    def train(self, steps: int, last: bool = False) -> Job:
        """Train up to a step, saving as configured."""
        batches = iter(self.data)
        while self.step < steps:
            self.step += 1
            self.optimizers.zero_grad()
            batch = next(batches)
            tokens = (batch[:, 0] * 20).long().remainder(128)
            (self.model(tokens) - batch).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.manager.save(self.step, last_step=last and self.step == steps)
        return self

    def end(self) -> dict[str, torch.Tensor]:
        """Close; returns all that training changed, of this rank."""
        self.manager.close()
        values = {**self.model.state_dict(), **self.optimizers.state_dict(), **self.schedulers.state_dict()}
        values |= {"step": self.step, "place": self.dataset.place}
        return {
            name: value.to_local().clone() if hasattr(value, "to_local") else torch.as_tensor(value)
            for name, value in values.items() if isinstance(value, int | float | torch.Tensor)
        }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def steps(folder: Path) -> list[int]:
    dist.barrier()
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir() if path.name[:5] == "step-")


def damage(folder: Path, step: int) -> None:
    dist.barrier()
    if RANK == 0:
        (folder / f"checkpoints/step-{step}" / "manifest.json").unlink()
    dist.barrier()


def resumes_are_exact_and_old_checkpoints_go(out: Path) -> None:
    plain = Job(out / "none", enable=False).train(10).end()
    assert {name.split(".")[-1] for name in plain} >= {"exp_avg", "exp_avg_sq", "last_epoch", "place"}
    for mode in ("disabled", "async"):
        folder = out / mode
        Job(folder, async_mode=mode, keep_latest_k=2).train(8).end()  # which waits
        assert steps(folder) == ([6, 8] if mode == "disabled" else [4, 6, 8])
        again = Job(folder, async_mode=mode, keep_latest_k=2)
        assert again.manager.load() and again.step == 8
        assert same(again.train(10).end(), plain)
        damage(folder, 10)
        job = Job(folder)
        assert job.manager.load() and job.step == 8  # the newest that is complete
        assert same(job.train(9).end(), Job(out / "none", enable=False).train(9).end())
        with pytest.raises(CheckpointNotFound if RANK == 0 else DSQError, match="step-10"):
            job.manager.load(step=10)
    assert not Job(out / "nothing").manager.load()


def later_steps_do_not_push_out_a_restart(out: Path) -> None:
    folder = out / "earlier"
    Job(folder).train(6).end()
    job = Job(folder, keep_latest_k=2, interval=1)
    assert job.manager.load(step=2)
    job.train(3).end()
    assert steps(folder) == [2, 3, 4, 6]
    job = Job(folder, keep_latest_k=2, interval=1)
    assert job.manager.load(step=3)
    job.train(4).end()
    assert steps(folder) == [3, 4, 6]


def default_compression(out: Path) -> None:
    folder = out / "lossy"
    trained = Job(folder, compression="default").train(4).end()
    with Checkpoint(folder / "checkpoints" / "step-4") as checkpoint:
        tensors = checkpoint.index["tensors"]
    assert {"1.weight", "optimizer.state.1.weight.exp_avg", "optimizer.state.1.weight.exp_avg_sq"} <= set(tensors)
    sizes = {}
    for kind in ("default", "exact"):
        job = Job(out / f"size-{kind}", compression=kind, interval=1)
        job.train(1).end()
        files = list((out / f"size-{kind}" / "checkpoints" / "step-1").iterdir())
        sizes[kind] = sum(file.stat().st_size for file in files)
    assert sizes["default"] < sizes["exact"] / 2, sizes
    again = Job(folder, compression="default")
    assert again.manager.load()
    restored = again.end()
    for name, value in trained.items():
        bound = 0.1 * value.abs().float().max() if name.endswith("weight") else 0
        if not name.endswith(("exp_avg", "exp_avg_sq", "place")):  # a dataloader goes there once it is iterated
            assert (restored[name].float() - value.float()).abs().max() <= bound, name


def runs_change_over(out: Path) -> None:
    folder = out / "changed"
    plain = Job(out / "none", enable=False).train(6).end()
    Job(folder, CheckpointManager).train(2).end()
    job = Job(folder, keep_latest_k=2)
    assert job.manager.load() and job.step == 2
    assert same(job.train(6).end(), plain)
    assert steps(folder) == [4, 6]  # torchtitan's own went too
    assert str(dsq_ckpt.latest(folder / "checkpoints")).endswith("step-6")


def the_last_and_the_first(out: Path) -> None:
    folder = out / "last"
    job = Job(folder, export_dtype="bfloat16", last_save_model_only=True).train(3, last=True)
    final = job.end()
    state: dict[str, Any] = {}
    dsq_ckpt.load(state, folder / "checkpoints" / "step-3")
    assert all(value.dtype == torch.bfloat16 for value in state.values()) and set(state) == set(job.model.state_dict())
    tuned = Job(out / "tuned", initial_load_path=str(folder / "checkpoints" / "step-2"))
    assert tuned.manager.load() and tuned.step == 0  # the model alone
    Job(out / "whole", last_save_model_only=False).train(3, last=True).end()
    whole = Job(out / "whole")
    assert whole.manager.load() and same(whole.end(), {**final, "place": torch.tensor(0)})  # it is not iterated yet
    with pytest.raises(LoadFailed if RANK == 0 else DSQError, match="step-3"):
        Job(folder).manager.load()  # has no optimizer, and says so
    seed = Job(out / "seed")
    seed.manager.save(0, last_step=True)
    assert steps(out / "seed") == [0] and Job(out / "seed").manager.load()


def _refuses(*_: Any) -> None:
    raise RuntimeError("takes nothing")


def errors(out: Path) -> None:
    with pytest.raises(ConfigError, match="async_with_pinned_mem"):
        DSQCheckpointManager.Config(async_mode="async_with_pinned_mem")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="smalest"):
        DSQCheckpointManager.Config(compression="smalest")
    elsewhere = Job(out / ("async" if RANK == 0 else "nowhere"))
    with pytest.raises(LoadFailed, match="all hosts share"):
        elsewhere.manager.load()
    job = Job(out / "earlier")
    if RANK == 1:
        job.model.register_load_state_dict_pre_hook(_refuses)
    with pytest.raises(LoadFailed, match=r"rank 1.*takes nothing"):
        job.manager.load(step=4)
    foreign = out / "foreign" / "checkpoints" / "step-2"
    foreign.mkdir(parents=True, exist_ok=True)
    (foreign / "notes.txt").write_text("mine")
    for mode in ("disabled", "async"):
        with pytest.raises(DSQError, match="step-2"):
            Job(out / "foreign", async_mode=mode).train(2)
    assert (foreign / "notes.txt").read_text() == "mine"
    job = Job(out / "failing", async_mode="async").train(1)
    job.manager.save_future = Future()
    job.manager.save_future.set_exception(DSQError("in the background"))
    with pytest.raises(DSQError, match="in the background"):
        job.train(2)
    job.end()  # it is told once


def several_parts(out: Path) -> None:
    """As a rank has with pipeline parallelism: what each part tells of its buffers and frozen weights is known."""
    for mode in ("disabled", "async"):
        job = Job(out / f"parts-{mode}", compression="default", async_mode=mode, interval=1)
        parts = [nn.ModuleDict({name: nn.Linear(96, 96)}) for name in ("first", "second")]
        parts[0].register_buffer("codebook", torch.randn(300, 32))
        parts[1].second.weight.requires_grad_(False)
        job.manager.states[MODEL] = ModelWrapper(parts)
        job.manager.save(1)
        job.manager.close()
        state: dict[str, Any] = {}
        dsq_ckpt.load(state, out / f"parts-{mode}" / "checkpoints" / "step-1")
        if RANK == 0:
            assert state["codebook"].equal(parts[0].codebook) and state["second.weight"].equal(parts[1].second.weight)
            assert not state["first.weight"].equal(parts[0].first.weight)


def loads_on_one_rank(out: Path) -> None:
    job = Job(out / "whole", exclude_from_loading=["dataloader"])
    assert job.manager.load() and job.step == 3
    state: dict[str, Any] = {}
    dsq_ckpt.load(state, out / "whole" / "checkpoints" / "step-3")
    assert all(torch.equal(value.full_tensor(), state[name]) for name, value in job.model.state_dict().items())
    assert set(state["dataloader"]) == {"dp_rank_0", "dp_rank_1", "world_size"}
    job.train(4).end()


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    checks = (
        resumes_are_exact_and_old_checkpoints_go, later_steps_do_not_push_out_a_restart, default_compression,
        runs_change_over, the_last_and_the_first, several_parts, errors,
    )
    for check in checks if RANKS > 1 else (loads_on_one_rank,):
        check(out)
    dist.barrier()
    dist.destroy_process_group()


main()
