"""The training of scripts/train_multinode.py, observed, and on one host stopped in the middle of a save.

Environment: STALL_AT_STEP, set on one host only: the save of this step writes its shard and gets no further; a file
`stalled` then appears beside the logs, which are on the host's own storage. On every rank `weights-RANK.pt` tells what
a resume loaded, and the log how the run failed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from dsq_ckpt.storage.shard import ShardWriter

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
from train_multinode import Run, main


def whole(tree: Any) -> Any:
    """A state dict with all tensors whole; collective."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return tree.full_tensor() if isinstance(tree, DTensor) else tree


class Observed(Run):
    def resume(self) -> None:
        super().resume()
        if self.step:
            torch.save(whole(self.state()), self.arguments.log_dir / f"weights-{self.rank}.pt")

    def save(self) -> None:
        if os.environ.get("STALL_AT_STEP") != str(self.step):
            super().save()
            return

        def stall(*_: Any) -> None:
            (self.arguments.log_dir / "stalled").touch()
            time.sleep(600)

        with mock.patch.object(ShardWriter, "finish", stall):
            super().save()

    def train(self) -> None:
        try:
            super().train()
        except BaseException as error:
            self.log("failed", error=f"{type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    main(Observed)
