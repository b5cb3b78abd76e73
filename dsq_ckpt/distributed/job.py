"""Size of the job and rank of this process in it, whichever processes save or load together."""

from __future__ import annotations

import os

import torch.distributed as dist

from dsq_ckpt.distributed.mpi import read_launcher_rank


def get_job_size() -> int:
    """Return the number of processes that were started together, as far as this process knows."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "")
    return max(read_launcher_rank(slurm=True).size, int(size) if size.isdecimal() else 1)


def get_job_rank() -> int:
    """Return the rank of this process in the job; 0 if no launcher has set one.

    Slurm's rank is not used, since its processes may be independent of each other.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else read_launcher_rank().rank
