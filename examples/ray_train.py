"""Train with Ray Train on two workers, which save together into the directory of the run; Ray keeps the newest two.

    python examples/ray_train.py --out runs/ray               # trains to step 40
    python examples/ray_train.py --out runs/ray --steps 60    # resumes at step 40
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dsq_ckpt


def train(settings: dict[str, Any]) -> None:
    """Train on one worker, with a checkpoint every 10 steps."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first_step = 0
    if (newest := ray.train.get_checkpoint()) is not None:  # of this run, or of the one that goes on
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dsq_ckpt.load(state, newest.path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first_step = state["step"]

    tokens = torch.arange(128)[rank::world]
    for step in range(first_step + 1, settings["steps"] + 1):
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 128)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            path = Path(settings["run"], f"step-{step:06d}")  # on storage that all workers share
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            dsq_ckpt.save(state, path, overwrite=True, model=model)
            ray.train.report(
                {"loss": loss.item(), "step": step, "first_step": first_step},
                Checkpoint.from_directory(path) if rank == 0 else None,
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is there
            )


def main() -> None:
    """Run two workers, and say where they began."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--steps", type=int, default=40, help="last step of the run, a multiple of 10")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    trainer = TorchTrainer(
        train, train_loop_config={"steps": arguments.steps, "run": str(out)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=out.name, storage_path=str(out.parent), checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None and result.checkpoint is not None
    print(f"resumed at step {result.metrics['first_step']}" if result.metrics["first_step"] else "began at step 0")
    print(f"step {result.metrics['step']} loss {result.metrics['loss']:.4f} saved {Path(result.checkpoint.path).name}")


if __name__ == "__main__":
    main()
