"""All that sharded and replicated optimizers tell comes back on two ranks: argv = run directory."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import done, fails_everywhere, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dsq_ckpt
from dsq_ckpt.integrations.training_state import TrainingState
from tests.helpers.odd_optimizers import (
    CountingAdamW,
    GlobalStateSGD,
    GradientWindow,
    HookedSGD,
    leaves,
    train_on_noise,
)


class Sharing(CountingAdamW):
    """One whose own part has tensors that are sharded as its parameters."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.own["slow"] = [parameter.detach() * 0.5 for group in self.param_groups for parameter in group["params"]]
        return loss


class RowMoments(torch.optim.Optimizer):
    """One with a second moment of each row, which is sharded as the parameter and has another shape, as Adafactor's."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                squares = parameter.grad.square()
                squares = squares.sum(-1, keepdim=True) if squares.dim() > 1 else squares
                state = self.state[parameter]
                state["rows"] = squares if not state else state["rows"] * 0.9 + squares
                parameter.sub_(parameter.grad / (state["rows"].sqrt() + 1e-8), alpha=self.param_groups[0]["lr"])


def make_pair(kind: Callable[..., Any], sharded: bool, steps: int, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Linear(64, 64)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = kind(model.parameters())
    train_on_noise(model, optimizer, steps, seed)
    return model, optimizer


def check(kind: type[torch.optim.Optimizer], sharded: bool, root: Path) -> None:
    steps = 1 if kind is Sharing else 0  # an optimizer itself tells how its own tensors are sharded
    before = make_pair(kind, sharded, 4, 0)
    expected = leaves(before[1].state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("default", module="torch")
        dsq_ckpt.Compressor(*before, "exact").save(root / "a")
        after = make_pair(kind, sharded, steps, 1)
        dsq_ckpt.Compressor(*after).load(root / "a")
        assert leaves(after[1].state_dict()) == expected, kind
        dsq_ckpt.save(TrainingState(before[:1], before[1:]).collect(), root / "b", config="exact")
        after = make_pair(kind, sharded, steps, 1)
        TrainingState(after[:1], after[1:]).restore(root / "b")
        assert leaves(after[1].state_dict()) == expected, kind
    for training in (before, after):
        train_on_noise(*training, 2, 3)
    assert leaves(after[1].state_dict()) == leaves(before[1].state_dict())
    done(f"{kind.__name__} {sharded}")


def fewer(sharded: bool, root: Path) -> None:
    """State that was not saved, as the run is set back to other options, is removed; all ranks go on."""
    before = make_pair(torch.optim.AdamW, sharded, 3, 0)
    dsq_ckpt.Compressor(*before, "exact").save(root / "a")
    for steps in (0, 2):
        after = make_pair(functools.partial(torch.optim.AdamW, amsgrad=True), sharded, steps, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            dsq_ckpt.Compressor(*after).load(root / "a")
        warned = ["state.weight.max_exp_avg_sq'" in str(warning.message) for warning in caught]
        assert any(warned) == (dist.get_rank() == 0), caught
        assert leaves(after[1].state_dict()) == leaves(before[1].state_dict())
        train_on_noise(*after, 2, 3)
    train_on_noise(*before, 2, 3)
    assert leaves(after[1].state_dict()) == leaves(before[1].state_dict())
    done(f"fewer {sharded}")


def unknown(root: Path) -> None:
    """A tensor that the new optimizer does not have yet, of another shape than the parameter, may be sharded or not."""
    dsq_ckpt.Compressor(*make_pair(GradientWindow, True, 5, 0)).save(root / "a")
    says = "has 'unset' in the optimizer's state of 'bias', which this optimizer does not have, so that nothing tells"
    fails_everywhere(lambda: dsq_ckpt.Compressor(*make_pair(GradientWindow, True, 0, 1)).load(root / "a"), says)
    model, optimizer = make_pair(GradientWindow, True, 5, 0)
    dsq_ckpt.save(TrainingState([model], [optimizer]).collect(), root / "b")
    model, optimizer = make_pair(GradientWindow, True, 0, 1)
    says = "has 'unset' in the state of 'weight' in its 'optimizer', which this optimizer does not have, so that"
    fails_everywhere(lambda: TrainingState([model], [optimizer]).restore(root / "b"), says)
    assert not optimizer.state
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        TrainingState([model], [optimizer]).restore(root / "b", quiet=True)
    warned = ["the optimizer state of 'bias', 'weight' in" in str(warning.message) for warning in caught]
    assert any(warned) == (dist.get_rank() == 0) and not optimizer.state, caught
    done("unknown")


def flat(root: Path) -> None:
    """FSDP1's flat parameters: state that the new optimizer does not have is refused, or named in a warning."""

    def make_flat(kind: Callable[..., Any], steps: int, seed: int, **options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        inner = FullyShardedDataParallel(nn.Linear(64, 64), device_id=torch.device("cpu"))
        model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(64, 64)), device_id=torch.device("cpu"))
        optimizer = kind(model.parameters(), lr=0.01, **options)
        train_on_noise(model, optimizer, steps, seed)
        return model, optimizer

    for kind, options in ((torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})):
        path = root / kind.__name__
        dsq_ckpt.Compressor(*make_flat(kind, 2, 0, **options), "exact").save(path)
        for steps in (0, 2):
            after = make_flat(kind, steps, 1)
            if kind is torch.optim.AdamW:
                says = "has 'max_exp_avg_sq' in the optimizer's state of '0.bias', which this optimizer does not have"
                fails_everywhere(functools.partial(dsq_ckpt.Compressor(*after).load, path), says)
                train_on_noise(*after, 1, 3)
                continue
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                dsq_ckpt.Compressor(*after).load(path)
            texts = [str(warning.message) for warning in caught if "is not loaded" in str(warning.message)]
            assert len(texts) == (dist.get_rank() == 0), texts
            assert all("'0.bias', '0.weight', '1.bias'" in text and "this optimizer has none" in text for text in texts)
    done("flat")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world():
        kinds: tuple[Callable[..., Any], ...] = (
            CountingAdamW, Sharing, HookedSGD, GlobalStateSGD, GradientWindow, RowMoments,
        )
        for kind in kinds:
            for sharded in (False, True):
                check(kind, sharded, Path(sys.argv[1]) / f"{kind.__name__}{sharded}")
        for sharded in (False, True):
            fewer(sharded, Path(sys.argv[1]) / f"fewer{sharded}")
        unknown(Path(sys.argv[1]) / "unknown")
        flat(Path(sys.argv[1]) / "flat")
