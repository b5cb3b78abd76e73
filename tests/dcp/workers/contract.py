"""A communicator of `torch.distributed` keeps its contract, and serves `compress`: argv = an empty directory.

A state dict in memory that all ranks have is compressed by all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

import dsq_ckpt
from dsq_ckpt.convert import partitioner
from dsq_ckpt.distributed.comm import TorchCommunicator
from tests.helpers import contract
from tests.helpers.source_files import plain_state

out = Path(sys.argv[1])
dist.init_process_group("gloo")
comm = TorchCommunicator()
contract.check_communicator(comm)
group = dist.new_group(list(reversed(range(comm.size)))[: comm.size - 1])  # its rank 0 is not that of the world
if comm.rank:
    contract.check_communicator(TorchCommunicator(group))
partitioner._MIN_PART_BYTES = 1 << 10
result = dsq_ckpt.compress(plain_state(), out, communicator=comm)
assert comm.gather(result) == [dsq_ckpt.describe(out) | {"quality": None}] * comm.size
if comm.rank == 0:
    print("ok", comm.size, flush=True)
dist.destroy_process_group()
