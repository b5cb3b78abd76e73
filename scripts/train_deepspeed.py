"""Train the small GPT with DeepSpeed and save compressed checkpoints; every start goes on from `latest` in `--out`.

    deepspeed scripts/train_deepspeed.py --out runs/zero2
    deepspeed scripts/train_deepspeed.py --out runs/zero3 --deepspeed_config configs/deepspeed/zero3.json
    torchrun --nproc-per-node 2 scripts/train_deepspeed.py --out runs/zero2
    torchrun --nproc-per-node 2 -m dsq_ckpt.launch scripts/train_deepspeed.py --out runs/plain --plain-initialize

With `--plain-initialize` it calls `deepspeed.initialize` as any script does, and `dsq_ckpt.launch` does the rest. On
the CPU, set DS_ACCELERATOR=cpu. Rank 0 appends one JSON object per event to `--log-file`:

* `start`: world size, and the tag that the run resumed from, null for a new run;
* `resume`: validation loss right after loading, and the seconds that took;
* `step`: training loss of the global batch;
* `save`: validation loss before saving, seconds, and what `dsq_ckpt.describe` says; with `--compare-deepspeed` also the
  seconds and bytes of DeepSpeed's own tag of the same state, and the seconds of an fsync of it;
* `load`: seconds of loading the first tag or the last, with `--compare-deepspeed` also those of DeepSpeed's own.

Each has the number of finished steps and the seconds since the process began training.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import train_options
from gpt import GPT, GPTConfig, StdlibText, evaluate, loss_sum
from torch import Tensor

import dsq_ckpt.deepspeed

CONFIG = Path(__file__).parent.parent / "configs" / "deepspeed" / "zero2.json"
VALIDATION_ROWS = 12
"""Rows of each validation batch: a multiple of 1, 2, 3 and 4, so that these world sizes get equal shares."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line; every rank gets the same."""
    parser = train_options.parser(
        "Train a small GPT with DeepSpeed, saving compressed checkpoints.",
        "--log-file", "--seed", "--layers", "--width", "--die-at-step", "--die-rank",
    )
    add = parser.add_argument
    add("--deepspeed_config", type=Path, default=CONFIG, help="DeepSpeed's configuration (default: %(default)s)")
    add("--local_rank", type=int, help="which the launcher of DeepSpeed gives; the environment has it too")
    add("--plain-initialize", action="store_true", help="call deepspeed.initialize, for python -m dsq_ckpt.launch")
    add("--validation-batches", type=int, default=8, help="how many the validation loss is computed on; 0: none is")
    add("--compare-deepspeed", action="store_true", help="time DeepSpeed's own tags too, by turns")
    add("--loads", type=int, default=0, help="how often the first and the last tag are loaded, for the time that takes")
    add("--die-in-save", type=int, help="step after which it does so in the save, when a file of data is begun")
    return parser.parse_args()


class FloatGPT(GPT):
    """Gives its logits in fp32, whatever its weights are, so that losses can be compared."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte."""
        return super().forward(tokens).float()


class Training:
    """One run: the engine, its data, and its tags."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.started = time.perf_counter()
        self.turns = 0
        torch.manual_seed(arguments.seed)
        shape = GPTConfig(layers=arguments.layers, width=arguments.width)
        self.text = StdlibText(context=shape.context, seed=arguments.seed)
        model = FloatGPT(shape)
        initialize = deepspeed.initialize if arguments.plain_initialize else dsq_ckpt.deepspeed.initialize
        self.engine = initialize(
            model=model, model_parameters=model.parameters(), config=str(arguments.deepspeed_config)
        )[0]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.engine.global_steps)

    def log(self, event: str, **fields: object) -> None:
        """Print an event on rank 0, and append it to the log."""
        if self.rank:
            return
        seconds = time.perf_counter() - self.started
        record = {"event": event, "step": self.step, "wall_seconds": seconds} | fields
        said = {key: f"{value:.4f}" if isinstance(value, float) else value for key, value in record.items()}
        print(*(f"{key} {value}" for key, value in said.items() if key != "report"), flush=True)
        if self.arguments.log_file:
            with self.arguments.log_file.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def run(self) -> None:
        """Train up to the last step, saving on the way and at the end."""
        arguments = self.arguments
        self.resume()
        while self.step < arguments.steps:
            self.log("step", loss=self.train_step())
            if self.step % arguments.save_every == 0 or self.step == arguments.steps:
                self.save()
        for step in (arguments.save_every, arguments.steps):
            for _ in range(arguments.loads):
                self.load_again(step)

    def resume(self) -> None:
        """Continue from the tag that `latest` names, if there is one."""
        out = str(self.arguments.out)
        begun = time.perf_counter()
        path = self.engine.load_checkpoint(out)[0] if Path(out, "latest").exists() else None
        seconds = time.perf_counter() - begun
        self.log("start", world=self.world, resumed_from=path)
        if path is not None:
            self.log("resume", validation_loss=self.validation_loss(), load_seconds=seconds)

    def train_step(self) -> float:
        """Take one optimizer step and return the mean training loss of the global batch."""
        engine, number = self.engine, self.step
        parts = engine.gradient_accumulation_steps()
        batch = engine.train_micro_batch_size_per_gpu() * self.world
        total = torch.zeros(())
        for part in range(parts):
            inputs, targets = self.text.batch(number * parts + part, self.rank, self.world, batch)
            loss = loss_sum(engine, inputs.to(engine.device), targets.to(engine.device)) / targets.numel()
            if self.arguments.die_at_step == number + 1 and self.arguments.die_rank == self.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.backward(loss)
            engine.step()
            total += loss.detach().cpu() / parts
        return self.mean_over_ranks(total)

    def validation_loss(self) -> float | None:
        """Return the loss on the validation batches; every rank computes its share and gets the same mean."""
        if not self.arguments.validation_batches:
            return None
        count = self.arguments.validation_batches
        batches = self.text.validation_batches(count, self.rank, self.world, VALIDATION_ROWS)
        device = self.engine.device
        self.engine.eval()
        loss = evaluate(self.engine, ((inputs.to(device), targets.to(device)) for inputs, targets in batches))
        self.engine.train()
        return self.mean_over_ranks(torch.tensor(loss, dtype=torch.float64))

    def mean_over_ranks(self, value: Tensor) -> float:
        """Return the mean of every rank's `value`."""
        summed = value.to(self.engine.device)
        dist.all_reduce(summed)
        return float(summed.item()) / self.world

    @property
    def probe(self) -> Path:
        """The directory of DeepSpeed's own tags that are compared with, of which the last is kept."""
        return self.arguments.out.with_name(f"{self.arguments.out.name}-probe")

    def save(self) -> None:
        """Save a tag named after the step, and DeepSpeed's own of the same state where that was asked for."""
        arguments, engine, step = self.arguments, self.engine, self.step
        tag = arguments.out / f"global_step{step}"
        validation_loss = self.validation_loss()
        if arguments.die_in_save == step and arguments.die_rank == self.rank:
            threading.Thread(target=die_once_writing, args=(tag,), daemon=True).start()
        figures: dict[str, Any] = self.timed_both(
            lambda: engine.save_checkpoint(str(arguments.out), client_state={"finished": step}),
            lambda: engine.save_checkpoint(
                str(self.probe), tag=tag.name, client_state={"finished": step}, save_latest=False
            ),
        )
        own = sorted(self.probe.glob(f"{tag.name}/*.pt"))
        if own:
            figures["own_bytes"] = sum(file.stat().st_size for file in own)
            figures["own_fsync_seconds"] = self.timed(lambda: to_disk(own[self.rank :: self.world]))
        if self.rank == 0:
            for older in self.probe.glob("global_step*"):
                if older.name != tag.name:
                    shutil.rmtree(older)
            if (tag / "manifest.json").exists():
                figures["report"] = dsq_ckpt.describe(tag)
        self.log("save", validation_loss=validation_loss, **figures)

    def load_again(self, step: int) -> None:
        """Load the tag of a step, for the time that takes."""
        own = f"global_step{self.arguments.steps}"
        seconds = self.timed_both(
            lambda: self.engine.load_checkpoint(str(self.arguments.out), tag=f"global_step{step}"),
            # Not the engine's own method, which has compressed tags checked first.
            lambda: type(self.engine).load_checkpoint(self.engine, str(self.probe), tag=own),
        )
        self.log("load", tag=f"global_step{step}", **seconds)

    def timed_both(self, job: Callable[[], object], own: Callable[[], object]) -> dict[str, float]:
        """Measure the seconds of a job, and of DeepSpeed's own with the same engine if it is to be compared."""
        dsq_engine = self.engine.checkpoint_engine

        def as_deepspeed_does() -> None:
            self.engine.checkpoint_engine = dsq_engine.inner
            try:
                own()
            finally:
                self.engine.checkpoint_engine = dsq_engine

        jobs: list[tuple[str, Callable[[], object]]] = [("seconds", job)]
        if self.arguments.compare_deepspeed:
            jobs.insert(self.turns % 2, ("own_seconds", as_deepspeed_does))  # take turns in going first
        self.turns += 1
        return {name: self.timed(job) for name, job in jobs}

    def timed(self, job: Callable[[], object]) -> float:
        """Return the seconds from the moment all ranks begin `job` until all have ended it."""
        dist.barrier()
        begun = time.perf_counter()
        job()
        dist.barrier()
        return time.perf_counter() - begun


def to_disk(files: Iterable[Path]) -> None:
    """Flush files to the device."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def die_once_writing(tag: Path) -> None:
    """Kill this process as soon as the first file of data is in the directory of a tag."""
    while not any(tag.glob("*.dsq*")):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the training that the command line describes."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    training = Training(arguments)
    training.run()
    dist.barrier()  # the first rank may still measure what the others are done with
    if training.rank == 0:
        shutil.rmtree(training.probe, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # DeepSpeed's hooks of ZeRO-3 abort the interpreter now and then when it ends


if __name__ == "__main__":
    main()
