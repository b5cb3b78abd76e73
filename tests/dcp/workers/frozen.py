"""Ranks agree about what is frozen, and load the stage of a pipeline that they have: argv = run directory."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import done, fails_everywhere, whole, world
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest


def pipeline(run: Path, rank: int) -> None:
    """One stage is frozen as a whole, the other in part; their modules have the same names."""
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)).requires_grad_(False)
    if rank:
        stage[1].requires_grad_(True)
    state = {f"stage{rank}": stage.state_dict()}
    dsq_ckpt.save(state, run / "sync", model=stage)
    for how in ("copy", "quantize"):
        dsq_ckpt.async_save(state, run / how, config={"storage": {"stage": how}}, model=stage, parent=None).result()
    for how in ("sync", "copy", "quantize"):
        got = {f"stage{rank}": {name: torch.zeros_like(value) for name, value in stage.state_dict().items()}}
        dsq_ckpt.load(got, run / how)
        exact = [got[f"stage{rank}"][f"{number}.weight"].equal(stage[number].weight) for number in range(2)]
        assert exact == [True, not rank], (how, exact)
    done("a frozen stage")


def stages(run: Path, rank: int) -> None:
    """A tensor that only the other rank has is no loss, and nothing to warn of; one that none has is."""
    torch.manual_seed(rank)
    stage = nn.Module()
    stage.add_module(f"layer{rank}", nn.Linear(80, 80))
    dsq_ckpt.Compressor(stage, config="exact").save(run / "compressor")
    dsq_ckpt.save(stage, run / "module", config="exact")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("default", module="torch")
        dsq_ckpt.Compressor(stage).load(run / "compressor")
        dsq_ckpt.load(stage, run / "module")
    if not rank:
        stage = nn.Sequential(nn.Linear(80, 80))
    fails_everywhere(lambda: dsq_ckpt.Compressor(stage).load(run / "compressor"), "'layer0.bias', 'layer0.weight'")
    done("stages")


def frozen_stage(run: Path, rank: int) -> None:
    """With frozen=False a rank may have nothing to save; what it has is not filled with other stages at the load."""
    def make_stage(seed: int, train: bool) -> nn.Module:
        torch.manual_seed(seed + rank)
        return nn.ModuleDict({f"layer{rank}": nn.Linear(80, 80)}).requires_grad_(train)

    for has_optimizer in (True, False):
        path, stage, other = run / f"{has_optimizer}", make_stage(0, bool(rank)), make_stage(0, bool(rank))
        before, extra = {name: value.clone() for name, value in stage.state_dict().items()}, {"step": 1}
        optimizers = [torch.optim.AdamW(module.parameters()) if has_optimizer else None for module in (stage, other)]
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.add_(rank)
        for background in (False, True):
            future = dsq_ckpt.Compressor(stage, optimizers[0], "exact", frozen=False).save(
                path / f"{background}", extra if has_optimizer else None, background=background
            )
            assert not isinstance(future, Future) or future.result()
            got = dsq_ckpt.Compressor(other, optimizers[1], frozen=False).load(
                path / f"{background}", {"step": 0} if has_optimizer else None
            )
            assert got == (extra if has_optimizer else {}), got
            assert all(value.equal(stage.state_dict()[name]) for name, value in other.state_dict().items())
            assert other.state_dict()[f"layer{rank}.weight"].equal(before[f"layer{rank}.weight"]) == (not rank)
            assert ("model" in dsq_ckpt.Compressor(stage, frozen=False).state()) == bool(rank)
            everything: dict[str, Any] = {}
            dsq_ckpt.load(everything, path / f"{background}")
            assert everything["model"].keys() == {"layer1.weight", "layer1.bias"}, everything["model"].keys()
    frozen = dsq_ckpt.Compressor(make_stage(0, False), frozen=False)
    fails_everywhere(lambda: frozen.save(run / "none"), "all of the model is frozen")
    dsq_ckpt.Compressor(make_stage(0, False)).save(run / "whole")
    fails_everywhere(lambda: frozen.load(run / "whole"), "all of the model is frozen")
    done("a frozen stage that is left out")


def unfrozen(run: Path, rank: int) -> None:
    """Parameters of one stage that begin without optimizer state are warned of."""
    def make_stage(names: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        stage = nn.ModuleDict({f"layer{rank}": nn.Linear(80, 80)})
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(name.endswith(names))
        return stage, torch.optim.AdamW(parameter for parameter in stage.parameters() if parameter.requires_grad)

    stage, optimizer = make_stage("weight")
    stage[f"layer{rank}"](torch.randn(4, 80)).square().mean().backward()
    optimizer.step()
    dsq_ckpt.Compressor(stage, optimizer).save(run)
    for names in ("", "weight"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsq_ckpt.Compressor(*make_stage(names if rank else "weight")).load(run)
        texts = [text for warning in caught if "no optimizer state" in (text := str(warning.message))]
        assert len(texts) == (not rank and not names), texts  # rank 0 warns
        assert not texts or texts[0].startswith("no optimizer state of 'layer1.bias' was loaded"), texts
    stage, optimizer = make_stage("")
    stage[f"layer{rank}"](torch.randn(4, 80)).square().mean().backward()
    stage[f"layer{rank}"].bias.grad = None  # so it has no state
    optimizer.step()
    model_state, optimizer_state = get_state_dict(stage, optimizer)
    writer = dsq_ckpt.DSQStorageWriter(run.with_name("plain"))
    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=writer)  # groups of one rank alone
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no optimizer state")
        dsq_ckpt.Compressor(*make_stage("")).load(run.with_name("plain"))
    done("unfrozen")


def frozen_at_the_load(run: Path, rank: int) -> None:
    """Sharded weights that were trained at the save come back where they need no gradient."""
    def make_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return fully_shard(nn.Sequential(nn.Linear(80, 81), nn.Linear(81, 80)))

    model, other = make_model(0), make_model(1)
    dsq_ckpt.Compressor(model, config="exact", frozen=False).save(run)
    other[0].requires_grad_(False)
    dsq_ckpt.Compressor(other, frozen=False).load(run)
    assert whole(other.state_dict())["0.weight"].equal(whole(model.state_dict())["0.weight"]), rank
    done("frozen at the load")


def replicas(run: Path, rank: int) -> None:
    """An average that moves on one rank is lossy on both, whichever writes it; a table like no weights is exact."""
    torch.manual_seed(0)
    model = nn.Linear(80, 80)
    model.register_buffer("table", model.weight.detach().clone())
    model.register_buffer("codes", torch.randn(80, 80))
    for number, exact in enumerate([True, True, False]):
        with torch.no_grad():
            model.weight.add_(0.01)
            if rank:
                model.table.lerp_(model.weight, 0.5)
            model.codes.mul_(0.9)
        dsq_ckpt.save({"model": model.state_dict()}, run / str(number), model=model)
        target: dict[str, dict[str, torch.Tensor]] = {}
        dsq_ckpt.load(target, run / str(number), no_dist=True)
        tables = [torch.empty(80, 80) for _ in range(2)]
        dist.all_gather(tables, model.table.clone())
        assert any(target["model"]["table"].equal(table) for table in tables) == exact, number
        assert target["model"]["codes"].equal(model.codes)
    done("replicas")


def excluded(run: Path, rank: int) -> None:
    """Checksums of weights left out are those of the whole tensors, however they are sharded."""
    def make_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        base = nn.Sequential(nn.Embedding(101, 64), nn.Linear(64, 203), nn.LayerNorm(203)).requires_grad_(False)
        base.register_parameter("scale", nn.Parameter(torch.ones(1), requires_grad=False))
        model = nn.Module()
        model.base, model.adapter = base, nn.Linear(64, 64)
        return model

    def warnings_of_load(model: nn.Module, path: Path) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsq_ckpt.Compressor(model, frozen=False).load(path)
        return [str(warning.message) for warning in caught if "frozen=False" in str(warning.message)]

    meshes = {"sharded": ((2,), ("x",)), "replicated": ((2, 1), ("x", "y")), "plain": None}
    for name, mesh in meshes.items():
        model = make_model(0)
        if mesh is not None:
            fully_shard(model.base, mesh=init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1]))
            fully_shard(model, mesh=init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1]))
        dsq_ckpt.Compressor(model, frozen=False).save(run / name)
        assert warnings_of_load(model, run / name) == []
        texts = Manifest.read(run / name).excluded
        assert len(texts) == 6 and texts == Manifest.read(run / "sharded").excluded, (name, texts)
        assert warnings_of_load(make_model(0), run / name) == []
        texts_of_load = warnings_of_load(make_model(1), run / name)
        assert len(texts_of_load) == (not rank), texts_of_load  # rank 0 warns
        assert rank or texts_of_load[0].startswith("'base.0.weight', 'base.1.bias', 'base.1.weight' of this model")
    dsq_ckpt.Compressor(make_model(rank), frozen=False).save(run / "unknown")  # as shards that nothing tells of
    assert Manifest.read(run / "unknown").excluded.keys() == {"base.2.weight", "base.2.bias", "base.scale"}
    done("excluded")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (own, _):
        pipeline(Path(sys.argv[1]) / "pipeline", own)
        replicas(Path(sys.argv[1]) / "replicas", own)
        stages(Path(sys.argv[1]) / "stages", own)
        frozen_stage(Path(sys.argv[1]) / "frozen_stage", own)
        unfrozen(Path(sys.argv[1]) / "unfrozen", own)
        frozen_at_the_load(Path(sys.argv[1]) / "frozen_at_the_load", own)
        excluded(Path(sys.argv[1]) / "excluded", own)
