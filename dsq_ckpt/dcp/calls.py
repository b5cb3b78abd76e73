"""Arguments of the `dcp.async_save` call that a stager works for, read from the stack.

DCP passes the state dict to a stager and nothing else, though how it may be staged depends on the planner and the group
of the save. The arguments found here select one of two ways of staging that give the same checkpoint, and let wrong
calls fail early. Where a later torch hides the call, the state dict is copied, which works without them.
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from dsq_ckpt.dcp.nested import NestedSavePlanner


@dataclass(frozen=True)
class AsyncCall:
    """The arguments of an asynchronous save that matter to its stager.

    Attributes:
        default_planner: items are planned as by `DefaultSavePlanner()`.
        no_dist: this rank saves alone.
        process_group: process group of the save in the background; None: the default one.
        processes: the save is done by DCP's background process, not by a thread.
        use_collectives: ranks save one checkpoint together.
        checkpoint_id: the path, where it is not that of the writer.
    """

    default_planner: bool
    no_dist: bool = False
    process_group: dist.ProcessGroup | None = None
    processes: bool = False
    use_collectives: bool = True
    checkpoint_id: str | os.PathLike[str] | None = None

    @classmethod
    def of_stack(cls) -> AsyncCall | None:
        """Return the innermost call of `dcp.async_save` on this thread's stack; None where none is found."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code is not _ASYNC_SAVE:
            frame = frame.f_back
        if frame is None:
            return None
        found = frame.f_locals
        try:
            return cls(
                plans_by_default(found["planner"]), found["no_dist"], found["process_group"],
                found["async_checkpointer_type"] == state_dict_saver.AsyncCheckpointerType.PROCESS,
                found["use_collectives"], found["checkpoint_id"],
            )
        except KeyError:  # another version's names
            return None


def plans_by_default(planner: SavePlanner | None) -> bool:
    """Return whether a planner plans and resolves items as `DefaultSavePlanner()` does.

    A subclass may do anything, and so may a method that was set on the instance.
    """
    if planner is None:
        return True
    if type(planner) not in (DefaultSavePlanner, NestedSavePlanner):
        return False
    own, usual = vars(planner), vars(type(planner)())
    replaced = any(callable(getattr(type(planner), name, None)) for name in own)
    return not replaced and all(own.get(name) == value for name, value in usual.items() if name != "mappings")


_ASYNC_SAVE = inspect.unwrap(state_dict_saver.async_save).__code__
