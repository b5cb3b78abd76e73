"""Train under DistributedDataParallel; a `Compressor` searches the smallest checkpoint that keeps the model's quality.

    torchrun --nproc-per-node 2 examples/ddp.py --out runs/ddp               # trains to step 40
    torchrun --nproc-per-node 2 examples/ddp.py --out runs/ddp --steps 60    # resumes at step 40
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dsq_ckpt


def main() -> None:
    """Train, with a checkpoint every 20 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoints, shared by all ranks")
    parser.add_argument("--steps", type=int, default=40, help="last step of the run, a multiple of 20")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(128)
    targets = (tokens * 7 + 1) % 128

    def evaluate() -> float:
        """Return the loss on fixed batches: the same number for the same weights. All ranks call it together."""
        with torch.no_grad():
            return float(nn.functional.cross_entropy(inner(tokens), targets))

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate)
    first_step = 0
    newest = dsq_ckpt.latest(arguments.out)  # None before the first checkpoint
    if newest is not None:
        first_step = compressor.load(newest, extra={"step": 0})["step"]
        if rank == 0:
            print(f"resumed from {newest} at step {first_step}, loss {evaluate():.4f}")

    for step in range(first_step + 1, arguments.steps + 1):
        rows = slice(rank, None, world)  # every rank trains on its share of the batch
        nn.functional.cross_entropy(model(tokens[rows]), targets[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            result = compressor.save(arguments.out / f"step-{step:06d}", extra={"step": step})
            if rank == 0:
                print(f"step {step} loss {evaluate():.4f} saved {result}")

    compressor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
