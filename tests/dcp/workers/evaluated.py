"""FSDP2, evaluated under no_grad before a state dict is set: argv = an empty directory.

The root keeps gathered parameters then. README's snippet, which reshards, and `Compressor` work all the same.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from harness import done, world
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

import dsq_ckpt

README = (Path(__file__).parents[3] / "README.md").read_text()
(SNIPPET,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "reshard" in block)


def main() -> None:
    with world():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()

        def evaluate() -> float:
            with torch.no_grad():
                return float(model(torch.ones(4, 64)).square().mean())

        os.chdir(sys.argv[1])
        before, reshards, after = SNIPPET.partition("for module in model.modules():")
        names = {"model": model, "optimizer": optimizer}
        evaluate()
        exec(before, names)
        evaluate()
        exec(reshards + after, names)
        done("README")
        compressor = dsq_ckpt.Compressor(model, optimizer)
        evaluate()
        compressor.save("run/step-000501")
        metric = evaluate()
        compressor.load("run/step-000501")
        assert abs(evaluate() - metric) < 0.05 * metric
        done("Compressor")
        for number in range(2):  # gathered parameters are looked at, and freed by the next step all the same
            state = get_model_state_dict(model)
            evaluate()
            dsq_ckpt.save({"model": state}, f"run/step-00051{number}", model=model)
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
        done("training goes on")
        thin = nn.Conv2d(64, 1, 16, bias=False)
        fully_shard(thin)
        assert not dist.get_rank() or not thin.weight.to_local().numel()

        def evaluate_thin() -> float:
            with torch.no_grad():
                return float(thin(torch.ones(4, 64, 16, 16)).square().mean())

        compressor = dsq_ckpt.Compressor(thin, evaluate=evaluate_thin)
        quality = compressor.save("thin/step-0").quality
        assert quality is not None and quality["satisfied"], quality
        metric = evaluate_thin()
        compressor.load("thin/step-0")
        assert abs(evaluate_thin() - metric) < 0.05 * metric
        done("empty shards")


main()
