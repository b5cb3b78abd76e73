"""Train with DeepSpeed's ZeRO-2; one block of its configuration compresses the tags that it saves.

    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 examples/deepspeed_zero.py --out runs/zero
    torchrun --nproc-per-node 2 examples/deepspeed_zero.py --out runs/zero --steps 60    # resumes at step 40

Without a GPU set DS_ACCELERATOR=cpu. The first start on a machine builds DeepSpeed's extensions, in a minute.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dsq_ckpt.deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsq_checkpoint": {"enabled": True},  # the block; docs/deepspeed.md has its keys
}


def main() -> None:
    """Train, with a tag every 20 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of the tags, shared by all ranks")
    parser.add_argument("--steps", type=int, default=40, help="last step of the run, a multiple of 20")
    parser.add_argument("--local_rank", type=int, help="which DeepSpeed's launcher gives")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))
    engine, _, _, _ = dsq_ckpt.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    tokens = torch.arange(128)

    tag, client_state = engine.load_checkpoint(str(arguments.out))  # (None, None) before the first tag
    first_step = 0 if tag is None else client_state["step"]
    if tag is not None and dist.get_rank() == 0:
        print(f"resumed from {tag} at step {first_step}")

    for step in range(first_step + 1, arguments.steps + 1):
        loss = nn.functional.cross_entropy(engine(tokens).float(), (tokens * 7 + 1) % 128)
        engine.backward(loss)
        engine.step()
        if step % 20 == 0:
            engine.save_checkpoint(str(arguments.out), client_state={"step": step})
            if dist.get_rank() == 0:
                kept = dsq_ckpt.describe(arguments.out / f"global_step{step}")["bytes_kept"]
                print(f"step {step} loss {loss.item():.4f} saved {kept} bytes")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
