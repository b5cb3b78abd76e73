"""What the tests of Lightning share: a small model of several layer types, and trainers that print nothing."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from dsq_ckpt.integrations.lightning import DSQCheckpointIO

EXACT = "exact"

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Model(pl.LightningModule):
    """Embedding, norm with buffers, two layers; the loss of a batch depends on its tokens alone."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(96, width)
        self.net = nn.Sequential(nn.Linear(width, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 96))
        self.losses: list[float] = []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(self.embed(batch)), (batch * 7 + 1) % 96)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=100)]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(96), batch_size=16)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(96), batch_size=48)

    test_dataloader = val_dataloader


class Frozen(Model):
    """A frozen layer and a buffer, both of the shapes of trained layers, so that nothing but the module tells."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 96)).requires_grad_(False)
        self.register_buffer("table", torch.randn(96, 64))

    def kept(self) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in self.state_dict().items() if name.startswith(("before", "table"))}


class Stopped(DSQCheckpointIO):
    """Waits within a save until it is told to go on, as a slow disk does."""

    def __init__(self) -> None:
        super().__init__(EXACT)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if checkpoint.get("waits"):
            with self._removals.defer_during_save(Path(path)):
                self.begun.set()
                self.goes_on.wait()
        super().save_checkpoint(checkpoint, path, storage_options)


def seed(value: int) -> None:
    """Seed what training draws from; `seed_everything` prints."""
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def trainer(
    *plugins: Any, epochs: int = 1, callbacks: Any = (), ranks: bool = False, **options: Any
) -> pl.Trainer:
    """A trainer on the CPU; with `ranks`, in the environment of torchrun."""
    return pl.Trainer(
        plugins=[*plugins, *([] if ranks else [LightningEnvironment()])], max_epochs=epochs, callbacks=list(callbacks),
        accelerator="cpu", **{"devices": 1, **options}, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1,
    )


def saving(directory: Path, **options: Any) -> ModelCheckpoint:
    """A callback that saves every epoch."""
    return ModelCheckpoint(dirpath=directory, **options)


def names(directory: Path) -> list[str]:
    """Names in a directory, hidden ones too."""
    return sorted(path.name for path in directory.iterdir())


def damage(checkpoint: Path) -> None:
    """Change a byte in the middle of the largest data file."""
    file = max(checkpoint.glob("*.dsq"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()  # other checkpoints may have links to it
    file.write_bytes(content)


def trained(model: pl.LightningModule, optimizers: list[Any]) -> dict[str, torch.Tensor]:
    """Everything that training changes: weights, buffers, moments."""
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for key, entries in optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{key}.{name}": value for name, value in entries.items()}
    return tensors


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states have the same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
