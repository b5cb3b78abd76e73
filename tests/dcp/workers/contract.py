"""A communicator keeps its contract, and serves `compress`: argv = mpi or torch, an empty directory.

Run by torchrun or mpirun. A state dict in memory that all ranks have is compressed by all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

import dsq_ckpt
from dsq_ckpt.convert import partitioner
from dsq_ckpt.distributed.comm import Communicator, TorchCommunicator
from dsq_ckpt.distributed.mpi import MPICommunicator
from tests.helpers import contract
from tests.helpers.source_files import plain_state

kind, out = sys.argv[1], Path(sys.argv[2])
comm: Communicator
if kind == "torch":
    dist.init_process_group("gloo")
    comm = TorchCommunicator()
    contract.check(comm)
    group = dist.new_group(list(reversed(range(comm.size)))[: comm.size - 1])  # its rank 0 is not that of the world
    if comm.rank:
        contract.check(TorchCommunicator(group))
else:
    comm = MPICommunicator()
    contract.check(comm)
    comm.limit = 64  # many calls where one would do
    contract.check(comm)
    del comm.limit
partitioner._SMALLEST = 1 << 10
result = dsq_ckpt.compress(plain_state(), out, communicator=comm)
assert comm.gather(result) == [dsq_ckpt.describe(out) | {"quality": None}] * comm.size
if comm.rank == 0:
    print("ok", kind, comm.size, flush=True)
if kind == "torch":
    dist.destroy_process_group()
