"""Train with Hugging Face's Trainer; one line compresses its checkpoints, and Trainer resumes from them.

    python examples/hf_trainer.py --out runs/trainer               # trains to step 20
    python examples/hf_trainer.py --out runs/trainer --steps 30    # resumes at step 20
    torchrun --nproc-per-node 2 examples/hf_trainer.py --out runs/ddp

The trained model is written for `from_pretrained` as always, to the directory `final`.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import dsq_ckpt
from dsq_ckpt.integrations import huggingface


class Counting(Dataset):
    """Rows of numbers that count up, each by a step of its own."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return 400

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Return a row, and the same as what is to be predicted."""
        row = (torch.arange(32) * (1 + number % 7) + number) % 128
        return {"input_ids": row, "labels": row}


def main() -> None:
    """Train, with a checkpoint every 10 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of the run, shared by all ranks")
    parser.add_argument("--steps", type=int, default=20, help="last step of the run, a multiple of 10")
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=str(options.out), max_steps=options.steps, per_device_train_batch_size=4, learning_rate=1e-3,
        save_steps=10, save_total_limit=3, logging_steps=10, report_to=[], disable_tqdm=True, use_cpu=True,
    )
    shape = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=Counting())
    huggingface.attach(trainer)  # the line; config=... as of dsq_ckpt.save

    newest = get_last_checkpoint(str(options.out)) if options.out.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    trainer.save_model(str(options.out / "final"))

    if trainer.is_world_process_zero():
        for checkpoint in sorted(options.out.glob("checkpoint-*")):
            kept = dsq_ckpt.describe(checkpoint)["bytes_kept"]
            print(f"{checkpoint.name} {kept} bytes{', from which it resumed' if str(checkpoint) == newest else ''}")


if __name__ == "__main__":
    main()
