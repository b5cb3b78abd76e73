"""Two ranks whose optimizers have other parameters each, as experts and stages of a pipeline: all comes back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import done, fails_everywhere, world
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq_ckpt

Made = tuple[nn.ModuleDict, torch.optim.Optimizer]
LAYERS = {
    "experts": (["shared"], ["expert{}"]), "stages": (["layer{}"],), "empty": (["layer{}"], [], ["last{}"], []),
    "fewer": (["shared"], ["expert{}"]),
}
LEFT_OUT = {("empty", 0, "last{}"), ("fewer", 1, "expert{}")}
"""Layers that a rank does not have."""


def make_pair(kind: str, rank: int, seed: int = 0, *, step: float = 1.0) -> Made:
    """Return the part of a model that a rank has, and an optimizer whose groups have rates of their own."""
    torch.manual_seed(seed + rank)
    groups = [
        [layer.format(rank) for layer in layers if (kind, rank, layer) not in LEFT_OUT] for layers in LAYERS[kind]
    ]
    if kind == "fewer":
        groups = [group for group in groups if group]
    model = nn.ModuleDict({layer: nn.Linear(70, 70) for group in groups for layer in group})
    if "shared" in model:
        with torch.no_grad():
            for parameter in model["shared"].parameters():
                parameter.fill_(0.01)
    return model, torch.optim.AdamW([
        {"params": [p for layer in group for p in model[layer].parameters()], "lr": step * 10.0 ** -(2 + number)}
        for number, group in enumerate(groups)
    ])


def trained(kind: str, rank: int) -> Made:
    model, optimizer = make_pair(kind, rank, step=0.5)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.3
    for step in range(2):
        for name, parameter in model.named_parameters():
            torch.manual_seed(step if "shared" in name else step + 10 * rank)
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def check_equal(before: Made, after: Made) -> None:
    """All parameters, options of groups, and moments are the same bit for bit."""
    (model, optimizer), (other, restored) = before, after
    other_parameters = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.equal(other_parameters[name]), name
        own, loaded = optimizer.state[parameter], restored.state[other_parameters[name]]
        assert own.keys() == loaded.keys() and all(own[key].equal(loaded[key]) for key in own), name
    for group, loaded in zip(optimizer.param_groups, restored.param_groups, strict=True):
        assert {**group, "params": 0} == {**loaded, "params": 0}, (group, loaded)
        assert len(group["params"]) == len(loaded["params"])


@contextmanager
def warned(*, rank: int, of: str = "") -> Iterator[None]:
    """Fail unless rank 0 is warned of this, and of nothing if it is empty."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        yield
    texts = [str(warning.message) for warning in recorded if issubclass(warning.category, UserWarning)]
    assert (any(of in text for text in texts) if of and rank == 0 else not texts), (of, texts)


def restored_alike(root: Path, rank: int) -> None:
    """The same ranks have all of it again, without a warning, saved at once, or in the background."""
    for kind in LAYERS:
        before = trained(kind, rank)
        for background in (False, True):
            after, path = make_pair(kind, rank, 5), root / kind / str(background)
            with warned(rank=rank):
                outcome = dsq_ckpt.Compressor(*before, "exact").save(path, background=background)
                if background:
                    outcome.result(timeout=240)
                dsq_ckpt.Compressor(*after).load(path)
            check_equal(before, after)
    done("restored alike")


def searched(root: Path, rank: int) -> None:
    """A save that is quantized before it is planned lists the same."""
    before, after = trained("experts", rank), make_pair("experts", rank, 5)
    dsq_ckpt.Compressor(*before, evaluate=lambda: 1.0).save(root / "a")
    dsq_ckpt.Compressor(*after, evaluate=lambda: 1.0).load(root / "a")
    assert [group["lr"] for group in after[1].param_groups] == [group["lr"] for group in before[1].param_groups]
    assert all("exp_avg" in after[1].state[parameter] for parameter in after[0].parameters())
    done("searched")


def by_state_dicts(root: Path, rank: int) -> None:
    """State dicts of torch's `get_state_dict` come back by its `set_state_dict`."""
    def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    for kind in ("experts", "stages"):
        before, after = trained(kind, rank), make_pair(kind, rank, 5)
        with warned(rank=rank):
            dsq_ckpt.save(state_of(*before), root / kind / "a", config="exact")
            state = state_of(*after)
            dsq_ckpt.load(state, root / kind / "a")
        set_state_dict(*after, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        check_equal(before, after)
    done("by state dicts")


def other_ranks(root: Path, rank: int) -> None:
    """One rank has all experts again, and two have the experts of one rank."""
    before = trained("experts", rank)
    dsq_ckpt.Compressor(*before, "exact").save(root / "two")
    alone = [dist.new_group([own]) for own in range(2)][rank]
    torch.manual_seed(5)
    model = nn.ModuleDict({name: nn.Linear(70, 70) for name in ("shared", "expert0", "expert1")})
    experts = [*model["expert0"].parameters(), *model["expert1"].parameters()]
    whole = model, torch.optim.AdamW([{"params": model["shared"].parameters()}, {"params": experts}])
    with warned(rank=rank):
        dsq_ckpt.Compressor(*whole, process_group=alone).load(root / "two")
    own = nn.ModuleDict({name: model[name] for name in before[0]})
    optimizer = torch.optim.AdamW([{"params": own[name].parameters()} for name in own])
    optimizer.state = whole[1].state
    for group, whole_group in zip(optimizer.param_groups, whole[1].param_groups, strict=True):
        group.update({**whole_group, "params": group["params"]})
    check_equal(before, (own, optimizer))
    dsq_ckpt.Compressor(*whole, "exact", process_group=alone).save(root / f"one{rank}" / "a")
    after = make_pair("experts", rank, 5)
    dist.barrier()
    with warned(rank=rank):
        dsq_ckpt.Compressor(*after).load(root / "one0" / "a")
    check_equal(before, after)
    done("other ranks")


def told_at_the_save(root: Path, rank: int) -> None:
    """Groups that cannot be brought together are named when they are saved, also where warnings are errors."""
    def changed(change: Callable[[list[dict[str, Any]]], object]) -> Made:
        model, optimizer = trained("experts", rank)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        if rank:
            change(optimizer.param_groups)
        return model, optimizer

    for number, (change, name) in enumerate((
        (lambda groups: groups[1].update(lr=0.5), "'optimizer.param_groups.1.lr' is not the same on all ranks"),
        (lambda groups: groups[1].update(own=1), "'optimizer.param_groups.1' is not the same on all ranks"),
        (lambda groups: groups.reverse(), "'shared.weight', 'shared.bias' is in another parameter group"),
    )):
        with warned(rank=rank, of=name):
            dsq_ckpt.Compressor(*changed(change)).save(root / str(number) / "a")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fails_everywhere(lambda: dsq_ckpt.Compressor(*changed(change)).save(root / "error" / "a"), name)  # noqa: B023
    model = nn.Sequential(*(nn.Linear(70, 70) for _ in range(1 + rank)))
    with warned(rank=rank, of="'optimizer.param_groups.0.params' is not the same on all ranks"):
        dsq_ckpt.save({"optimizer": torch.optim.SGD(model.parameters())}, root / "numbers" / "a")
    done("told at the save")


def lists_of_one_rank(root: Path, rank: int) -> None:
    """DCP's own planner stores them, as earlier versions did: groups are found by their places, with a warning."""
    for kind in LAYERS:
        before, after = trained(kind, rank), make_pair(kind, rank, 5)
        state = dsq_ckpt.Compressor(*before).state()
        dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(root / kind / "a", "exact"))
        with warned(rank=rank, of="" if kind == "fewer" else "in no group of its optimizer, though it has their state"):
            dsq_ckpt.Compressor(*after).load(root / kind / "a")
        check_equal(before, after)
    done("lists of one rank")


def sharded(root: Path, rank: int) -> None:
    """Ranks that have the same groups are told nothing."""
    model = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    rates = torch.tensor(0.1), 0.2
    optimizer = torch.optim.AdamW(
        [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(model, rates, strict=True)]
    )
    with warned(rank=rank):
        dsq_ckpt.Compressor(model, optimizer).save(root / "a")
    optimizer.param_groups[0]["lr"] += rank
    with warned(rank=rank, of="'optimizer.param_groups.0.lr' is not the same on all ranks"):
        dsq_ckpt.Compressor(model, optimizer).save(root / "b" / "a")
    done("sharded")


def stages_without_state(root: Path, rank: int) -> None:
    """A rank whose parameters had no gradient yet, as those of a stage that is trained later, has no state again."""
    for stepped in range(2):
        before, after, path = trained("stages", rank), make_pair("stages", rank, 5), root / str(stepped)
        if rank != stepped:
            before[1].state.clear()
        dsq_ckpt.Compressor(*before, "exact").save(path)
        with warned(rank=rank):
            dsq_ckpt.Compressor(*after).load(path)
        check_equal(before, after)
    done("stages without state")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, _):
        for check in (
            restored_alike, searched, by_state_dicts, other_ranks, told_at_the_save, lists_of_one_rank, sharded,
            stages_without_state,
        ):
            check(Path(sys.argv[1]) / check.__name__, me)
