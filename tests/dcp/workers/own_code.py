"""Modules with code of their own on two ranks, sharded, and with other layers on each: argv = directory."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from harness import done, whole, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq_ckpt


class Late(nn.Module):
    """A scale that is not told before the first batch, and an extra state that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(16))
        self.known, self.seen = False, dict[str, Any]()

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        entries = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if not self.known:
            del entries[f"{prefix}value"]
        return entries

    def get_extra_state(self) -> Any:
        return self.seen or None

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.known = f"{prefix}value" in state_dict
        super()._load_from_state_dict(state_dict, prefix, *rest)


def make_model(size: int, known: bool) -> nn.Sequential:
    torch.manual_seed(int(known))
    model = nn.Sequential(nn.Linear(16, 16), Late(), nn.Linear(16, 4))
    if known:
        model[1].value.data.copy_(torch.randn(16))
        model[1].known, model[1].seen = True, {"amax": torch.ones(7), "words": {"<unk>": 3}}
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model


def sharded(root: Path, size: int) -> None:
    source = make_model(size, True)
    values = whole(source.state_dict())
    dsq_ckpt.Compressor(source, config="exact").save(root / "compressor" / "a")
    dsq_ckpt.save({"model": source}, root / "module" / "a", config="exact")
    for way in ("compressor", "module"):
        target = make_model(size, False)
        if way == "compressor":
            dsq_ckpt.Compressor(target, config="exact").load(root / way / "a")
        else:
            dsq_ckpt.load({"model": target}, root / way / "a")
        assert target[1].known and target[1].seen["words"] == {"<unk>": 3}
        assert torch.equal(target[1].seen["amax"], torch.ones(7))
        loaded = whole(target.state_dict())
        assert all(torch.equal(loaded[name], value) for name, value in values.items())
    done("sharded")


def stage(layers: range) -> nn.ModuleDict:
    model = nn.ModuleDict({str(layer): nn.Linear(4, 4) for layer in layers})
    model.register_load_state_dict_pre_hook(lambda *_: None)
    return model


def of_a_pipeline(root: Path, rank: int) -> None:
    """Layers of other ranks are their own; what no rank takes is told by rank 0, once."""
    model = stage(range(2 * rank, 2 * rank + 2))
    dsq_ckpt.save({"model": model}, root / "stages" / "a", config="exact")
    for layers, says in ((2, False), (1, True)):
        target = stage(range(2 * rank, 2 * rank + (layers if rank else 2)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsq_ckpt.load({"model": target}, root / "stages" / "a")
        messages = [str(warning.message) for warning in caught if "was not loaded" in str(warning.message)]
        assert len(messages) == (says and rank == 0), messages
        assert not says or rank or "'model.3.bias', 'model.3.weight' of" in messages[0], messages
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in target.state_dict().items())
    done("stages")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (rank, size):
        sharded(Path(sys.argv[1]), size)
        of_a_pipeline(Path(sys.argv[1]), rank)
