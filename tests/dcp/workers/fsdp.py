"""FSDP2 with AdamW: argv = run directory, save or load.

save: trains, saves a chain, and keeps what it decodes to. load: on any number of ranks, loads the same values,
then goes on with training and saving.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import depth, done, error_of, whole, world, zeros
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq_ckpt
from tests.helpers.states import FINE


class Net(nn.Module):
    """Shapes that 2 and 3 ranks share unevenly, or cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 203)
        self.thin = nn.Linear(203, 1)
        self.wide = nn.Parameter(torch.randn(2, 2500) * 0.02)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(203, 64), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(self.embed(tokens))).relu()
        loss: torch.Tensor = self.thin(hidden).square().mean() * self.scale.sum() + self.wide.square().sum()
        return loss


def build(size: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        net(torch.randint(0, 60, (4, 8), generator=generator)).backward()  # tokens 60 and up are never seen
        optimizer.step()
        optimizer.zero_grad()


def state_of(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


def read(path: Path, like: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, gathered."""
    flat, _ = flatten_state_dict(like)
    target = zeros(flat)
    dsq_ckpt.load(target, path, **options)
    return whole(target)


def close(truth: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    for fqn, value in truth.items():
        limit = 0.2 if "exp_avg" in fqn else 0.1
        assert error_of(value, got[fqn]) < limit, (fqn, error_of(value, got[fqn]))


def save(run: Path, size: int) -> None:
    net, optimizer = build(size)
    for number in range(2):
        train(net, optimizer, 3, number)
        state = state_of(net, optimizer)
        dsq_ckpt.save(state, run / str(number), config=FINE, model=net, pinned=True)
        got = read(run / str(number), state)
        close(whole(flatten_state_dict(state)[0]), got)
        assert torch.equal(got["model.frozen"], whole(state["model"])["frozen"]), "frozen weights are exact"
        unseen = got["optim.state.embed.weight.exp_avg"][60:]
        assert not unseen.any(), "moments of what never had a gradient must come back as zero"
        assert depth(run / str(number)) == number
    files = [path.name for path in (run / "0").glob("*.dsq")]
    assert len(files) == size, files
    if dist.get_rank() == 0:
        torch.save({"full": got, "base": read_base(run, state)}, run.parent / "decoded.pt")
    else:
        read_base(run, state)
    done("save")
    themselves(run / "themselves", net, optimizer, size)


def themselves(path: Path, net: Net, optimizer: torch.optim.Optimizer, size: int) -> None:
    """Model and optimizer in place of their state dicts: a new optimizer gets moments that are sharded as it is."""
    dsq_ckpt.save({"net": net, "optimizer": optimizer}, path, config="exact")
    other, new = build(size)
    dsq_ckpt.load({"net": other, "optimizer": new}, path)
    train(net, optimizer, 2, 20)
    train(other, new, 2, 20)
    truth, got = (whole(flatten_state_dict(state_of(*pair))[0]) for pair in ((net, optimizer), (other, new)))
    assert all(torch.equal(got[fqn], value) for fqn, value in truth.items())
    done("themselves")


def read_base(run: Path, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return read(run / "1", state, refinement=False)


def load(run: Path, size: int) -> None:
    held = torch.load(run.parent / "decoded.pt")
    net, optimizer = build(size)
    state = state_of(net, optimizer)
    for name, options in (("base", {"refinement": False}), ("full", {})):
        got = read(run / "1", state, **options)
        assert got.keys() == held[name].keys()
        for fqn, value in held[name].items():
            assert torch.equal(got[fqn], value), (name, fqn)
    done("the same values on any number of ranks")

    saved_with = len(list((run / "0").glob("*.dsq")))
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load(state, run / "1", history=history)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    previous = {}
    for number in range(2):
        train(net, optimizer, 2, 10 + number)
        state, path = state_of(net, optimizer), run / f"on-{size}-{number}"
        dsq_ckpt.save(state, path, config=FINE, model=net, history=history)
        got = read(path, state)
        close(whole(flatten_state_dict(state)[0]), got)
        for older, values in previous.items():
            again = read(older, state, refinement=False)
            assert all(torch.equal(again[fqn], value) for fqn, value in values.items()), older
        if number == 0:
            # with other shards nothing has a previous code, but for what lies whole on one rank in both
            assert depth(path) == 2 if size == saved_with else depth(path) in (0, 2)
            previous[path] = read(path, state, refinement=False)
            history = dsq_ckpt.SaveHistory()  # the next is coded against the files, not against memory
            read(path, state, history=history)
    assert depth(path) == (3 if size == saved_with else depth(run / f"on-{size}-0") + 1)
    done("the run goes on")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (_, ranks):
        {"save": save, "load": load}[sys.argv[2]](Path(sys.argv[1]), ranks)
