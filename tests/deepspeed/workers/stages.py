"""Exact checkpoints of every stage: a resumed run is the run itself, also with nothing attached. argv = a directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from common import EXACT, begin, check, end, engine_of, settings, train

from dsq_ckpt.storage.manifest import Manifest

KINDS: dict[str, dict[str, Any]] = {
    "stage 0, fp32": settings(0, bf16=False),
    "stage 0, bf16": settings(0),
    "stage 1": settings(1, accumulate=2),
    "stage 2": settings(2),
    "stage 2, fp32": settings(2, bf16=False),
    "stage 2, round robin": settings(2, round_robin_gradients=True),
    "stage 3": settings(3),
    "stage 3, fp32": settings(3, bf16=False),
    "stage 3, sub-groups": settings(3, sub_group_size=9000, stage3_param_persistence_threshold=100),
    "stage 2, offload": settings(2, cpu_adam=True, offload_optimizer={"device": "cpu"}),
    "stage 3, offload": settings(3, cpu_adam=True, offload_optimizer={"device": "cpu"}),
}


def own_bytes(tag: Path) -> int:
    """Bytes of DeepSpeed's files in a tag."""
    return sum(file.stat().st_size for file in tag.glob("*.pt"))


def main() -> None:
    directory = begin()
    for name, tree in KINDS.items():
        run = directory / name.replace(" ", "_")
        steps = tree["gradient_accumulation_steps"]
        engine = engine_of(tree, EXACT)
        train(engine, 0, 2 * steps)
        engine.save_checkpoint(str(run), client_state={"next": 2 * steps})
        expected = train(engine, 2 * steps, 4 * steps)
        tag = run / "global_step2"
        check(Manifest.read(tag).refinement == "none", f"{name}: a checkpoint of ours")
        # Of 49,000 parameters, 9,409 are frozen, and kept as they are; of the others there is nothing in these files.
        check(own_bytes(tag) < 4 * 9409 + 30_000, f"{name}: DeepSpeed's files hold no weights ({own_bytes(tag)} bytes)")
        for block, how in ((EXACT, "resumed"), (None, "resumed with nothing attached")):
            again = engine_of(tree, block, seed=1)
            path, client = again.load_checkpoint(str(run))
            check(path is not None and client["next"] == 2 * steps, f"{name}: {how}")
            check(train(again, 2 * steps, 4 * steps) == expected, f"{name}: {how}, the same losses to the last bit")
            del again
        del engine
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(run)
    end()


if __name__ == "__main__":
    main()
