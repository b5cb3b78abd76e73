"""Train the small GPT with FSDP2 on any number of hosts; every start goes on from the newest complete checkpoint.

    scripts/launch_multinode.sh scripts/train_multinode.py --out /shared/gpt --log-dir /tmp/gpt-logs

`--out` has to be one directory that all hosts see; `--log-dir` is each host's own. See docs/multinode.md.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_options
from gpt import GPT, GPTConfig, StdlibText, loss_sum
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq_ckpt


def parse_arguments() -> argparse.Namespace:
    """Read the command line; every rank gets the same."""
    parser = train_options.parser(
        "Train a small GPT with FSDP2 on any number of hosts.",
        "--batch-size", "--layers", "--width",
    )
    add = parser.add_argument
    add("--log-dir", type=Path, help="directory of this host's own for a file of JSON lines per rank")
    add("--megabytes", type=float, default=4.0, help="size of the text")
    add("--timeout", type=float, default=600.0, help="seconds that a collective waits for a rank that is gone")
    add("--stop-file", type=Path, help="when it appears, the run is saved and ends; shared by all hosts")
    return parser.parse_args()


class Run:
    """The sharded model, its optimizer, its data, and its checkpoints."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0
        config = GPTConfig(layers=arguments.layers, width=arguments.width)
        self.text = StdlibText(arguments.megabytes, config.context)
        torch.manual_seed(0)
        self.model = GPT(config).to(device)
        mesh = init_device_mesh(device.type, (self.world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def log(self, event: str, **fields: Any) -> None:
        """Append one event to this rank's log, on this host."""
        if self.arguments.log_dir is not None:
            record = {"event": event, "time": time.time(), "rank": self.rank, "world": self.world, "step": self.step}
            with (self.arguments.log_dir / f"rank-{self.rank}.jsonl").open("a") as file:
                file.write(json.dumps(record | fields) + "\n")

    def state(self) -> dict[str, Any]:
        """Return the state dict of model, optimizer and progress; batches are a function of the step."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": {"step": torch.tensor(self.step)}}

    def resume(self) -> None:
        """Continue from the newest complete checkpoint, if there is one."""
        # One rank looks for all of them: directories are not equally fresh on all clients of a network file system,
        # and ranks that disagreed would wait for each other in different collectives.
        newest = [dsq_ckpt.latest(self.arguments.out) if self.rank == 0 else None]
        dist.broadcast_object_list(newest, src=0)
        if newest[0] is not None:
            state = self.state()
            dsq_ckpt.load(state, newest[0])
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            self.step = int(state["progress"]["step"])
        self.log("start", resumed_from=newest[0])

    def save(self) -> None:
        """Save a checkpoint named after the step."""
        # A job that was killed between the commit and its last words does this step again.
        path = self.arguments.out / f"step-{self.step:06d}"
        dsq_ckpt.save(self.state(), path, model=self.model, overwrite=True)
        self.log("save", path=str(path))

    def train_step(self) -> bool:
        """Take one optimizer step; whether some rank was asked to stop."""
        arguments = self.arguments
        inputs, targets = self.text.batch(self.step, self.rank, self.world, arguments.batch_size)
        count = arguments.batch_size * self.text.context
        share = loss_sum(self.model, inputs.to(self.device), targets.to(self.device)) / count
        self.optimizer.zero_grad()
        (share * self.world).backward()  # FSDP averages gradients over ranks; shares of the loss add up
        self.optimizer.step()
        self.step += 1
        asked = arguments.stop_file is not None and arguments.stop_file.exists()
        summed = torch.stack([share.detach(), share.new_tensor(float(asked))])
        dist.all_reduce(summed)  # all ranks stop at the same step
        self.log("step", loss=summed[0].item())
        return bool(summed[1] > 0)

    def train(self) -> None:
        """Train up to the last step, or until asked to stop, saving on the way and at the end."""
        arguments = self.arguments
        self.resume()
        while self.step < arguments.steps:
            stop = self.train_step()
            if stop or self.step % arguments.save_every == 0 or self.step == arguments.steps:
                self.save()
            if stop:
                self.log("stop")
                break


def main(kind: type[Run] = Run) -> None:
    """Run the training that the command line describes."""
    arguments = parse_arguments()
    device = train_options.init_processes(timedelta(seconds=arguments.timeout))
    if arguments.log_dir is not None:
        arguments.log_dir.mkdir(parents=True, exist_ok=True)
    try:
        kind(arguments, device).train()
        dist.barrier()
        time.sleep(0.5)  # gloo's threads must not free the last tensors at exit (pytorch/pytorch#190489)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
