"""Accelerate alone, which knows nothing of us: argv = DeepSpeed's JSON, a directory.

Run by `python -m dsq_ckpt.launch`. Trains, saves, goes on, goes back and does the same steps again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import nn

from dsq_ckpt.storage.manifest import Manifest


def main() -> None:
    tree, directory = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    del tree["optimizer"], tree["scheduler"]  # they are the script's own
    torch.manual_seed(0)
    plugin = DeepSpeedPlugin(hf_ds_config=tree)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(80, 120), nn.Tanh(), nn.Linear(120, 80))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(torch.randn(64, 80, generator=torch.Generator().manual_seed(1)), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    rows = list(data)

    def train(first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            row = rows[number % len(rows)].bfloat16()
            loss = (model(row).float() - row.float()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    train(0, 6)
    accelerator.save_state(str(directory / "first"))
    expected = train(6, 12)
    accelerator.load_state(str(directory / "first"))
    again = train(6, 12)
    assert all(abs(a / b - 1) < 0.01 for a, b in zip(again, expected, strict=True)), (again, expected)
    accelerator.save_state(str(directory / "second"))
    manifests = [Manifest.read(directory / name / "pytorch_model") for name in ("first", "second")]
    assert [manifest.depth for manifest in manifests] == [0, 1]
    if torch.distributed.get_rank() == 0:
        print("ok accelerate", flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
