"""Arguments of the DCP call that uses a stager or writer, read from the call stack.

DCP passes only the state dict to a stager, although the possible ways of staging depend on the planner and the process
group of the save. The arguments found here select one of these ways, all of which write the same checkpoint, and let
wrong calls fail early. If a later torch hides the call, the state dict is copied, which works without them.

DCP does not pass planner and group to the planning methods of a writer either, although plans that the planner has
cached are empty, and a save in the background needs its own group. If a later torch hides the planner, saves with
cached plans are refused.
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

from dsq_ckpt.dcp.nested_planners import NestedSavePlanner
from dsq_ckpt.errors import SaveFailed

DEFAULT_PLANNERS = (DefaultSavePlanner, NestedSavePlanner)
"""Classes that plan like DCP's default planner."""

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
        default_planner: whether items are planned as by `DefaultSavePlanner()`.
        no_dist: whether this rank saves alone.
        process_group: process group of the save in the background; None: the default one.
        processes: whether DCP's background process saves, instead of a thread.
        use_collectives: whether ranks save one checkpoint together.
        checkpoint_id: the path, if it is not that of the writer.
    """

    default_planner: bool
    no_dist: bool = False
    process_group: dist.ProcessGroup | None = None
    processes: bool = False
    use_collectives: bool = True
    checkpoint_id: str | os.PathLike[str] | None = None

    @classmethod
    def from_stack(cls) -> AsyncCall | None:
        """Return the innermost call of `dcp.async_save` on this thread's stack; None if there is none."""
        variables = _find_locals(_ASYNC_SAVE_CODE)
        if variables is None:
            return None
        try:
            return cls(
                is_default_planner(variables["planner"]), variables["no_dist"], variables["process_group"],
                variables["async_checkpointer_type"] == state_dict_saver.AsyncCheckpointerType.PROCESS,
                variables["use_collectives"], variables["checkpoint_id"],
            )
        except KeyError:  # another version's names
            return None

    def check(self, no_dist: bool) -> None:
        """Raise if the call cannot work, on all ranks alike.

        Args:
            no_dist: the writer's argument.

        Raises:
            SaveFailed: the arguments exclude each other.
        """
        is_alone = self.no_dist or no_dist
        if not self.use_collectives and not is_alone and len(get_group_ranks(self.process_group)) > 1:
            raise SaveFailed(NO_COLLECTIVES)
        if self.processes and is_alone and len(get_group_ranks(None)) > 1:
            raise SaveFailed(
                "no_dist=True, but DCP's background process is started by all ranks together; save in a thread"
            )


@dataclass(frozen=True)
class SaveCall:
    """The state of a save in DCP.

    Attributes:
        planner: the planner of this rank.
        wrapper: the object through which DCP calls collectives in this save.
        ranks: number of ranks that save.
        is_coordinator: whether this rank makes the global plan.
        local_plans: plans as sent by all ranks; None except on the coordinator while the global plan is made.
        central_plan: the plan sent to this rank, before its planner finishes it; None before that.
    """

    planner: SavePlanner
    wrapper: _DistWrapper
    ranks: int
    is_coordinator: bool
    local_plans: list[SavePlan] | None
    central_plan: SavePlan | None

    @classmethod
    def from_stack(cls) -> SaveCall | None:
        """Return the innermost save on this thread's stack; None if there is none."""
        variables = _find_locals(_SAVE_CODE)
        if variables is None:
            return None
        steps = _find_locals(_REDUCE_SCATTER_CODE) or {}
        try:
            wrapper = variables["distW"]
            return cls(
                variables["planner"], wrapper, wrapper.get_world_size(), wrapper.is_coordinator,
                steps.get("all_data"), variables.get("central_plan"),
            )
        except (KeyError, AttributeError):  # another version's names
            return None


def is_background_thread() -> bool:
    """Return whether this is the thread of DCP's asynchronous saves."""
    return _find_locals(_THREAD_CODE) is not None


def find_save_group() -> dist.ProcessGroup | None:
    """Return the process group of the innermost save on this thread's stack; None: the default group, or no save."""
    variables = _find_locals(_SAVE_CODE)
    return None if variables is None else variables.get("process_group")


def _find_locals(code: CodeType) -> Mapping[str, Any] | None:
    """Return the local variables of the innermost call of a function on this thread's stack; None if there is none."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def get_group_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a process group, as ranks of the default group; [0] if torch.distributed is not in use."""
    return dist.get_process_group_ranks(group) if dist.is_available() and dist.is_initialized() else [0]


def get_group_rank(group: dist.ProcessGroup | None) -> int:
    """Return the rank of this process in a group; 0 if torch.distributed is not in use."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def is_default_planner(planner: SavePlanner | None) -> bool:
    """Return whether a planner plans and resolves items as `DefaultSavePlanner()` does.

    Subclasses and instances with replaced methods do not count, since they may behave differently.
    """
    if planner is None:
        return True
    if type(planner) not in DEFAULT_PLANNERS:
        return False
    attributes, default = vars(planner), vars(type(planner)())
    replaced = any(callable(getattr(type(planner), name, None)) for name in attributes)
    return not replaced and all(attributes.get(name) == value for name, value in default.items() if name != "mappings")


_ASYNC_SAVE_CODE = inspect.unwrap(state_dict_saver.async_save).__code__
_THREAD_CODE = _async_thread_executor.save_wrapper.__code__
_SAVE_CODE = inspect.unwrap(state_dict_saver._save_state_dict).__code__
_REDUCE_SCATTER_CODE = inspect.unwrap(_DistWrapper.reduce_scatter).__code__
