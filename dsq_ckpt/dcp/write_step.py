"""DCP's write step of a save, in which all ranks fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dsq_ckpt.dcp.call_stack import SaveCall
from dsq_ckpt.dcp.staging import StagedCodes, StagedCopy
from dsq_ckpt.dcp.steps import dcp_step
from dsq_ckpt.distributed.comm import Communicator, SingleProcess, communicator
from dsq_ckpt.distributed.rollback import roll_back_together
from dsq_ckpt.engine.pipeline import SavePipeline
from dsq_ckpt.errors import SaveFailed


class WriteStep:
    """A mixin for the writer, by which a rank also fails together with the others before DCP calls `write_data`.

    DCP calls `finish_plan` of the planner in the same step. If that fails on one rank, the next collective of DCP there
    would meet those of `write_data` on the others, which hangs or ends the processes.
    """

    no_dist: bool
    _save_group: dist.ProcessGroup | None
    _save: SavePipeline | None
    _written: SavePipeline | None
    """The save whose files were written last; `stage` may have started another one since."""
    _staged: StagedCodes | StagedCopy | None

    def discard(self) -> None:
        """Remove the files of a failed save, once no rank writes any more; on the coordinator."""
        save = self._written or self._save
        if save is not None:
            save.discard()

    @property
    def _pipeline(self) -> SavePipeline:
        assert self._save is not None, "DCP calls set_up_storage_writer or stage first"
        return self._save

    def _prepare_write_step(self) -> None:
        """Make the write step of the save on this thread's stack report its failures; before DCP plans."""
        self._written = None
        call = SaveCall.from_stack()
        if call is None:  # a later torch hides it
            return
        wrapper, all_reduce = call.wrapper, call.wrapper.all_reduce

        def all_reduce_reported(step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], Any]) -> Any:
            del wrapper.all_reduce  # it refers to the writer, which would stay in memory

            def write() -> Any:
                try:
                    return map_fun()
                except BaseException as error:
                    self._report_failure(error, call.ranks)
                    raise

            return all_reduce(step, write, reduce_fun)

        wrapper.all_reduce = all_reduce_reported  # type: ignore[method-assign]

    def _begin_writing(self, ranks: int) -> tuple[Communicator, StagedCodes | StagedCopy | None]:
        """Return the communicator of a save of `ranks` ranks, in which they fail together, and its staged state."""
        comm = SingleProcess() if self.no_dist else communicator(self._save_group, ranks)
        self._written = self._pipeline
        staged, self._staged = self._staged, None
        return comm, staged

    @dcp_step(SaveFailed)
    def _report_failure(self, error: BaseException, ranks: int) -> None:
        """Raise an error of the write step, on all ranks together unless `write_data` did so; collective."""
        if self._written is None:
            comm, _ = self._begin_writing(ranks)
            with roll_back_together(comm, self.discard):
                raise error
