"""Train in a loop of your own with Accelerate; one line compresses what `save_state` writes.

    python examples/accelerate_loop.py --out runs/accelerate               # trains to step 40
    python examples/accelerate_loop.py --out runs/accelerate --steps 60    # resumes at step 40
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

import dsq_ckpt
from dsq_ckpt.integrations.accelerate import attach

EVERY = 20


def main() -> None:
    """Train, with a checkpoint every 20 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of the run, shared by all ranks")
    parser.add_argument("--steps", type=int, default=40, help="last step of the run, a multiple of 20")
    arguments = parser.parse_args()

    newest = dsq_ckpt.latest(arguments.out / "checkpoints")  # None before the first checkpoint
    done = 0 if newest is None else 1 + int(Path(newest).name.partition("_")[2])
    project = ProjectConfiguration(
        project_dir=str(arguments.out), automatic_checkpoint_naming=True, total_limit=3, iteration=done
    )
    accelerator = attach(Accelerator(cpu=True, project_config=project))  # the line
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.arange(128)
    if newest is not None:
        accelerator.load_state(newest)
        accelerator.print(f"resumed from {newest} at step {done * EVERY}")

    for step in range(done * EVERY + 1, arguments.steps + 1):
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 128)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            path = accelerator.save_state()
            accelerator.print(f"step {step} loss {loss.item():.4f} {dsq_ckpt.describe(path)['bytes_kept']} bytes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
