"""DDP: argv = an empty directory. A replica is written by one rank, and not always by the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import depth, done, error_of, world
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import dsq_ckpt
from dsq_ckpt import DSQStorageWriter
from dsq_ckpt.api.saving import save_with_writer
from dsq_ckpt.engine.options import CompressorInputs
from dsq_ckpt.search.manager import ConfigManager
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.training import Net, Tied, compute_loss, train


def owners(path: Path) -> dict[str, int]:
    """The rank that wrote each weight."""
    with Checkpoint(path) as checkpoint:
        files = {key.fqn: ref.file for key, ref in checkpoint.iter_chunks() if key.fqn.startswith("model.")}
    return {fqn: int(file.removesuffix(".dsq").rpartition("-")[2]) for fqn, file in files.items()}


def flip(run: Path, rank: int, size: int, searched: bool) -> None:
    """Replicas differ a little, as on hardware that does not compute the same twice; each save is of its writers'."""
    model, history = Net(), dsq_ckpt.SaveHistory()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
    manager = ConfigManager(model, lambda: compute_loss(model))
    truths: list[dict[str, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(rank)
    for number in range(3):
        train(wrapped, optimizer, 20 * number, 20 * number + 20, rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += rank * 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        state: dict[str, Any] = {} if rank or number % 2 else {"ballast": torch.arange(100_000)}
        state["model"] = get_model_state_dict(wrapped)
        path = run / str(number)
        if searched:
            writer = DSQStorageWriter(path, model=model, pinned=True, history=history, inputs=CompressorInputs(manager))
            save_with_writer(lambda writer=writer, state=state: (writer, state), staged=True)
        else:
            dsq_ckpt.save(state, path, model=model, pinned=True, history=history)
        held: list[Any] = [None] * size
        dist.all_gather_object(held, state["model"])
        truths.append({fqn: held[owner][fqn.removeprefix("model.")] for fqn, owner in owners(path).items()})
        assert depth(path) == number
        assert not number or owners(path).items() ^ owners(run / str(number - 1)).items(), "no other rank wrote any"
    for number, truth in enumerate(truths):  # only now: what was loaded is known, and would be coded against
        for refinement, limit in ((True, 0.2), (False, 0.7)):
            got = {fqn: torch.zeros_like(value) for fqn, value in truth.items()}
            dsq_ckpt.load(got, run / str(number), refinement=refinement)
            errors = {fqn: error_of(value, got[fqn]) for fqn, value in truth.items()}
            assert max(errors.values()) < limit, (number, refinement, errors)
    done(f"replicas written by other ranks, {searched=}")


def tied(run: Path, rank: int) -> None:
    """Weights that are tied are stored once, though replicas are dealt to all ranks."""
    model = Tied()
    wrapped = DistributedDataParallel(model)
    state = {"model": get_model_state_dict(wrapped)}
    dsq_ckpt.async_save(state, run / "0", model=model, config={"storage": {"stage": "quantize"}}).result()
    manager = ConfigManager(model, lambda: float(model.hidden.weight.square().mean() + model.embed.weight.abs().mean()))
    inputs = CompressorInputs(manager)
    save_with_writer(lambda: (DSQStorageWriter(run / "1", model=model, inputs=inputs), state), staged=True)
    dsq_ckpt.save(state, run / "2", model=model)
    dsq_ckpt.async_save(state, run / "3", model=model, config={"storage": {"stage": "copy"}}).result()
    dcp.save(state, storage_writer=DSQStorageWriter(run / "4", model=model))
    for name in "01234":
        assert Manifest.read(run / name).kinds["weights"].logical == 4 * (128 * 96 + 96 * 96)
        got = {"model": Tied(1, tied=False).state_dict()}
        dsq_ckpt.load(got, run / name)
        assert torch.equal(got["model"]["head.weight"], got["model"]["embed.weight"])
        errors = {fqn: error_of(value, got["model"][fqn]) for fqn, value in state["model"].items()}
        assert max(errors.values()) < 0.3, errors
    done("tied weights")


def exact(run: Path) -> None:
    """A rule for one of the names counts though another rank writes the other name."""
    for number, how in enumerate((dsq_ckpt.save, lambda *args, **kw: dsq_ckpt.async_save(*args, **kw).result())):
        for named in ("first", "second"):
            value = torch.randn(128, 96, generator=torch.Generator().manual_seed(0))
            path, rule = run / f"{number}{named}", {"pattern": f"{named}*", "exact": True}
            how({"first.weight": value, "second.weight": value}, path, config={"quantize": {"rules": [rule]}})
            got = {name: torch.zeros_like(value) for name in ("first.weight", "second.weight")}
            dsq_ckpt.load(got, path)
            assert all(torch.equal(value, own) for own in got.values()), (how, named)
    done("tied weights that are exact")


def apart(run: Path, rank: int, size: int) -> None:
    """Shards that share memory on some ranks only, as those that a source rank dealt without a copy, or otherwise."""
    mesh = init_device_mesh("cpu", (size,))
    for number, how in enumerate((dsq_ckpt.save, lambda *args, **kw: dsq_ckpt.async_save(*args, **kw).result())):
        for step in range(2):  # a keyframe and a delta
            a, b, c = (torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)) for seed in (rank, 7, 8))
            locals_ = {"a.weight": a, "b.weight": a if rank == 0 else b, "c.weight": c if rank == 0 else b}
            state = {name: DTensor.from_local(value, mesh, [Shard(0)]) for name, value in locals_.items()}
            path = run / f"{number}{step}"
            how(state, path)
            got = {name: DTensor.from_local(torch.zeros(64, 96), mesh, [Shard(0)]) for name in state}
            dsq_ckpt.load(got, path)
            errors = {name: error_of(value, got[name].to_local()) for name, value in locals_.items()}
            assert max(errors.values()) < 0.05, (how, errors)
    done("shards that are tied on some ranks")


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    with world() as (me, ranks):
        flip(root / "saved", me, ranks, searched=False)
        flip(root / "searched", me, ranks, searched=True)
        tied(root / "tied", me)
        exact(root / "exact")
        apart(root / "apart", me, ranks)
