"""DCP's background process of one rank is killed, or is not reached: argv = an empty directory."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import HANG, done, fails_everywhere, normal, world
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest, is_complete


def state(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {name: normal(80, 64, seed=1) + 0.001 * step for name in (f"{rank}.weight", "shared.weight")}


def kill() -> None:
    process = _async_process_executor._CHECKPOINT_PROCESS._save_process
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def stop() -> None:
    os.kill(_async_process_executor._CHECKPOINT_PROCESS._save_process.pid, signal.SIGSTOP)


def killed(root: Path, rank: int) -> None:
    """After its end other processes are started on all ranks; a save under way fails on all, in clear words."""
    for step in range(2):
        dsq_ckpt.async_save(state(step, rank), root / str(step), processes=True).result(timeout=HANG)
        dist.barrier()
        assert Manifest.read(root / str(step)).depth == step
        if rank == 1 and step == 0:
            kill()
        dist.barrier()
    done("killed between saves")
    if rank == 1:
        stop()  # so that it is surely in the middle of the save
    future = dsq_ckpt.async_save(state(2, rank), root / "2", processes=True)
    dist.barrier()
    if rank == 1:
        kill()
    # Its own end may be noticed first, or that of its connection to the other ranks.
    fails_everywhere(lambda: future.result(timeout=HANG), "background process")
    assert isinstance(future.exception(), dsq_ckpt.SaveFailed), future.exception()
    assert not is_complete(root / "2")
    dist.barrier()
    dsq_ckpt.async_save(state(3, rank), root / "3", processes=True).result(timeout=HANG)
    dist.barrier()
    assert Manifest.read(root / "3").parent_name == "1"
    done("killed in the middle of a save")
    if rank == 1:
        kill()
    dist.barrier()
    future = dcp.async_save(
        state(4, rank), storage_writer=dsq_ckpt.DSQStorageWriter(root / "4"),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    future.result(timeout=HANG)
    dist.barrier()
    assert Manifest.read(root / "4").parent_name == "3"
    done("killed before a save by DCP's own function")


def not_reached(root: Path, rank: int) -> None:
    """Shared memory is full on one host, so the state does not get to its process: the others do not wait for it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    future = dsq_ckpt.async_save(state(5, rank), root / "5", config="exact", processes=True)
    fails_everywhere(lambda: future.result(timeout=HANG), "background process")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(future.exception(), dsq_ckpt.SaveFailed), future.exception()
    assert not is_complete(root / "5")
    dist.barrier()
    dsq_ckpt.async_save(state(6, rank), root / "6", processes=True).result(timeout=HANG)
    dist.barrier()
    assert Manifest.read(root / "6").parent_name == "4"
    done("a request that did not get to it")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, _):
        killed(Path(sys.argv[1]), me)
        not_reached(Path(sys.argv[1]), me)
