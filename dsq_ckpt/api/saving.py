"""`save`, `async_save` and `load`: `torch.distributed.checkpoint` with our writer and reader."""

from __future__ import annotations

import logging
import os
import pathlib
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from dsq_ckpt.api import background
from dsq_ckpt.api.dcp_errors import explain_exit, plain_error, plain_errors, silence, without_warning
from dsq_ckpt.api.stateful import saved_model, state_of, told_state, warn_of_objects
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect_path
from dsq_ckpt.core.interrupts import held_signals
from dsq_ckpt.core.subclasses import storable
from dsq_ckpt.dcp.background_process import how_it_ended, without_cpu
from dsq_ckpt.dcp.calls import AsyncCall
from dsq_ckpt.dcp.nested import NestedSavePlanner
from dsq_ckpt.dcp.writer import DSQStorageWriter
from dsq_ckpt.distributed.comm import SingleProcess, communicator, run_on_all_ranks
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.result import OnSave, SaveResult, announce
from dsq_ckpt.errors import CheckpointNotFound, DSQError, SaveFailed, described
from dsq_ckpt.storage.manifest import Manifest

logger = logging.getLogger(__name__)

_SAVE = "save(state_dict, path)"
ConfigLike = DSQConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def as_config(config: ConfigLike) -> DSQConfig:
    """Return the configuration that a user gave in any form; see `DSQConfig.create`."""
    return DSQConfig.create(dict(config) if isinstance(config, Mapping) else config)


def save(
    state_dict: dict[str, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    config: ConfigLike = None,
    parent: str | os.PathLike[str] | None = "auto",
    overwrite: bool = False,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
    pinned: bool = False,
    no_dist: bool = False,
    history: SaveHistory | None = None,
    on_save: OnSave | None = None,
) -> SaveResult:
    """Save a nested state dict, compressed; collective over `process_group`.

    Keys of dicts that are numbers, as in a plain `optimizer.state_dict()`, and dicts without entries come back in an
    export and where `load` fills an empty dict; `torch.distributed.checkpoint.save` itself does not tell of them.
    The arguments are those of `DSQStorageWriter` and of `torch.distributed.checkpoint.save`.

    A module stands for its state dict. In its place, or as a value of a state dict, it is taken for the `model` too;
    several modules are taken together.

    Returns:
        What was written, the same on every rank; rank 0 logs it.

    Raises:
        ConfigError: an argument is not what it must be.
        DSQError: what else failed, naming the rank, on every rank; earlier checkpoints are untouched.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> result = dsq_ckpt.save({"model": model.state_dict(), "step": 500}, "run/step-000500")
        >>> result.keyframe, result.bytes_written < result.bytes_logical
        (True, True)
    """
    return save_with(
        _begun(
            state_dict, path, model, config=config, parent=parent, overwrite=overwrite, process_group=process_group,
            pinned=pinned, no_dist=no_dist, history=history, on_save=on_save,
        ),
        process_group=process_group, no_dist=no_dist,
    )


Begin = Callable[[], tuple[DSQStorageWriter, dict[str, Any]]]
"""Makes the writer of a save, and the state dict; called so that the failure of one rank reaches the others."""


def _begun(
    given: dict[str, Any] | nn.Module, path: str | os.PathLike[str], model: nn.Module | None, **options: Any
) -> Begin:
    """Return what makes a writer with these options, and the state dict."""
    def begin() -> tuple[DSQStorageWriter, dict[str, Any]]:
        expect_path("path", path)
        state = state_of(given, _SAVE)
        return DSQStorageWriter(path, model=saved_model(given, state) if model is None else model, **options), state

    return begin


def _storable(begin: Begin, rank: int) -> tuple[DSQStorageWriter, dict[str, Any], pathlib.Path]:
    writer, state = begin()
    assert writer.path is not None
    stored = storable(told_state(state))
    warn_of_objects(stored, rank)
    return writer, stored, writer.path


@held_signals()
def save_with(
    begin: Begin, *, process_group: dist.ProcessGroup | None = None, no_dist: bool = False, staged: bool = False
) -> SaveResult:
    """Save with a writer of the caller's; with `staged`, it chooses and quantizes before DCP plans."""
    background.wait()
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    comm = SingleProcess() if no_dist else communicator(process_group)
    writer, state_dict, path = run_on_all_ranks(comm, lambda: _storable(begin, comm.rank))
    if staged:
        writer.async_call = AsyncCall(default_planner=True, no_dist=no_dist, process_group=process_group)
        state_dict = writer.stage(state_dict)
    with plain_errors(SaveFailed, comm.rank, writer.discard), without_warning(no_dist):
        dcp.save(
            state_dict, storage_writer=writer, planner=NestedSavePlanner(), process_group=process_group, no_dist=no_dist
        )
    result = run_on_all_ranks(comm, lambda: _committed(path, writer.save_id, comm.rank))
    writer.history.add_committed(path, result.save_id)
    return result


def _committed(path: pathlib.Path, save_id: str | None, rank: int) -> SaveResult:
    """Return the result of the committed save; a rank that had nothing to write may not share the directory."""
    try:
        result = SaveResult.of(path, Manifest.read(path))
    except CheckpointNotFound as error:
        if rank == 0:  # which committed it
            raise SaveFailed(
                f"the checkpoint was committed, but is gone: another process has removed or renamed '{path}' since"
            ) from error
        raise SaveFailed(
            f"the checkpoint was committed, but host {platform.node()} does not see it: '{path}' is not shared by all "
            "hosts; save to a directory that is"
        ) from error
    except DSQError as error:
        raise SaveFailed(f"the checkpoint was committed, but cannot be read back: {error}") from error
    if save_id is not None and result.save_id != save_id:
        raise SaveFailed(
            f"the checkpoint was committed, but another save, {result.save_id}, has replaced it since: '{path}' was "
            "given to both; give each save a path of its own"
        )
    return result


def async_save(
    state_dict: dict[str, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    config: ConfigLike = None,
    parent: str | os.PathLike[str] | None = "auto",
    overwrite: bool = False,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
    pinned: bool = False,
    no_dist: bool = False,
    processes: bool = False,
    history: SaveHistory | None = None,
    on_save: OnSave | None = None,
) -> Future[SaveResult]:
    """Save in the background; training goes on as soon as the state is copied, or quantized.

    The configuration's `storage.stage` chooses what the call waits for: by default it copies the state to the CPU, in
    memory that is kept for the next save, and quantizes it with `processes`. All else follows in a thread
    on a gloo group of its own, or, with `processes`, in DCP's background process. A save waits for the one before it.
    `on_save` is called by a thread of this process, before the future has its result.

    Returns:
        A future of what `save` returns; its `result()` raises what the save raised.

    Raises:
        ConfigError: an argument is not what it must be.
        DSQError: what else failed before the call returns, such as a checkpoint at `path` that is not to be
            overwritten.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> future = dsq_ckpt.async_save({"model": model.state_dict()}, "run/step-000500")
        >>> future.result().depth  # waits for the commit; 0: a keyframe
        0
    """
    return save_async_with(
        _begun(
            state_dict, path, model, config=config, parent=parent, overwrite=overwrite, process_group=process_group,
            pinned=pinned, no_dist=no_dist, history=history, on_save=on_save,
        ),
        process_group=process_group, no_dist=no_dist, processes=processes,
    )


@held_signals()
def save_async_with(
    begin: Begin, *, process_group: dist.ProcessGroup | None = None, no_dist: bool = False, processes: bool = False
) -> Future[SaveResult]:
    """Save in the background with a writer of the caller's."""
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    if processes and (no_dist or process_group is not None):
        raise SaveFailed(
            "processes=True needs torch.distributed, and saves on all its ranks: initialize a process group and pass "
            "none here, nor no_dist, or leave processes out"
        )
    if processes and (lacking := without_cpu(dist.get_backend_config())) is not None:
        raise SaveFailed(lacking)
    comm = SingleProcess() if no_dist else communicator(process_group)
    writer, state_dict, path = run_on_all_ranks(comm, lambda: _storable(begin, comm.rank))
    on_save = writer.take_on_save() if processes else None
    background.wait()
    kind = AsyncCheckpointerType.PROCESS if processes else AsyncCheckpointerType.THREAD
    group = None if processes or no_dist else background.group(process_group)
    if no_dist:
        silence()
    writer.async_call = AsyncCall(default_planner=True, no_dist=no_dist, process_group=group, processes=processes)
    planner = NestedSavePlanner()
    with plain_errors(SaveFailed, comm.rank), explain_exit():
        response = dcp.async_save(
            state_dict, storage_writer=writer, planner=planner, async_checkpointer_type=kind, no_dist=no_dist,
            process_group=group,
        )
    inner = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
    outer: Future[SaveResult] = Future()
    outer.set_running_or_notify_cancel()  # a save that has begun is not cancelled, as by a timeout of asyncio

    def outcome(done: Future[Any]) -> SaveResult:
        error = done.exception()
        planner.state_dict = {}  # the ending thread keeps planner and copy, whose memory the next save needs
        writer.release()
        if isinstance(error, CheckpointException):
            writer.discard()
            raise plain_error(error, SaveFailed, None if processes else comm.rank) from error
        if isinstance(error, Exception) and not isinstance(error, DSQError):
            ended = how_it_ended(after_error=True) if processes else None
            where = "in DCP's background process: " if processes else ""
            raise SaveFailed(
                f"{where}{described(error)}" if ended is None
                else f"DCP's background process {ended}; the next save starts another"
            ) from error
        if error is not None:
            raise error
        result = _committed(path, writer.save_id, comm.rank)
        if processes and comm.rank == 0:  # what the background process told is not heard here
            announce(path, lambda: result, on_save)
        return result

    def pass_on(done: Future[Any]) -> None:
        try:
            outer.set_result(outcome(done))
        except BaseException as failure:  # of whatever kind, or the next save would wait without end
            outer.set_exception(failure)

    inner.add_done_callback(pass_on)
    background.begun(outer)
    return outer
