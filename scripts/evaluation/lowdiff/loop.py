"""The training loop that all systems share, and what is measured in it.

The demo's GPT is trained with AdamW, clipping and a schedule, by DDP on one rank: communication hooks run as in a job
of many. Torch has one thread, on one CPU; checkpointing has another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from evaluation import create
from evaluation.lowdiff.base import System, Without, live_tensors


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        workload: Name of a language workload.
        batch: Rows of a batch; None: the workload's own.
        seed: Of weights and batches.
        compressor: Of gradients, as `dsq_ckpt.lowdiff` names it; "none": they are not compressed.
    """

    workload: str = "gpt"
    batch: int | None = None
    seed: int = 0
    compressor: str = "none"


class Training:
    """A model in training; batches and learning rates are functions of the step and the seed alone.

    Args:
        setting: What is trained.

    Attributes:
        model: The model, in DDP.
        optimizer: AdamW.
        done: Steps that are done.
    """

    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(1)
        if not dist.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works where the host cannot resolve its own name
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._workload = create(setting.workload, setting.seed)
        self._batch = setting.batch or self._workload.plan.batch_size
        self.model = DistributedDataParallel(self._workload.model)
        self.optimizer = self._workload.optimizer
        plan = self._workload.plan
        self.scheduler = LambdaLR(self.optimizer, lambda step: plan.rate_at(min(step, plan.steps)) / plan.rate)
        self.done = 0
        self.compressor: Any = None
        if setting.compressor != "none":
            from dsq_ckpt.lowdiff.compressors import gradient_compressor

            self.compressor = gradient_compressor(setting.compressor)
            self.compressor.attach(self.model)

    def leave_compression(self) -> None:
        """Leave the compression of gradients to the checkpointing system from now on."""
        if self.compressor is not None:
            self.compressor.detach()
            self.compressor = None

    def step(self) -> None:
        """Make one step."""
        inputs, targets = self._rows(self.done)
        logits = self.model(inputs)
        nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        if self._workload.plan.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._workload.plan.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.compressor is not None:
            self.compressor.take()  # nobody asks for it
        self.done += 1

    def go_to(self, step: int) -> None:
        """Set the step whose state model and optimizer now have."""
        self.done = step
        self.scheduler.last_epoch = step
        for group, base, factor in zip(
            self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(step)

    def state_bytes(self) -> int:
        """Return the bytes of weights and moments in fp32, the content of a full checkpoint."""
        return sum(tensor.nbytes for tensor in live_tensors(self.model, self.optimizer).values())

    def _rows(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = getattr(self._workload, "text", None)
        if text is None:
            raise ValueError(f"{self._workload.name} is no language workload")
        inputs, targets = text.batch(step, 0, 1, self._batch)
        return inputs, targets


@dataclass
class Block:
    """Some consecutive steps of one system.

    Attributes:
        seconds: Of each, the system's part included.
        stalls: Of these, what was spent in the system on the training thread, between steps and before updates.
    """

    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)


@runtime_checkable
class TellsTime(Protocol):
    """A system that says itself how many seconds training has spent in it, since hooks cannot be put around its own."""

    @property
    def spent(self) -> float: ...


class Loop:
    """A training, and its system of checkpointing once there is one.

    Args:
        training: At the step it begins with.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.system: System = Without()
        self._waited = self._before = 0.0

    def begin(self, system: System) -> None:
        """Start to checkpoint."""
        # Hooks run in the order in which they were registered: the system's own are between these two.
        self.training.optimizer.register_step_pre_hook(self._start)
        system.prepare(self.training.model, self.training.optimizer, self.training.done)
        self.training.optimizer.register_step_pre_hook(self._stop)
        self.system = system

    def run(self, steps: int, lead: int = 0, each: Callable[[], None] = lambda: None) -> Block:
        """Train.

        Args:
            steps: That are timed.
            lead: Steps before them. They fill queues and caches, so that the timed ones show the steady state and
                leave as much work behind as they found.
            each: Called after every step, outside of what is timed.
        """
        block = Block()
        for number in range(lead + steps):
            spent = self._spent()
            started, self._waited = time.perf_counter(), 0.0
            self.training.step()
            stepped = time.perf_counter()
            self.system.after_step(self.training.done)
            ended = time.perf_counter()
            if number >= lead:
                block.seconds.append(ended - started)
                seen = self._waited + ended - stepped
                block.stalls.append(seen if spent is None else (self._spent() or 0.0) - spent)
            each()
        return block

    def _spent(self) -> float | None:
        return self.system.spent if isinstance(self.system, TellsTime) else None

    def _start(self, *_: Any) -> None:
        self._before = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self._waited = time.perf_counter() - self._before
