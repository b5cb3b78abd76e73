"""A file of a rank's is damaged after it was written: argv = an empty directory.

Whichever rank reads it, all agree on a keyframe within a few saves, and one of them says why, once.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from harness import depth, done, normal, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt.ancestry import CHECKED_EVERY
from dsq_ckpt.manifest import Manifest


def damaged(run: Path, culprit: int, rank: int, size: int, background: bool) -> None:
    mesh = init_device_mesh("cpu", (size,))
    said: list[str] = []
    for number in range(3 + CHECKED_EVERY):
        if number == 2 and rank == 0:
            [name] = [f.name for f in Manifest.read(run / "0").files if f.name.endswith(f"-{culprit:05d}.dsq")]
            data = bytearray((run / "0" / name).read_bytes())
            data[len(data) // 2] ^= 1
            (run / "0" / name).write_bytes(data)  # in place: the inode that all checkpoints share
        dist.barrier()
        value = normal(200, 64, seed=1) + 0.001 * number * normal(200, 64, seed=2, scale=1.0)
        state = {"w.weight": distribute_tensor(value, mesh, [Shard(0)])}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if background:
                dsq_ckpt.async_save(state, run / str(number)).result()
            else:
                dsq_ckpt.save(state, run / str(number))
        said += [str(one.message) for one in caught if "is damaged" in str(one.message)]
    counts: list[int] = [0] * size
    dist.all_gather_object(counts, len(said))
    assert counts == [1, *[0] * (size - 1)], counts
    assert rank or (f"-{culprit:05d}.dsq' has checksum" in said[0] and "writing a keyframe" in said[0]), said
    depths = [depth(run / str(number)) for number in range(3 + CHECKED_EVERY)]
    found = depths.index(0, 1)
    assert depths == [*range(found), *range(3 + CHECKED_EVERY - found)] and found >= 2, depths
    dsq_ckpt.load({"w.weight": distribute_tensor(torch.zeros(200, 64), mesh, [Shard(0)])}, run / str(2 + CHECKED_EVERY))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, ranks):
        for culprit in range(ranks):
            damaged(Path(sys.argv[1]) / f"run-{culprit}", culprit, me, ranks, background=culprit > 0)
            done(f"the file of rank {culprit}")
