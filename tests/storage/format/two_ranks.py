"""Save a matrix that is cut over two ranks, twice."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dsq_ckpt

dist.init_process_group("gloo")
torch.manual_seed(3)
whole = torch.randn(37, 64)
mesh = init_device_mesh("cpu", (2,))
for step in range(2):
    tree = {"layer.weight": distribute_tensor(whole + 0.01 * step, mesh, [Shard(0)]), "rank": f"{dist.get_rank()}"}
    dsq_ckpt.save(tree, f"{sys.argv[1]}/run/{step}", config={"quantize": {"min_elements": 100}})
dist.destroy_process_group()
