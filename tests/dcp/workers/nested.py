"""Several ranks: nested states whose keys differ between ranks, empty dicts to be filled, what is told or refused."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from harness import done, fails_everywhere, world
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import dsq_ckpt
from dsq_ckpt import DSQStorageWriter
from tests.helpers.reading import read_checkpoint
from tests.helpers.training import Net, compute_loss


def keys(root: Path, rank: int, size: int) -> None:
    """Numbers among the keys of every rank, whoever coordinates, saved at once and in the background."""
    def state(step: int) -> dict[str, object]:
        own = {rank: {"m": torch.full((3,), float(rank + step))}}
        return {"own": own, f"none{rank}": {}, "all": {7: torch.full((80, 80), 0.5 + step), "step": step}}

    for step, background in enumerate((False, True)):
        path = root / str(step)
        if background:
            dsq_ckpt.async_save(state(step), path).result(timeout=240)
        else:
            dsq_ckpt.save(state(step), path)
        if rank == 0:
            loaded = read_checkpoint(path)
            assert list(loaded["all"]) == [7, "step"] and loaded["none0"] == loaded["none1"] == {}
            assert {key: float(value["m"][0]) for key, value in loaded["own"].items()} == {
                other: float(other + step) for other in range(size)
            }
        filled: dict[str, object] = {"own": {}, "all": {}}
        dsq_ckpt.load(filled, path)
        assert sorted(filled["own"]) == list(range(size)) and filled["all"]["step"] == step
        assert all(float(value["m"][0]) == key + step for key, value in filled["own"].items())
    done("keys")


def early(root: Path, rank: int) -> None:
    """All ranks are told, before any of them evaluates."""
    model, calls = Net(), []

    def evaluate() -> float:
        calls.append(1)
        return compute_loss(model)

    compressor = dsq_ckpt.Compressor(model, torch.optim.AdamW(model.parameters()), evaluate=evaluate)
    compressor.save(root / "a")
    calls.clear()
    for background in (False, True):
        fails_everywhere(lambda: compressor.save(root / "a", background=background), "overwrite=True")  # noqa: B023
    assert calls == []
    fails_everywhere(lambda: compressor.load(dsq_ckpt.latest(root / "none")), "no complete checkpoint")
    absent = {} if rank else {"other": torch.zeros(3)}  # what one rank alone asks for
    fails_everywhere(lambda: compressor.load(root / "a", extra={"absent": absent}), "absent")
    done("early")


def placeholders(root: Path, rank: int) -> None:
    """A load that one rank refuses, before or while it reads, leaves the empty dicts of all ranks empty."""
    dsq_ckpt.save({"a": {"w": torch.ones(3)}, "b": torch.ones(3), "where": root, 5: {rank: "own"}}, root / "a")
    for other in ({"absent": {}}, {"absent": torch.zeros(3)}, {"b": torch.zeros(4)}):
        target = {"a": {}, **(other if rank else {})}
        fails_everywhere(lambda: dsq_ckpt.load(target, root / "a"), next(iter(other)))  # noqa: B023
        assert target["a"] == {}
    target = {}
    fails_everywhere(lambda: dsq_ckpt.load(target, root / "a"), "'where' is more than plain data")
    assert target == {}
    mixed = {"a": {}, "where": None, 5: {0: "", 1: ""}}  # top-level keys that cannot be sorted
    dsq_ckpt.load(mixed, root / "a")
    assert mixed["where"] == root and mixed[5] == {0: "own", 1: "own"} and mixed["a"]["w"].equal(torch.ones(3))
    done("placeholders")


def partial(root: Path, rank: int) -> None:
    """A model that is shorter than the saved one is warned of, and stages of a pipeline that are whole together not."""
    def stage(*places: int) -> dict[str, object]:
        return {"model": torch.nn.ModuleDict({f"layer{place}": torch.nn.Linear(80, 80) for place in places})}

    dsq_ckpt.save(stage(0, 1, 2), root / "a")
    for state, alone, expected in (
        (stage(0, 1), False, rank == 0), (stage(rank, 2), False, False), (stage(rank), True, False)
    ):
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            dsq_ckpt.load(state, root / "a", no_dist=alone)
        assert expected == any(
            "of modules that the model does not have" in str(warning.message) for warning in recorded
        )
    done("partial")


def own_values(root: Path, rank: int) -> None:
    """Values of a rank's own are warned of, once, where ranks share a name; with names of their own they are kept."""
    model = Net()
    compressor = dsq_ckpt.Compressor(model, torch.optim.SGD(model.parameters()))
    searching = dsq_ckpt.Compressor(
        model, torch.optim.SGD(model.parameters()), evaluate=lambda: compute_loss(model)
    )

    def in_background(stage: str) -> Callable[..., object]:
        return lambda path, extra: dsq_ckpt.async_save(
            extra, path, config={"storage": {"stage": stage}}
        ).result(timeout=240)

    random = torch.Generator().manual_seed(rank).get_state()
    statistics = torch.full((3,), float(rank))
    for place, (save, extra, expected) in enumerate((
        (compressor.save, {"rng": random, "step": 3, "mean": statistics}, True),
        (lambda path, extra: dsq_ckpt.async_save(extra, path).result(timeout=240), {"rng": random, "at": [rank]}, True),
        (compressor.save, {f"rng-{rank}": random, "step": 3, "name": "a"}, False),
        (compressor.save, {"average": torch.full((64, 80), 1.0 + rank)}, True),
        (searching.save, {"average": torch.full((64, 80), 1.0 + rank), "rng": random}, True),
        (in_background("copy"), {"average": torch.full((64, 80), 1.0 + rank)}, True),
        (in_background("quantize"), {"average": torch.full((64, 80), 1.0 + rank)}, True),
    )):
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            save(root / str(place), extra=extra)
        texts = [str(warning.message) for warning in recorded if "is not the same on all ranks" in str(warning.message)]
        assert bool(texts) == (expected and rank == 0), (rank, texts)
        assert len(texts) < 2
        for name in ("rng", "average") if texts else ():
            assert any(f"{name}'" in text for text in texts) == (name in extra), (name, texts)
        assert not any(name in text for text in texts for name in ("step", "mean", "weight")), texts
    back = compressor.load(root / "2", extra={f"rng-{rank}": torch.zeros_like(random), "step": 0, "name": ""})
    assert back[f"rng-{rank}"].equal(random)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fails_everywhere(lambda: dsq_ckpt.save({"at": rank}, root / "error"), "is not the same on all ranks")
        average = {"average": torch.full((64, 80), 1.0 + rank)}
        fails_everywhere(lambda: searching.save(root / "error", extra=average), "is not the same on all ranks")
    done("own values")


def distributed(root: Path, rank: int, size: int) -> None:
    """Copies of a part of a distributed tensor are compared, other parts are not; sums yet to be made are refused."""
    pairs = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "parts"))
    line = init_device_mesh("cpu", (size,))
    own = torch.full((64, 80), 1.0 + rank)

    def told(save: Callable[..., object], state: dict[str, object], path: Path) -> bool:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            save(state, path, parent=None)
        return any("is not the same on all ranks" in str(warning.message) for warning in recorded)

    def placed(local: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
        return DTensor.from_local(local, mesh, placements, run_check=False)

    state = {
        "diverged": placed(own, line, Replicate()), "codes": placed((own * 7).byte(), line, Replicate()),
        "hybrid": placed(own, pairs, Replicate(), Shard(0)), "experts": placed(own, pairs["parts"], Shard(0)),
        "agreed": placed(torch.ones(64, 80), line, Replicate()), "rows": placed(own, line, Shard(0)),
        "replicas": placed(torch.ones(64, 80), pairs, Replicate(), Shard(0)), "bias": placed(own[0], line, Replicate()),
        "packed": torch.full((512, 512), rank, dtype=torch.uint8), "scale": torch.tensor(1.0 + rank),
        "order": torch.arange(40_000) + rank, "same": torch.arange(40_000),
    }
    unlike = {"diverged", "codes", "hybrid", "experts", "packed", "scale", "order"} if rank == 0 else set()
    copying, quantizing = ({"storage": {"stage": stage}} for stage in ("copy", "quantize"))
    for place, save in enumerate((
        dsq_ckpt.save,
        lambda *args, **more: dsq_ckpt.async_save(*args, **more, config=copying).result(timeout=240),
        lambda *args, **more: dsq_ckpt.async_save(*args, **more, config=quantizing).result(timeout=240),
    )):
        names = {name for name, value in state.items() if told(save, {"all": 1, name: value}, root / f"{place}-{name}")}
        assert names == unlike, (place, names)

    sums = {"ok": own, "sums": placed(own, line, Partial())}
    says = "'sums' is a DTensor with the placements [Partial(sum)]"
    fails_everywhere(lambda: dsq_ckpt.save(sums, root / "sums"), f"SaveFailed: {says}")
    fails_everywhere(lambda: dsq_ckpt.async_save(sums, root / "sums"), f"SaveFailed: {says}")
    for config in (copying, quantizing):
        writer = DSQStorageWriter(root / "sums", config=config)
        fails_everywhere(lambda: dcp.async_save(sums, storage_writer=writer).result(timeout=240), says)  # noqa: B023
    dsq_ckpt.save({"sums": torch.ones(64, 80)}, root / "whole")
    target = {"sums": placed(torch.zeros(64, 80), line, Partial())}
    fails_everywhere(lambda: dsq_ckpt.load(target, root / "whole"), f"rank 0: {says}")
    target["sums"] = target["sums"].redistribute(placements=[Replicate()])
    dsq_ckpt.load(target, root / "whole")
    assert target["sums"].to_local().equal(torch.ones(64, 80))
    done("distributed")


def left_state(root: Path, rank: int) -> None:
    """Optimizer state that is not restored is an error of all ranks, where warnings are errors."""
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    every, first = (torch.optim.AdamW(some) for some in (model.parameters(), list(model.parameters())[:1]))
    compressor, fewer = dsq_ckpt.Compressor(model, every), dsq_ckpt.Compressor(model, first)
    for saver, optimizer, name in ((compressor, every, "all"), (fewer, first, "fewer")):
        optimizer.step()
        saver.save(root / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fails_everywhere(lambda: fewer.load(root / "all"), "since this optimizer does not have these parameters")
        fails_everywhere(lambda: compressor.load(root / "fewer"), "did not have these parameters: they begin without")
    done("left state")


def objects(root: Path, rank: int) -> None:
    """Objects of which ranks tell different things: what fails on one rank fails on all."""
    def stepped(*used: int, of: int = 3) -> torch.optim.Optimizer:
        parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(of)]
        for number in used:
            parameters[number].grad = torch.ones(4)
        optimizer = torch.optim.AdamW(parameters)
        optimizer.step()
        return optimizer

    dsq_ckpt.save({"optimizer": stepped(0, 1, 2)}, root / "a")
    target = stepped(rank)
    dsq_ckpt.load({"optimizer": target}, root / "a")
    assert all(state["exp_avg"].any() for state in target.state.values()) and len(target.state) == 3
    fewer = stepped(0, of=3 - rank)
    fails_everywhere(lambda: dsq_ckpt.load({"optimizer": fewer}, root / "a"), "and 'optimizer' has 2 parameters")
    done("objects")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, ranks):
        keys(Path(sys.argv[1]) / "keys", me, ranks)
        early(Path(sys.argv[1]) / "early", me)
        placeholders(Path(sys.argv[1]) / "placeholders", me)
        partial(Path(sys.argv[1]) / "partial", me)
        own_values(Path(sys.argv[1]) / "own", me)
        distributed(Path(sys.argv[1]) / "distributed", me, ranks)
        left_state(Path(sys.argv[1]) / "left", me)
        objects(Path(sys.argv[1]) / "objects", me)
