"""One rank runs out of memory anywhere in a save: between collectives, and while it writes; argv = an empty directory.

All ranks get an error that names the rank and its cause, nothing is left, and the next save works; in each way to save.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import broken, state_at
from harness import done, fails_everywhere, normal, world

import dsq_ckpt
from dsq_ckpt import DSQConfig, DSQStorageWriter
from dsq_ckpt.dcp import writer
from dsq_ckpt.distributed.comm import TorchCommunicator
from dsq_ckpt.engine import chunks, inheritance, pipeline, quantizing
from dsq_ckpt.engine.local import LocalShard, LocalState
from dsq_ckpt.quantization import global_sketch
from dsq_ckpt.quantization.analysis import GlobalSketch
from dsq_ckpt.quantization.chunk import ChunkKey, QuantizingChunk
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.shard import ShardWriter
from tests.helpers.saving import save_parts

QUANTIZING: list[tuple[Any, str]] = [
    (quantizing, "build_global_sketch"), (global_sketch, "choose_scales"), (global_sketch, "sparse_of"),
    (GlobalSketch, "fit"), (GlobalSketch, "worst"), (quantizing, "with_parts_for"), (quantizing, "report"),
    (quantizing, "note_exact"), (chunks, "_quantized"), (QuantizingChunk, "block"),
]
WRITING: list[tuple[Any, str]] = [
    (pipeline, "write_rank"), (ShardWriter, "_add_record"), (ShardWriter, "finish"), (inheritance, "link_files"),
]
Save = Callable[[Path], Any]


def check(way: str, save: Save, root: Path, places: list[tuple[Any, str]], rank: int, culprits: set[int]) -> None:
    def exhausted(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    save(root / way / "first")
    for target, name in places:
        for culprit in culprits:
            path = root / way / f"{name}-{culprit}"
            with broken(rank == culprit, target, name, exhausted):
                fails_everywhere(lambda: save(path), "MemoryError: no room", culprit)  # noqa: B023
            dist.barrier()
            assert not path.exists(), "nothing is left"
        save(root / way / name)
        assert Manifest.read(root / way / name).files
    done(way)


def ways(rank: int, size: int) -> dict[str, Save]:
    model = torch.nn.Linear(80, 80)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(80)).sum().backward()
    optimizer.step()
    compressor = dsq_ckpt.Compressor(model, optimizer)

    def collectively(path: Path) -> None:
        value = normal(90, 64, seed=rank)
        key = ChunkKey(f"own{rank}.weight", (0, 0), (90, 64))
        part = LocalShard(key, key.shape, value.dtype, lambda: value)
        state = LocalState([part], nesting={key.fqn: (key.fqn,)})
        save_parts(path, lambda: state, DSQConfig(), TorchCommunicator())

    def in_background(stage: str) -> Save:
        config = {"storage": {"stage": stage}}
        return lambda path: dsq_ckpt.async_save(state_at(2, rank, size), path, config=config).result(timeout=240)

    return {
        "dcp": lambda path: dcp.save(state_at(2, rank, size), storage_writer=DSQStorageWriter(path)),
        "save": lambda path: dsq_ckpt.save(state_at(2, rank, size), path),
        "collectively": collectively, "copy": in_background("copy"), "quantize": in_background("quantize"),
        "compressor": compressor.save,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, ranks):
        for kind, how in ways(me, ranks).items():
            of_dcp = [] if kind == "collectively" else [(writer, "write_results")]
            alone = kind == "compressor"  # rank 0 writes all of a small state that ranks have copies of
            check(kind, how, Path(sys.argv[1]), [*QUANTIZING, *WRITING, *of_dcp], me, {0} if alone else {0, ranks - 1})
