"""A file of a rank's is damaged after it was written: argv = an empty directory.

Whichever rank reads it, all agree on a keyframe within a few saves, and one of them says why, once. A signal on a rank
that still reads stops all of them, and the next save tells.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from harness import HANG, depth, done, normal, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt.engine import parent_integrity
from dsq_ckpt.engine.parent_integrity import CHECK_PERIOD
from dsq_ckpt.storage.manifest import Manifest, ManifestFile
from tests.helpers.parent_checks import finish_checks


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)  # in place: the inode that all checkpoints share


def damaged(run: Path, culprit: int, rank: int, size: int, background: bool) -> None:
    mesh = init_device_mesh("cpu", (size,))
    messages: list[str] = []
    for number in range(3 + CHECK_PERIOD):
        if number == 2:
            finish_checks()
            dist.barrier()
        if number == 2 and rank == 0:
            [name] = [f.name for f in Manifest.read(run / "0").files if f.name.endswith(f"-{culprit:05d}.dsq")]
            damage(run / "0" / name)
        dist.barrier()
        value = normal(200, 64, seed=1) + 0.001 * number * normal(200, 64, seed=2, scale=1.0)
        state = {"w.weight": distribute_tensor(value, mesh, [Shard(0)])}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if background:
                dsq_ckpt.async_save(state, run / str(number)).result()
            else:
                dsq_ckpt.save(state, run / str(number))
        messages += [str(warning.message) for warning in caught if "is damaged" in str(warning.message)]
    counts: list[int] = [0] * size
    dist.all_gather_object(counts, len(messages))
    assert counts == [1, *[0] * (size - 1)], counts
    text = " ".join(messages)
    assert rank or (f"-{culprit:05d}.dsq' has checksum" in text and "writing a keyframe" in text), messages
    depths = [depth(run / str(number)) for number in range(3 + CHECK_PERIOD)]
    position = depths.index(0, 1)
    assert depths == [*range(position), *range(3 + CHECK_PERIOD - position)] and position >= 2, depths
    dsq_ckpt.load({"w.weight": distribute_tensor(torch.zeros(200, 64), mesh, [Shard(0)])}, run / str(2 + CHECK_PERIOD))


def interrupted(run: Path, culprit: int, rank: int, size: int) -> None:
    """Ctrl-C on one rank whose check is not through stops all; what it finds is told of later, also by a keyframe."""
    mesh = init_device_mesh("cpu", (size,))
    answered, result, check_file = threading.Event(), parent_integrity._FileCheck.wait, parent_integrity.check_file

    def save(number: int) -> None:
        value = normal(200, 64, seed=1) + 0.001 * number
        state = {"w.weight": distribute_tensor(value, mesh, [Shard(0)])}
        dsq_ckpt.save(state, run / str(number), config={"delta": {"max_chain": 2}})

    def slow(path: Path, expected: ManifestFile) -> str | None:
        answered.wait(HANG)
        return check_file(path, expected)

    def signalled(check: parent_integrity._FileCheck) -> parent_integrity.Problems:
        signal.raise_signal(signal.SIGINT)
        return result(check)

    save(0)
    save(1)
    finish_checks()
    dist.barrier()
    for file in Manifest.read(run / "0").files if rank == 0 else ():
        damage(run / "0" / file.name)
    dist.barrier()
    everything = mock.patch.object(parent_integrity, "_is_due", lambda name, depth: True)
    with everything, mock.patch.object(parent_integrity, "check_file", slow if rank == culprit else check_file):
        save(2)
        stopped: BaseException | None = None
        with mock.patch.object(parent_integrity._FileCheck, "wait", signalled if rank == culprit else result):
            try:
                save(3)
            except (KeyboardInterrupt, dsq_ckpt.SaveFailed) as error:
                stopped = error
        assert isinstance(stopped, KeyboardInterrupt if rank == culprit else dsq_ckpt.SaveFailed), stopped
        assert rank == culprit or f"rank {culprit}: KeyboardInterrupt" in str(stopped), stopped
        answered.set()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save(3)
    messages = [str(warning.message) for warning in caught if "this save does not need them" in str(warning.message)]
    assert len(messages) == (rank == 0) and all(
        f"-{rank:05d}.dsq" in messages[0] for rank in range(size if messages else 0)
    ), messages
    assert [depth(run / str(number)) for number in range(4)] == [0, 1, 2, 0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, ranks):
        for culprit in range(ranks):
            damaged(Path(sys.argv[1]) / f"run-{culprit}", culprit, me, ranks, background=culprit > 0)
            done(f"the file of rank {culprit}")
        interrupted(Path(sys.argv[1]) / "interrupted", 1, me, ranks)
        done("a signal during the check")
