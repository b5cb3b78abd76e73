"""Checkpoints of engines on a GPU, in bf16 and fp16, by every stage: a resumed run is the run that was saved.

    torchrun --nproc-per-node 1 on_gpu.py DIRECTORY
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from tests.deepspeed.workers.common import EXACT, LOSSY, check, end, engine_of, settings, train


def main(directory: Path) -> None:
    for stage, precision in itertools.product((0, 1, 2, 3), ("bf16", "fp16")):
        if stage == 0 and precision == "bf16":
            continue  # DeepSpeed keeps no masters there
        tree = settings(stage, bf16=precision == "bf16")
        if precision == "fp16":
            tree["fp16"] = {"enabled": True, "initial_scale_power": 8}
        for name, block in (("exact", EXACT), ("lossy", LOSSY)):
            run, where = directory / f"{stage}-{precision}-{name}", f"stage {stage}, {precision}, {name}"
            engine = engine_of(tree, block)
            check(engine.device.type == "cuda", f"{where}: {engine.device}")
            for number in range(3):
                train(engine, 4 * number, 4 * number + 4)
                engine.save_checkpoint(str(run), tag=f"step-{number}")
            expected = train(engine, 12, 16)
            engine.destroy()
            other = engine_of(tree, block, seed=1)
            other.load_checkpoint(str(run))
            losses = train(other, 12, 16)
            other.destroy()
            if name == "exact":
                check(losses == expected, f"{where}: {losses} instead of {expected}")
            else:
                near = torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0.05)
                check(near, f"{where}: {losses}, {expected} expected")
    print("same losses")


main(Path(sys.argv[1]))
end()
