"""Train the small GPT with FSDP2 and save compressed checkpoints; run it under torchrun.

    torchrun --standalone --nproc-per-node 2 scripts/train_fsdp.py --out runs/gpt
    torchrun --standalone --nproc-per-node 3 scripts/train_fsdp.py --out runs/gpt --resume

It uses NCCL when every local rank has a GPU of its own, else gloo on the CPU. Rank 0 appends one JSON object
per event to `--log-file` (torchrun would take a plain `--log` for an abbreviation of its own options):

* `start`: world size, device, and the checkpoint that the run resumed from, null for a new run;
* `resume`: validation loss right after loading, and the seconds it took;
* `step`: training loss of the global batch;
* `evaluate`: validation loss;
* `save`: validation loss before saving, seconds, seconds of a plain `dcp.save` with `--compare-dcp`, and what
  `dsq_ckpt.describe` says.

Each has the number of finished steps and the seconds since the process began training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train_options
from gpt import GPT, GPTConfig, StdlibText, evaluate, loss_sum
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import dsq_ckpt

LEARNING_RATE = 1e-3
WARMUP_STEPS = 40
CLIP_NORM = 1.0
VALIDATION_BATCHES = 8
VALIDATION_ROWS = 12
"""Rows of each validation batch: a multiple of 1, 2, 3 and 4, so that these world sizes get equal shares."""
TIMEOUT = timedelta(seconds=120)
"""How long a collective waits for a rank that died, if its connection does not close first."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line; every rank gets the same."""
    parser = train_options.parser(
        "Train a small GPT with FSDP2, saving compressed checkpoints.",
        "--log-file", "--batch-size", "--seed", "--die-at-step", "--die-rank",
    )
    add = parser.add_argument
    add("--eval-every", type=int, default=100, help="steps between validation losses")
    add("--resume", action="store_true", help="start from the newest complete checkpoint in --out")
    add("--base-only", action="store_true", help="resume without the refinement layer, as from old history")
    add("--writer", choices=("dsq", "dcp"), default="dsq", help="compressed or plain checkpoints")
    add("--config", type=Path, help="configuration of dsq_ckpt, its own defaults if not given")
    add("--compare-dcp", action="store_true", help="at each save also time a plain dcp.save")
    arguments = parser.parse_args()
    if arguments.writer == "dcp" and (arguments.config or arguments.base_only):
        parser.error("--config and --base-only are for --writer dsq")
    if arguments.base_only and not arguments.resume:
        parser.error("--base-only says how to --resume")
    return arguments


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine down to a tenth of the peak at the last step."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


class Training:
    """One run: the sharded model, its optimizer, its data, and its checkpoints."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments = arguments
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.started = time.perf_counter()
        self.saves = 0
        self.step = 0
        config = GPTConfig()
        self.text = StdlibText(context=config.context, seed=arguments.seed)
        torch.manual_seed(arguments.seed)
        self.model = GPT(config).to(device)
        mesh = init_device_mesh(device.type, (self.world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def log(self, event: str, **fields: object) -> None:
        """Append one event to the log, on rank 0 alone."""
        if self.rank == 0 and self.arguments.log_file:
            seconds = time.perf_counter() - self.started
            record = {"event": event, "step": self.step, "wall_seconds": seconds} | fields
            with self.arguments.log_file.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def state(self) -> dict[str, Any]:
        """Return the state dict of model, optimizer and progress; batches are a function of the step."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": {"step": torch.tensor(self.step)}}

    def resume(self) -> None:
        """Continue from the newest complete checkpoint in the run directory."""
        path = newest(self.arguments.writer, self.arguments.out)
        if path is None:
            raise FileNotFoundError(f"--resume: no complete checkpoint in {self.arguments.out}")
        state = self.state()
        loading = time.perf_counter()
        if self.arguments.writer == "dsq":
            dsq_ckpt.load(state, path, refinement=False if self.arguments.base_only else "auto")
        else:
            dcp.load(state, checkpoint_id=path)
        seconds = time.perf_counter() - loading
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(state["progress"]["step"])
        self.log("start", world=self.world, device=str(self.device), resumed_from=path)
        self.log("resume", validation_loss=self.validation_loss(), load_seconds=seconds)

    def run(self) -> None:
        """Train up to the last step, saving on the way and at the end."""
        arguments = self.arguments
        if arguments.resume:
            self.resume()
        else:
            self.log("start", world=self.world, device=str(self.device), resumed_from=None)
        while self.step < arguments.steps:
            loss = self.train_step()
            self.step += 1
            self.log("step", loss=loss)
            if self.step % arguments.save_every == 0 or self.step == arguments.steps:
                self.save()
            elif self.step % arguments.eval_every == 0:
                self.log("evaluate", validation_loss=self.validation_loss())

    def train_step(self) -> float:
        """Take one optimizer step and return the mean training loss of the global batch."""
        arguments = self.arguments
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, arguments.steps)
        inputs, targets = self.text.batch(self.step, self.rank, self.world, arguments.batch_size)
        count = arguments.batch_size * self.text.context
        share = loss_sum(self.model, inputs.to(self.device), targets.to(self.device)) / count
        if arguments.die_at_step == self.step + 1 and arguments.die_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.zero_grad()
        (share * self.world).backward()  # FSDP averages gradients over ranks; shares of the loss add up
        clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return self.sum_over_ranks(share.detach())

    def validation_loss(self) -> float:
        """Return the loss on the validation batches; every rank computes its share and gets the same mean."""
        batches = self.text.validation_batches(VALIDATION_BATCHES, self.rank, self.world, VALIDATION_ROWS)
        shares = [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in batches]
        rows = sum(len(inputs) for inputs, _ in shares)
        mean = evaluate(self.model, shares) * rows / (VALIDATION_BATCHES * VALIDATION_ROWS)
        return self.sum_over_ranks(torch.tensor(mean, dtype=torch.float64, device=self.device))

    def sum_over_ranks(self, value: Tensor) -> float:
        """Return the sum of every rank's `value`."""
        dist.all_reduce(value)
        return value.item()

    def save(self) -> None:
        """Save a checkpoint named after the step, timing a plain `dcp.save` too where that was asked for."""
        arguments = self.arguments
        validation_loss = self.validation_loss()
        state = self.state()
        path = arguments.out / f"step-{self.step:06d}"
        probe = arguments.out / ".dcp-probe"

        def save_here() -> None:
            if arguments.writer == "dsq":
                dsq_ckpt.save(state, str(path), config=arguments.config, model=self.model)
            else:
                dcp.save(state, checkpoint_id=path)

        def save_probe() -> None:
            dcp.save(state, checkpoint_id=probe)

        jobs: list[tuple[str, Callable[[], None]]] = [("seconds", save_here)]
        if arguments.compare_dcp:
            jobs.insert(self.saves % 2, ("dcp_seconds", save_probe))  # take turns in going first
        times = {name: self.timed(job) for name, job in jobs}
        if self.rank == 0:
            shutil.rmtree(probe, ignore_errors=True)
            report = dsq_ckpt.describe(str(path)) if arguments.writer == "dsq" else None
            self.log("save", validation_loss=validation_loss, report=report, **times)
        dist.barrier()
        self.saves += 1

    def timed(self, job: Callable[[], None]) -> float:
        """Return the seconds from the moment all ranks begin `job` until all have ended it."""
        dist.barrier()
        begun = time.perf_counter()
        job()
        dist.barrier()
        return time.perf_counter() - begun


def newest(writer: str, out: Path) -> str | None:
    """Return the path of the newest complete checkpoint in `out`, or None."""
    if writer == "dsq":
        return dsq_ckpt.latest(str(out))
    complete = sorted(path.parent for path in out.glob("step-*/.metadata"))
    return str(complete[-1]) if complete else None


def main() -> None:
    """Run the training that the command line describes."""
    arguments = parse_arguments()
    device = train_options.init_processes(TIMEOUT)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        Training(arguments, device).run()
        # gloo's threads free the tensors of a collective a moment after its end; they need the interpreter for
        # that, and abort a process that is exiting (pytorch/pytorch#190489).
        dist.barrier()
        time.sleep(0.5)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
