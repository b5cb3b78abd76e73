"""DCP's background process: its requirements, exit status and replacement."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import _async_process_executor

from dsq_ckpt.distributed.comm import Communicator


def explain_missing_cpu_backend(backends: str) -> str | None:
    """Return why DCP's background process cannot save over a group with these backends; None if it can."""
    if any(backend.partition(":")[0] == "cpu" for backend in backends.split(",")):
        return None
    return (
        f"processes=True needs a default process group that serves CPU tensors, and this one has only '{backends}': "
        "init_process_group(\"cpu:gloo,cuda:nccl\"), or leave processes out"
    )


def describe_exit(after_error: bool = False) -> str | None:
    """Return how the background process of this rank ended; None if it is alive, or there is none.

    Args:
        after_error: whether it may be about to end; then it is waited for up to a second.
    """
    process = _get_process()
    if process is not None and after_error:
        process.join(timeout=1)
    if process is None or process.exitcode is None:
        return None
    return f"(id {process.pid}) was killed by signal {-process.exitcode}" if process.exitcode < 0 else (
        f"(id {process.pid}) ended with exit code {process.exitcode}"
    )


def kill_process() -> None:
    """Kill the background process of this rank, if there is one.

    For a request that did not get to it, as where shared memory is full on one host: the processes of other ranks are
    in a collective with it then, and would wait for the whole timeout of the group. Saves of other writers in this
    process fail too, until `reset_dead_processes` makes DCP start new processes on all ranks.
    """
    process = _get_process()
    if process is not None:
        process.kill()
        process.join()


def reset_dead_processes(comm: Communicator) -> None:
    """Make DCP start new background processes on all ranks if one has ended; collective over the default group.

    DCP never replaces the process that it started first. The processes of all ranks form one gloo world, so all must be
    replaced together.
    """
    if any(comm.gather(describe_exit() is not None)):
        _async_process_executor._CHECKPOINT_PROCESS = None  # it ends with the last reference to it


def _get_process() -> Any:
    """Return the `multiprocessing.Process` of DCP; None if there is none, or a later torch hides it."""
    process = getattr(_async_process_executor, "_CHECKPOINT_PROCESS", None)
    return getattr(process, "_save_process", None)
