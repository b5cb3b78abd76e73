"""What the workers share: a tiny GPT-2 in a Trainer, its whole state, and scenarios that run one after the other."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

from dsq_ckpt.integrations import huggingface
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.new_process import begin_new_process

WORDS = 97


class Counting(Dataset):
    """Rows that count up, each by a step of its own."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(16) * (1 + number % 7) + number) % WORDS
        return {"input_ids": row, "labels": row}


def gpt2(**changed: Any) -> GPT2LMHeadModel:
    """A GPT-2 with dropout, whose output layer is tied to its embedding unless that is changed."""
    set_seed(0)
    shape = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 48, "n_layer": 1, "n_head": 2, "bos_token_id": 1,
             "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**(shape | changed)))


def trainer(
    output: Path, last: int, *, config: Any = "exact", model: Any = None, attached: bool = True, new: bool = True,
    more: dict[str, Any] | None = None, **arguments: Any
) -> Trainer:
    """A trainer for steps up to `last`, with a checkpoint every second one, as in a process of its own if `new`."""
    if new:
        begin_new_process()
    settings = {
        "output_dir": str(output), "max_steps": last, "per_device_train_batch_size": 4, "save_steps": 2,
        "save_total_limit": 2, "logging_steps": 1, "learning_rate": 1e-2, "warmup_steps": 2, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "seed": 0,
    }
    hf_trainer = Trainer(
        gpt2() if model is None else model, TrainingArguments(**(settings | arguments)), train_dataset=Counting(),
        eval_dataset=torch.utils.data.Subset(Counting(), range(4)), **(more or {}),
    )
    hf_trainer.callback_handler.callbacks = [
        callback for callback in hf_trainer.callback_handler.callbacks if type(callback).__name__ != "PrinterCallback"
    ]
    return huggingface.attach(hf_trainer, config) if attached else hf_trainer


def everything(hf_trainer: Trainer) -> dict[str, Any]:
    """Copies of all tensors and numbers that training goes on from; collective if the model is sharded."""
    optimizer = hf_trainer.optimizer.optimizer.state_dict()
    state = {f"model.{name}": value for name, value in hf_trainer.model.state_dict().items()}
    for number, entry in optimizer["state"].items():
        state |= {f"{number}.{name}": value for name, value in entry.items()}
    state = {
        name: value.full_tensor().clone() if isinstance(value, DTensor) else torch.as_tensor(value).clone()
        for name, value in state.items() if value is not None
    }
    losses = [entry["loss"] for entry in hf_trainer.state.log_history if "loss" in entry]
    return {
        **state, "groups": optimizer["param_groups"], "rates": hf_trainer.lr_scheduler.state_dict(), "losses": losses
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two runs are bit-identical."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    unlike = [
        name for name, value in one.items()
        if not (torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])
    ]
    assert not unlike, unlike


def names(output: Path) -> list[str]:
    """The names in a directory, hidden ones too."""
    return sorted(os.listdir(output))


def sound(directory: Path) -> Manifest:
    """The manifest of a checkpoint whose files have all been read and compared with their checksums."""
    with Checkpoint(directory) as checkpoint:
        assert [problem for _, _, problem in checkpoint.verify() if problem] == []
        return checkpoint.manifest


def until(output: Path, target: Path, number: int) -> Path:
    """A copy of a run as it was when checkpoint `number` was its newest."""
    shutil.copytree(output, target)
    for directory in target.glob("checkpoint-*"):
        if int(directory.name.partition("-")[2]) > number:
            shutil.rmtree(directory)
    return target


def run(scenarios: Sequence[Callable[[Path], None]], directory: Path, rank: int = 0) -> None:
    """Run scenarios, each in a directory of its own; say which passed, and why others did not."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    for scenario in scenarios:
        try:
            scenario(directory / scenario.__name__)
        except Exception:
            print(f"failed {scenario.__name__} on rank {rank}:\n{traceback.format_exc()}", flush=True)
            if torch.distributed.is_initialized():
                os._exit(1)  # others wait
        else:
            if rank == 0:
                print("ok", scenario.__name__, flush=True)
    sys.stdout.flush()
