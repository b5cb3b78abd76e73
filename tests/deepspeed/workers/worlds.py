"""Another number of ranks after a restart. argv = a directory, a step: save, again or universal."""

from __future__ import annotations

import sys
import warnings

import deepspeed
import torch.distributed as dist
from common import LOSSY, begin, check, end, engine_of, settings, train

from dsq_ckpt.quantization import restored_values
from dsq_ckpt.storage.manifest import Manifest


def main() -> None:
    directory, step = begin(), sys.argv[2]
    for stage in (0, 2):
        run = directory / str(stage)
        tree = settings(stage)
        if step == "universal":
            tree["checkpoint"] = {"load_universal": True}
        if step == "universal" and stage == 0:
            continue
        engine = engine_of(tree, LOSSY, seed=dist.get_world_size())
        if step == "save":
            train(engine, 0, 3)
            engine.save_checkpoint(str(run))
            continue
        if step == "again" and stage == 2:
            continue  # DeepSpeed refuses that without a universal checkpoint
        tag = "universal" if step == "universal" else None
        path, _ = engine.load_checkpoint(str(run), tag=tag)
        check(restored_values.load_counts().with_moments == 1, f"stage {stage}: moments are where a restore put them")
        losses = train(engine, 3, 5)
        check(path is not None and max(losses) < 5.5, f"stage {stage}: goes on with {dist.get_world_size()}: {losses}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.save_checkpoint(str(run), tag="after")
        manifest = Manifest.read(run / "after")
        # Stage 0 stores whole parameters, whatever the number of ranks; partitions are others than they were.
        check(manifest.depth == (1 if stage == 0 else 0), f"stage {stage}: depth {manifest.depth} after the restart")
        check(manifest.ranks == dist.get_world_size(), f"stage {stage}: written by all")
    end()


if __name__ == "__main__":
    deepspeed.logger.setLevel("WARNING")
    main()
