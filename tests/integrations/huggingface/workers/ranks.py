"""Trainer and Accelerate on two ranks: argv = a directory, and that of `single.py`, which ran before."""

from __future__ import annotations

import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, ConfigError, DSQError, LoadFailed
from dsq_ckpt.integrations import accelerate as integration
from tests.helpers.new_process import begin_new_process
from tests.integrations.huggingface.workers.background import background_trainer, before_publishing, full_disk
from tests.integrations.huggingface.workers.callbacks import callback_states, full_disk_in_last_write
from tests.integrations.huggingface.workers.common import everything, names, run, same, sound, trainer, until

ROOT, SINGLE = map(Path, sys.argv[1:3])


def rank() -> int:
    return PartialState().process_index


def once(work: Any) -> None:
    """Call on rank 0, while the others wait."""
    if rank() == 0:
        work()
    dist.barrier()


def ddp(output: Path) -> None:
    """Under DDP a resumed run ends bit-identical, also the random state of each rank."""
    first = trainer(output, 6)
    first.train()
    assert isinstance(first.model_wrapped, DistributedDataParallel)
    assert sound(output / "checkpoint-4").ranks == 2
    once(lambda: until(output, output.with_name("copy"), 4))
    again = trainer(output.with_name("copy"), 6)
    again.train(resume_from_checkpoint=True)
    same(everything(first), everything(again))
    assert names(output.with_name("copy")) == ["checkpoint-4", "checkpoint-6"]
    lossy = trainer(output.with_name("lossy"), 4, config=None)
    lossy.train()
    assert sound(output.with_name("lossy") / "checkpoint-4").depth == 1


def ddp_in_background(output: Path) -> None:
    """The same with saves in the background; a failure of rank 0 there is an error of all at the next save."""
    first = background_trainer(output, 4)
    first.train()
    assert names(output) == ["checkpoint-2", "checkpoint-4"] and sound(output / "checkpoint-4").ranks == 2
    once(lambda: until(output, output.with_name("background"), 2))
    again = background_trainer(output.with_name("background"), 4)
    again.train(resume_from_checkpoint=True)
    same(everything(first), everything(again))
    hf_trainer = background_trainer(output.with_name("full"), 6)
    with before_publishing(4, full_disk), pytest.raises(DSQError, match=r"No space left|rank 0 failed"):
        hf_trainer.train()
    assert hf_trainer.state.global_step == 6
    dist.barrier()  # rank 0 removes what is left
    assert names(output.with_name("full")) == ["checkpoint-2"]


def rank_counts(output: Path) -> None:
    """A run of one rank goes on with two; a warning says that random states are not there."""
    once(lambda: until(SINGLE / "exact_resume", output, 4))
    with pytest.warns(UserWarning, match=rf"has no rng_state_{rank()}\.pth"):
        hf_trainer = trainer(output, 6)
        hf_trainer.train(resume_from_checkpoint=True)
    assert sound(output / "checkpoint-6").ranks == 2
    assert hf_trainer.state.global_step == 6


def rank_fails(output: Path) -> None:
    """The failure of one rank is an error of all, and there is no checkpoint."""
    hf_trainer = trainer(output, 4)
    collect = hf_trainer.model.state_dict

    def failing(*given: Any, **named: Any) -> Any:
        if hf_trainer.state.global_step == 4:
            raise RuntimeError("this rank cannot")
        return collect(*given, **named)

    if rank() == 1:
        hf_trainer.model.state_dict = failing
    with pytest.raises(DSQError, match="this rank cannot"):
        hf_trainer.train()
    assert names(output) == ["checkpoint-2"]
    takes = LambdaLR.load_state_dict
    with (
        mock.patch.object(LambdaLR, "load_state_dict", failing if rank() == 1 else takes),
        pytest.raises(LoadFailed, match="this rank cannot"),
    ):
        trainer(output, 4).train(resume_from_checkpoint=True)


def as_fsdp(accelerator: Accelerator) -> None:
    """Let Accelerate shard on the CPU, where it does not by itself: it then takes `fsdp_plugin` for unset."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False)
    accelerator.state.fsdp_plugin = plugin
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP


def as_cpu() -> None:
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    AcceleratorState._shared_state.pop("fsdp_plugin", None)
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def trainer_fsdp2(output: Path) -> None:
    """With FSDP2's sharded parameters a resumed run ends bit-identical; it saves in the background."""
    def sharded(directory: Path, make: Any = trainer) -> Any:
        as_cpu()
        hf_trainer = make(directory, 4)
        as_fsdp(hf_trainer.accelerator)
        hf_trainer.is_fsdp_enabled = True
        return hf_trainer

    first = sharded(output)
    first.train()
    assert isinstance(first.model, FSDPModule)
    once(lambda: until(output, output.with_name("sharded"), 2))
    again = sharded(output.with_name("sharded"), background_trainer)
    again.train(resume_from_checkpoint=True)
    assert again.model is not first.model
    assert names(output.with_name("sharded")) == ["checkpoint-2", "checkpoint-4"]
    assert sound(output.with_name("sharded") / "checkpoint-4").ranks == 2
    same(everything(first), everything(again))
    as_cpu()


def accelerated(output: Path, config: Any = "exact", fsdp: bool = False) -> tuple[Accelerator, Any]:
    """An accelerator with what it prepared, as in a process of its own, and a function that trains some steps."""
    begin_new_process()
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(
        project_dir=str(output), automatic_checkpoint_naming=True, total_limit=2,
    ))
    if fsdp:
        as_fsdp(accelerator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 120), nn.Dropout(0.1), nn.Tanh(), nn.Linear(120, 80))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    rows = torch.randn(64, 80, generator=torch.Generator().manual_seed(1 + rank()))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    assert isinstance(model, FSDPModule if fsdp else DistributedDataParallel)
    integration.attach(accelerator, config)

    def train(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = (model(rows[counter.steps :][:4]) - rows[counter.steps :][:4]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            counter.steps += 1
            losses += [loss.item(), random.random(), float(np.random.rand())]
        return losses

    return accelerator, train


class Counter:
    """An object for `register_for_checkpointing`."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


OWN = ("notes.txt", "model_card.md", "schedulers.txt")


def own_files(directory: Path) -> None:
    """Write files of a user's, one of an earlier checkpoint and a link into a directory of states."""
    for name in OWN:
        (directory / name).write_text(name)
    (directory / "optimizer.bin").write_bytes(b"earlier")
    if not (directory / "data").is_symlink():
        (directory / "data").symlink_to(directory.parent)


def ddp_states(output: Path, fsdp: bool = False) -> None:
    """`save_state` and `load_state`, bit-identical, with automatic naming and a limit; deltas also after a restart."""
    accelerator, train = accelerated(output, fsdp=fsdp)
    train(6)
    where = accelerator.save_state()
    expected = train(6)
    accelerator.load_state(where)
    assert train(6) == expected
    accelerator, again = accelerated(output, fsdp=fsdp)  # as in another process
    accelerator.load_state()
    assert again(6) == expected
    with pytest.raises(CheckpointExists, match=r"ProjectConfiguration\(iteration"):
        accelerator.save_state()
    accelerator.project_configuration.iteration = 1
    for _ in range(2):
        accelerator.save_state()
    accelerator.wait_for_everyone()
    assert names(output / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    dist.barrier()
    once(lambda: (output / "checkpoints" / "checkpoint_2").rename(output / "checkpoints" / "checkpoint_7"))
    accelerator.project_configuration.iteration = 2
    accelerator.save_state()  # after going back: the newest one has not the highest number
    accelerator.wait_for_everyone()
    assert names(output / "checkpoints") == ["checkpoint_2", "checkpoint_7"]
    assert {"scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl"} <= set(
        names(output / "checkpoints" / "checkpoint_2")
    )

    accelerator, train = accelerated(output.with_name(f"{output.name}_lossy"), None, fsdp)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    newest = output.with_name(f"{output.name}_newest")
    depths = []
    for _ in range(2):  # over and over to one name
        train(2)
        accelerator.save_state(newest)
        depths.append(sound(newest).depth)
        once(lambda: own_files(newest))
    begin_new_process()
    accelerator.load_state(newest)
    train(2)
    accelerator.save_state(newest)
    assert [*depths, sound(newest).depth] == [0, 1, 2]
    dist.barrier()
    assert [(newest / name).read_text() for name in OWN] == [*OWN]
    assert (newest / "data").is_symlink() and not (newest / "optimizer.bin").exists()
    with pytest.raises(DSQError, match="holds checkpoints itself"):
        accelerator.save_state(output / "checkpoints")
    assert not [name for name in names(newest.parent) if name.startswith(".")]


def fsdp2_states(output: Path) -> None:
    """The same with the parameters of FSDP2."""
    ddp_states(output, fsdp=True)
    as_cpu()


def plain_states(output: Path) -> None:
    """Plain states are loaded; compressed ones are no states for an accelerator without the integration."""
    accelerator, train = accelerated(output)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    train(2)
    accelerator.save_state(output / "compressed")
    plain = accelerator.__class__.__bases__[1]
    plain.save_state(accelerator, output / "plain")
    expected = train(2)
    accelerator.load_state(output / "plain")
    assert train(2) == expected
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        plain.load_state(accelerator, output / "compressed")
    assert (output / "plain" / "optimizer.bin").exists()
    accelerator.save_state(output / "plain")
    assert not {"optimizer.bin", "model.safetensors"} & set(names(output / "plain"))
    urls_are_refused(accelerator)
    with pytest.raises(CheckpointNotFound, match="on rank 0, and is none on rank 1"):  # storage that is not shared
        accelerator.load_state(output / ("compressed", "missing")[rank()])
    accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="register_save_state_pre_hook"):
        accelerator.save_state(output / "hooked")
    assert not (output / "hooked").exists()


def several_models(output: Path) -> None:
    """A generator whose weights are rounded, with a codebook, beside a discriminator: exact, as with one model."""
    accelerator = integration.attach(Accelerator(cpu=True))
    torch.manual_seed(0)
    rounding = type("BitLinear", (nn.Linear,), {})
    models = [nn.Sequential(rounding(96, 96), nn.Linear(96, 96)), nn.Sequential(nn.Linear(96, 64))]
    models[0].register_buffer("codebook", torch.randn(300, 32))
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    models, optimizers = [accelerator.prepare(model) for model in models], list(map(accelerator.prepare, optimizers))
    for number in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            accelerator.backward(model(torch.ones(2, 96)).square().mean())
            optimizer.step()
        models[0].module.codebook.mul_(0.9)
        before = [{name: value.clone() for name, value in model.module.state_dict().items()} for model in models]
        accelerator.save_state(str(output / str(number)))
        accelerator.load_state(str(output / str(number)))
        states = [model.module.state_dict() for model in models]
        assert all(states[0][name].equal(before[0][name]) for name in ("0.weight", "codebook"))
        assert not states[0]["1.weight"].equal(before[0]["1.weight"])
        assert not states[1]["0.weight"].equal(before[1]["0.weight"])
    for count in (2, 1):
        accelerator._models, accelerator._optimizers = accelerator._models[:count], accelerator._optimizers[:count]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.load_state(str(output / "1"))
        texts = [str(warning.message) for warning in caught if "s that are not loaded" in str(warning.message)]
        assert [text.partition("since ")[2].partition(" in the order")[0] for text in texts] == [
            f"fewer are prepared: {kind}_1; to load them, prepare 2 {kind}s"
            for kind in ("model", "optimizer") if count == 1 and rank() == 0
        ]


def urls_are_refused(accelerator: Any) -> None:
    """Given as a directory, or as that of automatic naming; nothing is written below the working directory."""
    project = accelerator.project_configuration
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(ConfigError, match="local file system"):
            call("s3://bucket/state")
        named = mock.patch.multiple(project, project_dir="s3://bucket/run", automatic_checkpoint_naming=True)
        with named, pytest.raises(DSQError, match="local file system"):
            call()
    assert not Path("s3:").exists()


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    Accelerator(cpu=True)
    run(
        [
            ddp, ddp_in_background, rank_counts, rank_fails, plain_states, ddp_states, several_models, fsdp2_states,
            trainer_fsdp2, callback_states, full_disk_in_last_write,
        ], ROOT, rank(),
    )
    dist.barrier()
    os._exit(0)  # an ordinary end aborts now and then after collectives of DTensor, without this package too
