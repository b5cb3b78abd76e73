"""Arguments that differ by rank: argv = an empty directory.

All ranks get one error that says so, soon, and nothing is written; what may differ by rank does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import HANG, done, normal, world
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dsq_ckpt
from dsq_ckpt import DSQStorageReader, DSQStorageWriter
from dsq_ckpt.distributed.comm import TorchCommunicator
from dsq_ckpt.storage.manifest import Manifest

Save = Callable[[Path, Any], object]
EXACT = {"quantize": {"weights": {"method": "exact"}}}


class Planner(DefaultSavePlanner):
    """A planner that the writer does not know."""


def saves(rank: int) -> dict[str, Save]:
    """Each way to save, given a path and a configuration; on all ranks at once."""
    model = torch.nn.Linear(64, 200)
    state = {"shared.weight": normal(200, 64, seed=1), f"own{rank}.weight": normal(90, 64, seed=rank)}

    def compressor(path: Path, config: Any, **options: Any) -> object:
        return dsq_ckpt.Compressor(model, None, config, **options).save(path)

    return {
        "save": lambda path, config: dsq_ckpt.save(state, path, config=config),
        "async_save": lambda path, config: dsq_ckpt.async_save(state, path, config=config).result(),
        "dcp.save": lambda path, config: dcp.save(state, storage_writer=DSQStorageWriter(path, config)),
        "dcp.save of an id": lambda path, config: dcp.save(
            state, checkpoint_id=path, storage_writer=DSQStorageWriter(config=config)
        ),
        "dcp.async_save": lambda path, config: dcp.async_save(
            state, checkpoint_id=path, storage_writer=DSQStorageWriter(config=config)
        ).result(),
        "a planner": lambda path, config: dcp.async_save(
            state, storage_writer=DSQStorageWriter(path, config), planner=Planner()
        ).result(),
        "compressor": compressor,
        "search": lambda path, config: compressor(path, config, evaluate=lambda: float(model.weight.square().mean())),
        "compress": lambda path, config: dsq_ckpt.compress(
            model, path, config=config, communicator=TorchCommunicator()
        ),
    }


def refused(work: Callable[[], object]) -> list[str]:
    """Errors of all ranks, which all come soon; collective."""
    text, began = "", time.monotonic()
    try:
        work()
    except (Exception, dcp.api.CheckpointException) as error:
        text = f"{type(error).__name__}: {error}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (text, time.monotonic() - began))
    assert all(text and took < HANG / 2 for text, took in told), told
    return [text for text, _ in told]


def main() -> None:
    with world() as (rank, size):
        root = Path(sys.argv[1])
        assert size == 3
        for name, save in saves(rank).items():
            told = refused(lambda save=save: save(root / "run" / "1", EXACT if rank == 1 else None))
            says = "quantize.weights.method is 'quantize' on ranks 0, 2, 'exact' on rank 1"
            assert all(says in text for text in told), (name, told)
            target = root / str(rank) / "1"
            told = refused(lambda save=save, target=target: save(target, None))
            says = f"'{root}/0/1' on rank 0, '{root}/1/1' on rank 1, '{root}/2/1' on rank 2"
            assert all("different paths" in text and says in text for text in told), (name, told)
            assert os.listdir(root) == [], (name, os.listdir(root))
            dist.barrier()
        done("configurations and paths")
        for name in ("save", "async_save", "compress"):
            save = saves(rank)[name]
            for path, config in ((root / "1", {"quantise": {}}), (None, None), ("s3://", None)):
                given = (path, config) if rank == 1 else (root / "1", None)
                told = refused(lambda save=save, given=given: save(*given))
                assert told[1].startswith("ConfigError: "), (name, told)
                assert all("rank 1 failed: ConfigError: " in text for text in (told[0], told[2])), (name, told)
                assert os.listdir(root) == []
                dist.barrier()
        told = refused(lambda: saves(rank)["compressor"](root / "1" if rank else "s3://", None))
        assert told[0].startswith("ConfigError: ") and "rank 0 failed: ConfigError: " in told[1], told
        assert os.listdir(root) == []
        done("what is wrong on one rank")
        own = {"threads": 1 + rank, "on_device": rank == 0, "block_elements": 1024 << rank, "zstd_level": 1 + rank}
        for name, save in saves(rank).items():
            save(root / name, {"storage": own})
            assert Manifest.read(root / name).ranks == size
        (root / "link").symlink_to(root) if rank == 0 else None
        dist.barrier()
        for name, save in saves(rank).items():
            save((root / "link" if rank else root) / f"{name} by links", None)
            assert Manifest.read(root / f"{name} by links").ranks == size
        done("what may differ")
        paths = [root / "dcp.save" if rank == 2 else root / "save" for rank in range(size)]
        target = {"shared.weight": torch.zeros(200, 64)}
        for load in (
            lambda: dsq_ckpt.load(target, paths[rank]),
            lambda: dcp.load(target, storage_reader=DSQStorageReader(paths[rank])),
        ):
            told = refused(load)
            assert all("rank 2 would load save" in text and str(paths[0]) in text for text in told), told
            assert not target["shared.weight"].any()
        for name in ("save", "dcp.save"):
            dsq_ckpt.load(target, root / name)
        done("loads of different checkpoints")


main()
