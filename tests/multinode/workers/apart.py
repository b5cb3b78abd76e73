"""A checkpoint directory per rank, as if hosts had their own, and one rank with nothing to write: argv = directory.

The path is the same on all ranks: it goes through the working directory of each.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import dsq_ckpt

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=45))
rank = dist.get_rank()
weight = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))  # replicated, so one rank writes it
(Path(sys.argv[1]) / str(rank)).mkdir()
os.chdir(Path(sys.argv[1]) / str(rank))
try:
    dsq_ckpt.save({"weight": weight}, "/proc/self/cwd/step")
except dsq_ckpt.DSQError as error:
    (Path(sys.argv[1]) / f"{rank}.txt").write_text(str(error))
dist.barrier()  # all ranks are here, soon
dist.destroy_process_group()
