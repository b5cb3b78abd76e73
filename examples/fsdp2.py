"""Train under FSDP2 with `torch.distributed.checkpoint`; a restart may use another number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py --out runs/fsdp2               # trains to step 40
    torchrun --nproc-per-node 3 examples/fsdp2.py --out runs/fsdp2 --steps 60    # resumes at step 40
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq_ckpt


def main() -> None:
    """Train, with a checkpoint every 20 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoints, shared by all ranks")
    parser.add_argument("--steps", type=int, default=40, help="last step of the run, a multiple of 20")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(128)
    first_step = 0

    newest = dsq_ckpt.latest(arguments.out)  # None before the first checkpoint
    if newest is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)  # with moments, also before the first step
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(newest))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first_step = state["step"]
        if rank == 0:
            print(f"resumed from {newest} at step {first_step} on {world} ranks")

    for step in range(first_step + 1, arguments.steps + 1):
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 128)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            path = arguments.out / f"step-{step:06d}"
            dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(path, model=model))
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} saved {dsq_ckpt.describe(path)['bytes_kept']} bytes")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
