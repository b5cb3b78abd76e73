"""What the DeepSpeed workers share: a small model of awkward sizes, engines of every kind, and its training steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import dsq_ckpt
import dsq_ckpt.deepspeed

EXACT = {"system": "exact"}
LOSSY = {"quantize": {"min_elements": 64}, "refinement": {"keep_last": 1}}


class Model(nn.Module):
    """Embedding, norm, biases, a frozen layer and a buffer; no size is a multiple of another."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(97, 33)
        self.l1, self.norm, self.l2 = nn.Linear(33, 301), nn.LayerNorm(301), nn.Linear(301, 77)
        self.head = nn.Linear(77, 97)
        self.frozen = nn.Linear(97, 97, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("places", torch.arange(5.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.head(torch.relu(self.l2(self.norm(torch.relu(self.l1(self.emb(x)))))))
        return nn.functional.cross_entropy((h + 0.1 * self.frozen(h)).float(), y)


def settings(
    stage: int, *, bf16: bool = True, cpu_adam: bool = False, accumulate: int = 1, **zero: Any
) -> dict[str, Any]:
    """A configuration of DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulate, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **zero}, "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {
            "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": not cpu_adam,
        }},
    }


def engine_of(tree: dict[str, Any], block: dict[str, Any] | None, seed: int = 0, **options: Any) -> Any:
    """An engine; with a block, of compressed checkpoints. Matrices and vectors are groups of their own."""
    torch.manual_seed(seed)
    model = Model()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if block is None:
        return deepspeed.initialize(model=model, model_parameters=groups, config=tree)[0]
    whole = {**tree, "dsq_checkpoint": {"enabled": True, **block}}
    return dsq_ckpt.deepspeed.initialize(model=model, model_parameters=groups, config=whole, **options)[0]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one on every rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randint(97, (4,), generator=generator), torch.randint(97, (4,), generator=generator)


def train(engine: Any, first: int, last: int) -> list[float]:
    """Losses of this rank's batches."""
    losses = []
    for number in range(first, last):
        loss = engine(*(part.to(engine.device) for part in batch(number)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check(condition: bool, what: str) -> None:
    """Fail on all ranks, or say on the first one that it holds on all: `[ok]`."""
    outcomes = everywhere(condition)
    if not all(outcomes):
        raise AssertionError(f"{what}: {outcomes}")
    if dist.get_rank() == 0:
        print(f"[ok] {what}", flush=True)


def error_of(call: Any) -> BaseException:
    """What a call raises."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return error
    raise AssertionError("nothing was raised")


def begin() -> Path:
    """Join the other ranks; the directory to write to."""
    deepspeed.init_distributed("gloo", verbose=False)
    return Path(sys.argv[1])


def end() -> None:
    """Leave without the interpreter's exit, in which ZeRO 3 may abort."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
