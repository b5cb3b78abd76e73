"""DDP and FSDP2 through Lightning: `ranks.py DIRECTORY`. On two ranks it saves and compares; on one it loads that."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dsq_ckpt
from dsq_ckpt.integrations.lightning import DSQCheckpointIO, DSQModelParallelStrategy
from tests.helpers.odd_optimizers import CountingAdamW, GlobalStateSGD, HookedSGD, leaves
from tests.integrations.lightning.common import Model, damage, names, same, saving, seed, trained, trainer

RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
SIZES = {"data_parallel_size": RANKS, "tensor_parallel_size": 1}


class Sharded(Model):
    def configure_model(self) -> None:
        if isinstance(self.net[1], nn.LayerNorm):
            return  # as of an evaluation after training
        self.net[1] = nn.LayerNorm(128)
        for module in (self.embed, self.net[0], self.net[3], self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["from"] = RANK


class Wider(Sharded):
    def configure_model(self) -> None:
        self.more = nn.Linear(32, 64)
        super().configure_model()


class Whole(Model):
    """Weights of which no rank has a part; Lightning copies no others."""

    def configure_model(self) -> None:
        """Shard nothing."""


def fit(strategy: Any, epochs: int, directory: Path, plugins: Any = (), path: Any = None, **options: Any) -> Any:
    """Fit a new model; the trainer."""
    seed(RANK)  # DDP takes rank 0's weights, FSDP2 what each rank has of its own
    if isinstance(strategy, ModelParallelStrategy):
        seed(7)
    pl_trainer = trainer(
        *plugins, ranks=True, epochs=epochs, devices=RANKS, strategy=strategy, callbacks=[saving(directory, **options)]
    )
    pl_trainer.fit(Sharded() if isinstance(strategy, ModelParallelStrategy) else Model(), ckpt_path=path)
    return pl_trainer


def whole(pl_trainer: Any) -> dict[str, torch.Tensor]:
    """Everything that training changed, unsharded, on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    result = dict(get_model_state_dict(pl_trainer.model, options=options))
    for number, optimizer in enumerate(pl_trainer.optimizers):
        state = get_optimizer_state_dict(pl_trainer.model, optimizer, options=options).get("state", {})
        result |= {f"{number}.{key}.{name}": value for key, entries in state.items() for name, value in entries.items()}
    return result


def make_strategy(config: Any = "exact") -> DSQModelParallelStrategy:
    return DSQModelParallelStrategy(**SIZES, config=config)


def ddp(directory: Path) -> None:
    io = [DSQCheckpointIO("exact")]
    expected = fit(DDPStrategy(), 3, directory / "ddp-whole", io)
    fit(DDPStrategy(), 2, directory / "ddp", io, save_last=True)
    in_thread = [AsyncCheckpointIO(io[0])]
    resumed = fit(DDPStrategy(), 3, directory / "ddp", in_thread, "last", save_last=True)
    assert same(*(trained(pl_trainer.lightning_module, pl_trainer.optimizers) for pl_trainer in (resumed, expected)))
    if RANK == 0:
        assert names(directory / "ddp") == ["epoch=2-step=9.ckpt", "last.ckpt"]
        again = io[0].load_checkpoint(directory / "ddp" / "last.ckpt")["state_dict"]
        assert same(again, resumed.lightning_module.state_dict())


def fsdp2(directory: Path) -> None:
    expected = whole(fit(make_strategy(), 3, directory / "whole"))
    checkpoints = directory / "kept"
    fit(make_strategy(), 2, checkpoints, monitor="val", save_top_k=2, save_last=True)
    resumed = fit(make_strategy(), 3, checkpoints, path="last", monitor="val", save_top_k=2, save_last=True)
    assert same(whole(resumed), expected)
    if RANK == 0:
        torch.save(expected, directory / "expected.pt")
        assert names(checkpoints) == ["epoch=1-step=6.ckpt", "epoch=2-step=9.ckpt", "last.ckpt"]
        checkpoint = DSQCheckpointIO().load_checkpoint(checkpoints / "last.ckpt")  # for one device
        assert checkpoint["from"] == 0 and same(
            checkpoint["state_dict"], {k: expected[k] for k in checkpoint["state_dict"]}
        )
        states = checkpoint["optimizer_states"][0]
        assert states["param_groups"][0]["params"] == list(states["state"]) == list(range(7))
        assert torch.equal(states["state"][0]["exp_avg"], expected["0.embed.weight.exp_avg"])
        DSQCheckpointIO("exact").save_checkpoint(checkpoint, directory / "single.ckpt")
    validated = resumed.validate(resumed.lightning_module, ckpt_path="best")  # after an evaluation
    assert validated == resumed.validate(resumed.lightning_module, ckpt_path=checkpoints / "last.ckpt")

    lossy = fit(make_strategy(None), 2, directory / "lossy", save_last=True)
    fit(make_strategy(None), 3, directory / "lossy", path="last")
    if RANK == 0:
        assert dsq_ckpt.describe(directory / "lossy" / "epoch=2-step=9.ckpt")["depth"] == 4
    lossy.save_checkpoint(directory / "weights.ckpt", weights_only=True)
    lossy.validate(lossy.lightning_module, ckpt_path=directory / "weights.ckpt")


def changes(directory: Path) -> None:
    """Checkpoints of another kind are loaded, and replaced."""
    native = directory / "native"
    fit(ModelParallelStrategy(**SIZES), 2, native, save_last=True)
    resumed = fit(make_strategy(), 3, native, path="last", save_last=True)
    last = torch.load(directory / "expected.pt")
    if RANK == 0:
        assert (native / "last.ckpt" / "manifest.json").exists() and not (native / "last.ckpt" / ".metadata").exists()
        assert len(names(native)) == 2
    tensors = whole(resumed)
    assert RANK or same(tensors, last)


def told(directory: Path) -> None:
    """All that an optimizer tells comes back, on these ranks and for one device."""
    for kind in (CountingAdamW, HookedSGD, GlobalStateSGD):
        class Own(Sharded):
            def configure_optimizers(self, kind: Any = kind) -> Any:
                return kind(self.parameters())

        path = directory / kind.__name__
        states = []
        for resumed in (None, path / "last.ckpt"):
            seed(7)
            pl_trainer = trainer(
                ranks=True, devices=RANKS, strategy=make_strategy(), callbacks=[saving(path, save_last=resumed is None)]
            )
            pl_trainer.fit(Own(), ckpt_path=resumed)
            states.append(leaves(pl_trainer.optimizers[0].state_dict()))
        assert states[0] == states[1], kind
        alone = DSQCheckpointIO().load_checkpoint(path / "last.ckpt")["optimizer_states"][0]
        assert {key: value for key, value in leaves(alone).items() if key[0] != "param_groups"} == {
            key: value for key, value in states[0].items() if key[0] != "param_groups"
        }


def frozen(directory: Path) -> None:
    """State of a layer that is frozen before the load comes back, which torch drops."""
    class Frozen(Sharded):
        def configure_model(self) -> None:
            super().configure_model()
            self.net[0].requires_grad_(False)

    pl_trainer = trainer(
        ranks=True, epochs=3, devices=RANKS, strategy=make_strategy(), callbacks=[saving(directory / "frozen")]
    )
    pl_trainer.fit(Frozen(), ckpt_path=directory / "kept" / "last.ckpt")
    tensors = whole(pl_trainer)
    assert not any(parameter.requires_grad for parameter in pl_trainer.lightning_module.net[0].parameters())
    assert RANK or same(tensors, torch.load(directory / "expected.pt"))


def errors(directory: Path) -> None:
    def loads(path: Path, error: type[Exception], text: str, model: Any = Sharded) -> None:
        pl_trainer = trainer(
            ranks=True, devices=RANKS, strategy=make_strategy(), callbacks=[saving(directory / "none")]
        )
        with pytest.raises(error, match=text):
            pl_trainer.fit(model(), ckpt_path=path)

    loads(directory / "weights.ckpt", dsq_ckpt.LoadFailed, "weights only")
    loads(directory / "whole" / "epoch=2-step=9.ckpt", dsq_ckpt.LoadFailed, "lacks 'more.bias' and 1 more", Wider)
    damaged = directory / "kept" / "epoch=1-step=6.ckpt"
    if RANK == 0:
        damage(damaged)
    dist.barrier()
    loads(damaged, dsq_ckpt.DSQError, "epoch=1-step=6.ckpt")
    pl_trainer = fit(make_strategy(), 1, directory / "refused")
    before = names(directory / "refused")
    pl_trainer.lightning_module.save_hyperparameters({"odd": object()} if RANK == 0 else {"odd": 1})
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"hyper_parameters.odd' is of class builtins.object"):
        pl_trainer.save_checkpoint(directory / "refused" / "other.ckpt")
    assert names(directory / "refused") == before
    part = DTensor.from_local(torch.ones(2), pl_trainer.strategy.device_mesh["data_parallel"])
    pl_trainer.lightning_module.on_save_checkpoint = lambda checkpoint: checkpoint.update(average=part)
    with pytest.raises(dsq_ckpt.SaveFailed, match="'average' is distributed"):
        pl_trainer.save_checkpoint(directory / "refused" / "other.ckpt")
    assert names(directory / "refused") == before
    averaged = trainer(ranks=True, devices=RANKS, strategy=make_strategy(), callbacks=[EMAWeightAveraging()])
    with pytest.raises(dsq_ckpt.ConfigError, match="the callback EMAWeightAveraging is there"):
        averaged.fit(Whole())


def main() -> None:
    directory = Path(sys.argv[1])
    if RANKS == 1:
        last = torch.load(directory / "expected.pt")
        pl_trainer = fit(make_strategy(), 3, directory / "one", path=directory / "kept" / "last.ckpt")
        assert same(whole(pl_trainer), last), "on one rank"
        fit(make_strategy(), 3, directory / "one", path=directory / "single.ckpt")
        assert same(whole(pl_trainer), last)
        return
    ddp(directory)
    fsdp2(directory)
    changes(directory)
    told(directory)
    frozen(directory)
    errors(directory)


main()
dist.destroy_process_group()  # Lightning leaves it to the end of the process
