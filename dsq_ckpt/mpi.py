"""Ranks of MPI, under the name that `compress` documents."""

from dsq_ckpt.distributed.mpi import MPICommunicator

__all__ = ["MPICommunicator"]
