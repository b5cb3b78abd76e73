"""How many processes a job has, and which of them this one is, whichever of them save or load together."""

from __future__ import annotations

import os

import torch.distributed as dist

from dsq_ckpt.distributed.mpi import launched


def size_of_job() -> int:
    """Return how many processes were started together, as far as this one knows."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    told = os.environ.get("WORLD_SIZE", "")
    return max(launched(slurm=True).size, int(told) if told.isdecimal() else 1)


def rank_in_job() -> int:
    """Return the rank of this process, as far as it knows; 0 where no launcher tells.

    Slurm's is not asked for before there is a group: its processes may have nothing to do with each other.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    told = os.environ.get("RANK", "")
    return int(told) if told.isdecimal() else launched().rank
