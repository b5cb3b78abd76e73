"""Hugging Face's Trainer, which knows nothing of us: argv = DeepSpeed's JSON, output directory, last step.

Resumes from the newest checkpoint if there is one. Run by `python -m dsq_ckpt.launch`. Says the loss of each step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

WORDS = 211


class Counting(Dataset):
    """Rows that count up, each by a step of its own."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(32) * (1 + number % 7) + number) % WORDS
        return {"input_ids": row, "labels": row}


class Says(TrainerCallback):
    """Prints what is logged, on one rank."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss'])!r}", flush=True)


def main() -> None:
    config, output, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    newest = get_last_checkpoint(str(output)) if output.is_dir() else None
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(output), deepspeed=config, per_device_train_batch_size=4, max_steps=last, save_strategy="steps",
        save_steps=10, save_total_limit=2, logging_steps=1, learning_rate=1e-3, lr_scheduler_type="linear",
        warmup_steps=2, bf16=True, report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
    )
    shape = GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=48, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    trainer = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=Counting(), callbacks=[Says()])
    trainer.train(resume_from_checkpoint=newest)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # ZeRO-3 may abort when the interpreter ends


if __name__ == "__main__":
    main()
