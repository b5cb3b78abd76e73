"""Exchange of replayed parameters between ranks, for recovery in which each rank replays the share that it logged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.lowdiff.consensus import create_cpu_group
from dsq_ckpt.lowdiff.plain_data import from_plain, to_plain
from dsq_ckpt.lowdiff.train_state import TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import ArenaLayout, nbytes
from dsq_ckpt.storage.record_fields import parse_dtype


def exchange_parameters(train_state: TrainState, own_names: Collection[str], comm: Communicator) -> None:
    """Broadcast parameters and optimizer state from their owners to all ranks; collective.

    Args:
        train_state: train state, updated in place.
        own_names: names of the parameters that this rank owns; each parameter has exactly one owner.
        comm: communicator of the ranks.
    """
    descriptions, plain, copies, layout = [], {}, [], ArenaLayout()
    for name in own_names:
        parameter = train_state.parameters[name]
        values: dict[str, Any] = {"": parameter.detach(), **train_state.optimizer.state.get(parameter, {})}
        for key, value in values.items():
            if torch.is_tensor(value):
                offset = layout.add(nbytes(value))
                descriptions.append((name, key, dtype_name(value.dtype), tuple(value.shape), offset))
                copies.append((offset, value))
            else:
                plain[name, key] = to_plain(value, f"'{key}' of the optimizer's state of '{name}'")
    packed = torch.empty(layout.size, dtype=torch.uint8)
    for offset, value in copies:
        packed[offset : offset + nbytes(value)].view(value.dtype).view(value.shape).copy_(value)
    gathered = comm.gather((descriptions, plain, layout.size))
    group = create_cpu_group(comm)
    for rank, (tensors, plain_values, size) in enumerate(gathered):
        buffer = packed if rank == comm.rank else torch.empty(size, dtype=torch.uint8)
        if group is not None and size:
            dist.broadcast(buffer, group=group, group_src=rank)
        if rank == comm.rank:
            continue
        received: dict[str, dict[str, Any]] = {}
        for name, key, dtype, shape, offset in tensors:
            count = torch.Size(shape).numel() * parse_dtype(dtype).itemsize
            received.setdefault(name, {})[key] = buffer[offset : offset + count].view(parse_dtype(dtype)).view(shape)
        for (name, key), value in plain_values.items():
            received.setdefault(name, {})[key] = from_plain(value)
        with torch.no_grad():
            for name, values in received.items():
                train_state.parameters[name].copy_(values.pop(""))
        train_state.set_state({name: values for name, values in received.items() if values})
    if group is not None:
        dist.destroy_process_group(group)
