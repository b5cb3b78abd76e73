"""Train in one process, save in the background, and go on from the newest checkpoint.

    python examples/plain_loop.py --out runs/plain               # trains to step 40
    python examples/plain_loop.py --out runs/plain --steps 60    # resumes at step 40
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dsq_ckpt


def main() -> None:
    """Train, with a checkpoint every 20 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=40, help="last step of the run, a multiple of 20")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(128)
    first_step = 0

    newest = dsq_ckpt.latest(arguments.out)  # None before the first checkpoint
    if newest is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dsq_ckpt.load(state, newest)  # tensors are filled in place, numbers are replaced
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first_step = state["step"]
        print(f"resumed from {newest} at step {first_step}")

    pending = None
    for step in range(first_step + 1, arguments.steps + 1):
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 128)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            if pending is not None:
                print("saved", pending.result())  # raises what the save raised
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            path = arguments.out / f"step-{step:06d}"
            pending = dsq_ckpt.async_save(state, path, model=model)  # training goes on meanwhile
            print(f"step {step} loss {loss.item():.4f}")
    if pending is not None:
        print("saved", pending.result())


if __name__ == "__main__":
    main()
