"""DCP's background process: its requirements, its end, and its replacement."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import _async_process_executor

from dsq_ckpt.distributed.comm import Communicator


def without_cpu(backends: str) -> str | None:
    """Return why DCP's background process cannot save over a group with these backends; None if it can."""
    if any(part.partition(":")[0] == "cpu" for part in backends.split(",")):
        return None
    return (
        f"processes=True needs a default process group that serves CPU tensors, and this one has only '{backends}': "
        "init_process_group(\"cpu:gloo,cuda:nccl\"), or leave processes out"
    )


def how_it_ended(after_error: bool = False) -> str | None:
    """Return how the background process of this rank ended; None while it lives, or where there is none.

    Args:
        after_error: it may be about to end.
    """
    process = _process()
    if process is not None and after_error:
        process.join(timeout=1)
    if process is None or process.exitcode is None:
        return None
    return f"(id {process.pid}) was killed by signal {-process.exitcode}" if process.exitcode < 0 else (
        f"(id {process.pid}) ended with exit code {process.exitcode}"
    )


def replace_dead(comm: Communicator) -> None:
    """Let DCP start new background processes on all ranks if one has ended; collective over the default group.

    DCP keeps the process that it started first for good, and the processes of all ranks are one gloo world, so none of
    them is of use without the others.
    """
    if any(comm.gather(how_it_ended() is not None)):
        _async_process_executor._CHECKPOINT_PROCESS = None  # it is ended as soon as nothing refers to it


def _process() -> Any:
    """Return the `multiprocessing.Process` that DCP keeps; None if there is none, or a later torch hides it."""
    known = getattr(_async_process_executor, "_CHECKPOINT_PROCESS", None)
    return getattr(known, "_save_process", None)
