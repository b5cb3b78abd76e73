"""A disk that is full on one rank, in saves by DCP's own functions: argv = an empty directory.

All ranks get an error, whose only cause is that rank's, and nothing is left of what the others wrote.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import broken, fault, state_at
from harness import HANG, done, fails_everywhere, world
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dsq_ckpt import DSQStorageWriter
from dsq_ckpt.storage.container import ContainerWriter
from dsq_ckpt.storage.manifest import Manifest, is_complete


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


FAULTS = [
    (ContainerWriter, "add", fault(errno.ENOSPC), "No space left"),
    (ContainerWriter, "finish", fault(errno.ENOSPC), "No space left"),
    (os, "replace", fault(errno.ENOSPC), "No space left"),
    (ContainerWriter, "finish", interrupt, "KeyboardInterrupt"),
]


class Saves:
    """Saves of one run, by each of DCP's functions."""

    def __init__(self, root: Path, rank: int, size: int) -> None:
        self.root, self.rank, self.size = root, rank, size

    def save(self, path: Path, how: str, writer: DSQStorageWriter | None = None) -> None:
        state = state_at(1, self.rank, self.size)
        stage = "copy" if how in ("save", "process") else how
        writer = writer or DSQStorageWriter(path, {"storage": {"stage": stage}}, overwrite=True)
        if how == "save":
            dcp.save(state, storage_writer=writer)
            return
        kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result(timeout=HANG)

    def fail(self, work: Callable[[], None], culprit: int, says: str) -> None:
        def told() -> None:
            try:
                work()
            except CheckpointException as error:
                assert set(error.failures) == {culprit}, error
                raise

        fails_everywhere(told, says)

    def nothing_left(self, how: str) -> None:
        """Fail saves to a new directory, and look for what they left."""
        for (target, name, what, says), culprit in product(FAULTS, range(self.size)):
            path = self.root / f"{how}-{culprit}-{name}" / "step-1"
            with broken(self.rank == culprit, target, name, what):
                self.fail(lambda: self.save(path, how), culprit, says)  # noqa: B023
            assert not path.parent.exists(), "as it was found, on every rank at once"
            dist.barrier()
        done(f"{how}: nothing is left")

    def earlier_stays(self, how: str) -> None:
        """The checkpoint that was to be replaced, with its files and no others; the next save replaces it."""
        path = self.root / how
        self.save(path, how)
        dist.barrier()
        before, names = Manifest.read(path).save_id, sorted(os.listdir(path))
        writer = DSQStorageWriter(path, overwrite=True)
        for culprit in range(self.size):
            with broken(self.rank == culprit, ContainerWriter, "finish", fault(errno.ENOSPC)):
                self.fail(lambda: self.save(path, "save", writer), culprit, "No space left")
            assert Manifest.read(path).save_id == before and sorted(os.listdir(path)) == names
            dist.barrier()
        self.save(path, "save", writer)
        dist.barrier()
        after = Manifest.read(path)
        assert after.save_id != before
        assert {file.name for file in after.files} | {"manifest.json"} == set(os.listdir(path))
        done(f"{how}: the earlier checkpoint stays")

    def background_process(self) -> None:
        """DCP's background process of one rank may write small files only."""
        self.save(self.root / "process", "process")  # which starts it
        for culprit in range(self.size):
            path = self.root / f"process-{culprit}" / "step-1"
            pid = _async_process_executor._CHECKPOINT_PROCESS._save_process.pid
            limit, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            if self.rank == culprit:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, most))
            self.fail(lambda: self.save(path, "process"), culprit, "File too large")  # noqa: B023
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, most))
            assert not path.parent.exists()
            dist.barrier()
        self.save(self.root / "process-again", "process")
        dist.barrier()
        assert is_complete(self.root / "process-again")
        done("process: nothing is left")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, ranks):
        saves = Saves(Path(sys.argv[1]), me, ranks)
        for way in ("save", "copy", "quantize"):
            saves.nothing_left(way)
            saves.earlier_stays(way)
        saves.background_process()
