"""One of two ranks is gone: every collective of the other is one clear error, and none waits for ever."""

from __future__ import annotations

import datetime
import os
import time

import numpy as np
import torch.distributed as dist

from dsq_ckpt import LoadFailed, SaveFailed
from dsq_ckpt.distributed.comm import RankUnreachable, TorchCommunicator, run_on_all_ranks

dist.init_process_group("gloo")
dist.barrier()  # a rank may begin late on a busy machine
comm = TorchCommunicator(dist.new_group(timeout=datetime.timedelta(seconds=4)))
comm.gather("both are there")
if comm.rank:
    time.sleep(1)
    os._exit(0)
begun = time.perf_counter()
for name, work in {
    "sum": lambda: comm.sum(np.zeros(3, np.int64)), "gather": lambda: comm.gather(1),
    "broadcast": lambda: comm.broadcast(1) or comm.gather(2),
    "together": lambda: run_on_all_ranks(comm, lambda: comm.gather(1)),
}.items():
    try:
        work()
    except RankUnreachable as error:
        assert isinstance(error, SaveFailed) and isinstance(error, LoadFailed)
        assert str(error).startswith("rank 0: ") and "its host is gone" in str(error), error
        print("ok", name, flush=True)
assert time.perf_counter() - begun < 200  # each has 4 s; torch's own limit is half an hour
os._exit(1)
