"""Train with Lightning; `DSQCheckpointIO` compresses the checkpoints that `ModelCheckpoint` keeps.

    python examples/lightning_fit.py --out runs/lightning                # trains for 4 epochs
    python examples/lightning_fit.py --out runs/lightning --epochs 6     # resumes after epoch 4
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dsq_ckpt.integrations.lightning import DSQCheckpointIO, checkpoint_file


class Model(LightningModule):
    """Learns a permutation of 128 tokens."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Embedding(128, width), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 128))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self.net(tokens), (tokens * 7 + 1) % 128)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer that knows the names of its parameters."""
        return torch.optim.AdamW(self.named_parameters(), lr=1e-3)


def main() -> None:
    """Train, with a checkpoint every epoch: the two with the smallest loss and the last one are kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--epochs", type=int, default=4, help="last epoch of the run")
    arguments = parser.parse_args()

    seed_everything(0)
    model = Model()
    keep = ModelCheckpoint(arguments.out, filename="{epoch}", monitor="loss", save_top_k=2, save_last=True)
    trainer = Trainer(
        max_epochs=arguments.epochs, accelerator="cpu", callbacks=[keep], plugins=[DSQCheckpointIO()], logger=False
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.arange(128)), batch_size=16), ckpt_path="last")
    print(f"epoch {trainer.current_epoch} step {trainer.global_step} loss {trainer.callback_metrics['loss']:.4f}")
    print("kept:", *sorted(path.name for path in arguments.out.iterdir()))

    best = Model.load_from_checkpoint(checkpoint_file(keep.best_model_path))
    print(f"the best, {Path(keep.best_model_path).name}, has {sum(p.numel() for p in best.parameters())} parameters")


if __name__ == "__main__":
    main()
