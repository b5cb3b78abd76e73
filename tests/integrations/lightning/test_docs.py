"""The examples of docs/lightning.md run one after the other, as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.deepspeed_processes import python
from tests.helpers.processes import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "lightning.md").read_text(), re.S)
PREAMBLE = """
import torch
from torch.distributed.fsdp import fully_shard

from tests.integrations.lightning.common import Model


class WithLoss(Model):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Sharded(Model):
    def configure_model(self):
        if not hasattr(self.embed, "unshard"):
            fully_shard(self.embed), fully_shard(self.net)


model, sharded_model, Model = WithLoss(), Sharded(), WithLoss
train_loader, val_loader, test_loader = model.train_dataloader(), model.val_dataloader(), model.val_dataloader()
"""


def test_examples(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join([PREAMBLE, *BLOCKS]))
    python("page.py", directory=tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoints", "final.ckpt", "plain.ckpt", "sharded.ckpt"} <= names
    assert (tmp_path / "plain.ckpt").is_file() and (tmp_path / "sharded.ckpt" / "manifest.json").exists()
