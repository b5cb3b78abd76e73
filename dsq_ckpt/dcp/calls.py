"""Arguments of the DCP call that a stager or writer works for, read from the stack.

DCP passes the state dict to a stager and nothing else, though how it may be staged depends on the planner and the group
of the save. The arguments found here select one of the ways of staging, which give the same checkpoint, and let wrong
calls fail early. Where a later torch hides the call, the state dict is copied, which works without them.

Nor does it pass planner and group to the methods of a writer that plan, although plans that the planner cached are
empty, and a save in the background needs its own group. Where a later torch hides the planner, saves with cached plans
are refused.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import _async_thread_executor, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from dsq_ckpt.dcp.nested import NestedSavePlanner
from dsq_ckpt.errors import SaveFailed

DEFAULT_PLANNERS = (DefaultSavePlanner, NestedSavePlanner)
"""Classes that plan as DCP does by default."""

NO_COLLECTIVES = (
    "use_collectives=False lets every rank save a checkpoint of its own: leave it out, or save with no_dist=True, each "
    "rank to a directory of its own"
)

NO_SEARCH = (
    "a search evaluates the model on the training thread, before DCP plans, which is possible only with DCP's default "
    "planner, where writer and save have the same ranks: leave out planner= and async_stager= of dcp.async_save, or "
    "save synchronously"
)


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
        found = _locals_of(_ASYNC_SAVE)
        if found is None:
            return None
        try:
            return cls(
                plans_by_default(found["planner"]), found["no_dist"], found["process_group"],
                found["async_checkpointer_type"] == state_dict_saver.AsyncCheckpointerType.PROCESS,
                found["use_collectives"], found["checkpoint_id"],
            )
        except KeyError:  # another version's names
            return None

    def check(self, no_dist: bool) -> None:
        """Check, on all ranks alike, that the call can work; before anything is done.

        Args:
            no_dist: the writer's argument.

        Raises:
            SaveFailed: it cannot.
        """
        alone = self.no_dist or no_dist
        if not self.use_collectives and not alone and len(ranks_of(self.process_group)) > 1:
            raise SaveFailed(NO_COLLECTIVES)
        if self.processes and alone and len(ranks_of(None)) > 1:
            raise SaveFailed(
                "no_dist=True, but DCP's background process is started by all ranks together; save in a thread"
            )


@dataclass(frozen=True)
class SaveCall:
    """The state of a save, as far as DCP has come with it.

    Attributes:
        planner: the planner of this rank.
        ranks: number of ranks that save.
        is_coordinator: whether this rank makes the global plan.
        gathered: on the coordinator, while the global plan is made: the plans as the ranks sent them; else None.
        scattered: the plan that this rank was sent, before its planner finished it; None before that.
    """

    planner: SavePlanner
    ranks: int
    is_coordinator: bool
    gathered: list[SavePlan] | None
    scattered: SavePlan | None

    @classmethod
    def of_stack(cls) -> SaveCall | None:
        """Return the innermost save on this thread's stack; None where none is found."""
        found = _locals_of(_SAVE)
        if found is None:
            return None
        steps = _locals_of(_REDUCE_SCATTER) or {}
        try:
            return cls(
                found["planner"], found["distW"].get_world_size(), found["distW"].is_coordinator,
                steps.get("all_data"), found.get("central_plan"),
            )
        except (KeyError, AttributeError):  # another version's names
            return None


def in_background() -> bool:
    """Return whether this thread is that of DCP's asynchronous saves."""
    return _locals_of(_IN_THREAD) is not None


def group_of_save() -> dist.ProcessGroup | None:
    """Return the process group of the innermost save on this thread's stack; None for the default one, or no save."""
    found = _locals_of(_SAVE)
    return None if found is None else found.get("process_group")


def _locals_of(code: CodeType) -> Mapping[str, Any] | None:
    """Return the local variables of the innermost call of a function on this thread's stack; None if there is none."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a process group, as ranks of the default group; [0] if torch.distributed is not in use."""
    return dist.get_process_group_ranks(group) if dist.is_available() and dist.is_initialized() else [0]


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return the rank of this process in a group; 0 if torch.distributed is not in use."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def plans_by_default(planner: SavePlanner | None) -> bool:
    """Return whether a planner plans and resolves items as `DefaultSavePlanner()` does.

    A subclass may do anything, and so may a method that was set on the instance.
    """
    if planner is None:
        return True
    if type(planner) not in DEFAULT_PLANNERS:
        return False
    own, usual = vars(planner), vars(type(planner)())
    replaced = any(callable(getattr(type(planner), name, None)) for name in own)
    return not replaced and all(own.get(name) == value for name, value in usual.items() if name != "mappings")


_ASYNC_SAVE = inspect.unwrap(state_dict_saver.async_save).__code__
_IN_THREAD = _async_thread_executor.save_wrapper.__code__
_SAVE = inspect.unwrap(state_dict_saver._save_state_dict).__code__
_REDUCE_SCATTER = inspect.unwrap(_DistWrapper.reduce_scatter).__code__
