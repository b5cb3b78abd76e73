"""Parallel recovery over ranks: each rank replays the share that it logged, and broadcasts the result."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.lowdiff.consensus import cpu_group
from dsq_ckpt.lowdiff.plain import from_plain, to_plain
from dsq_ckpt.lowdiff.train_state import TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import ArenaLayout, nbytes
from dsq_ckpt.storage.record_fields import parse_dtype


def exchange(train_state: TrainState, own: Collection[str], comm: Communicator) -> None:
    """Broadcast parameters and optimizer state from their owners to all ranks; collective.

    Args:
        train_state: train state, updated in place.
        own: names of the parameters that this rank owns; each parameter has exactly one owner.
        comm: communicator of the ranks.
    """
    listed, plain, copies, layout = [], {}, [], ArenaLayout()
    for name in own:
        parameter = train_state.parameters[name]
        values: dict[str, Any] = {"": parameter.detach(), **train_state.optimizer.state.get(parameter, {})}
        for key, value in values.items():
            if torch.is_tensor(value):
                at = layout.add(nbytes(value))
                listed.append((name, key, dtype_name(value.dtype), tuple(value.shape), at))
                copies.append((at, value))
            else:
                plain[name, key] = to_plain(value, f"'{key}' of the optimizer's state of '{name}'")
    packed = torch.empty(layout.size, dtype=torch.uint8)
    for at, value in copies:
        packed[at : at + nbytes(value)].view(value.dtype).view(value.shape).copy_(value)
    everybody = comm.gather((listed, plain, layout.size))
    group = cpu_group(comm)
    for rank, (theirs, others, size) in enumerate(everybody):
        whole = packed if rank == comm.rank else torch.empty(size, dtype=torch.uint8)
        if group is not None and size:
            dist.broadcast(whole, group=group, group_src=rank)
        if rank == comm.rank:
            continue
        found: dict[str, dict[str, Any]] = {}
        for name, key, dtype, shape, at in theirs:
            count = torch.Size(shape).numel() * parse_dtype(dtype).itemsize
            found.setdefault(name, {})[key] = whole[at : at + count].view(parse_dtype(dtype)).view(shape)
        for (name, key), value in others.items():
            found.setdefault(name, {})[key] = from_plain(value)
        with torch.no_grad():
            for name, values in found.items():
                train_state.parameters[name].copy_(values.pop(""))
        train_state.set_state({name: values for name, values in found.items() if values})
    if group is not None:
        dist.destroy_process_group(group)
