"""Resumes with and without `attach`, each at step 10: argv = examples/hf_trainer.py."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from dsq_ckpt.integrations import huggingface

spec = importlib.util.spec_from_file_location("example", sys.argv[1])
assert spec is not None and spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


class Seen(TrainerCallback):
    """The optimizer and the schedule, as the first step finds them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.rate: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        optimizer = given["optimizer"]
        self.rate = given["lr_scheduler"].last_epoch, [group["lr"] for group in optimizer.param_groups]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.tensors = [*parameters, *(value for weight in parameters for value in optimizer.state[weight].values())]
        self.tensors = [value.detach().clone() for value in self.tensors]
        control.should_training_stop = True


def resumed(attached: bool, checkpoint: str) -> Seen:
    """Begin to train from a checkpoint."""
    arguments = TrainingArguments(
        output_dir="again", max_steps=20, per_device_train_batch_size=4, learning_rate=1e-3, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True,
    )
    shape = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    seen = Seen()
    trainer = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=example.Counting(), callbacks=[seen])
    if attached:
        huggingface.attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    return seen


compressed, plain = resumed(True, "run/checkpoint-10"), resumed(False, "plain/checkpoint-10")
assert compressed.rate == plain.rate and plain.rate[0] == 10, (compressed.rate, plain.rate)
assert len(plain.tensors) == len(compressed.tensors) > 80, len(plain.tensors)
assert all(torch.equal(a, b) for a, b in zip(compressed.tensors, plain.tensors, strict=True))
print("ok resumed alike")
