"""`save` and `async_save`: `torch.distributed.checkpoint` with the storage writer of this package."""

from __future__ import annotations

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
from dsq_ckpt.api.dcp_errors import (
    explain_exit,
    no_single_process_warning,
    silence_single_process_warning,
    unwrap_dcp_error,
    unwrap_dcp_errors,
)
from dsq_ckpt.api.stateful import as_state_dict, expand_stateful, find_saved_model, warn_of_nested_stateful
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect_flags, expect_path
from dsq_ckpt.core.collector import no_garbage_collection
from dsq_ckpt.core.interrupts import hold_signals
from dsq_ckpt.core.tensor_subclasses import to_storable
from dsq_ckpt.dcp.background_process import describe_exit, explain_missing_cpu_backend, kill_process
from dsq_ckpt.dcp.call_stack import AsyncCall
from dsq_ckpt.dcp.nested_planners import NestedSavePlanner
from dsq_ckpt.dcp.writer import DSQStorageWriter
from dsq_ckpt.distributed.comm import SingleProcess, communicator, run_on_all_ranks
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.result import OnSave, SaveResult, announce
from dsq_ckpt.errors import CheckpointNotFound, DSQError, SaveFailed, described
from dsq_ckpt.storage.manifest import Manifest

_SAVE_CALL = "save(state_dict, path)"
ConfigLike = DSQConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def as_config(config: ConfigLike) -> DSQConfig:
    """Return a configuration from any of its forms; see `DSQConfig.create`."""
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

    Unlike `torch.distributed.checkpoint.save`, this function keeps empty dicts, and dict keys that are numbers, as in a
    plain `optimizer.state_dict()`. They are in exports, and in dicts that `load` fills.

    Args:
        state_dict: nested dict of tensors and other values, or a module. Modules, optimizers and other objects with
            `state_dict` and `load_state_dict` may be values at its top level.
        path: the checkpoint directory, or a URL such as `s3://bucket/run/step-000500`.
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset; None: the defaults.
        parent: the checkpoint that this one may be coded against. "auto": the last one of this state that this process
            saved or loaded in the same run directory; None: write a keyframe; or the path of a checkpoint.
        overwrite: replace a complete checkpoint at `path`.
        model: module whose layer types, frozen tensors and rounded weights the save uses, as in `DSQStorageWriter`;
            None: the modules in `state_dict`, unless its other entries may hold weights too.
        process_group: ranks that save; None: all.
        pinned: never drop the refinement layer of this checkpoint.
        no_dist: save in this process alone, even if `torch.distributed` is initialized.
        history: earlier checkpoints that the save may continue; None: those of the process.
        on_save: called with the `SaveResult` once the checkpoint is committed, on rank 0. An exception becomes a
            warning.

    Returns:
        The result, the same on every rank; rank 0 logs it.

    Raises:
        ConfigError: an argument has a wrong type or value.
        DSQError: any other failure, on every rank; the message names the rank that failed. Earlier checkpoints are
            unchanged.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> result = dsq_ckpt.save({"model": model.state_dict(), "step": 500}, "run/step-000500")
        >>> result.keyframe, result.bytes_written < result.bytes_logical
        (True, True)
    """
    return save_with_writer(
        _prepare_save(
            state_dict, path, model, config=config, parent=parent, overwrite=overwrite, process_group=process_group,
            pinned=pinned, no_dist=no_dist, history=history, on_save=on_save,
        ),
        process_group=process_group, no_dist=no_dist,
    )


PrepareSave = Callable[[], tuple[DSQStorageWriter, dict[str, Any]]]
"""Creates the writer and the state dict of a save; runs on all ranks, so that a failure of one reaches the others."""


def _prepare_save(
    value: dict[str, Any] | nn.Module, path: str | os.PathLike[str], model: nn.Module | None, **options: Any
) -> PrepareSave:
    """Return a function that creates a writer with these options, and the state dict of `value`."""
    def prepare_save() -> tuple[DSQStorageWriter, dict[str, Any]]:
        expect_path("path", path)
        state = as_state_dict(value, _SAVE_CALL)
        saved_model = find_saved_model(value, state) if model is None else model
        return DSQStorageWriter(path, model=saved_model, **options), state

    return prepare_save


def _prepare_stored_state(
    prepare_save: PrepareSave, rank: int
) -> tuple[DSQStorageWriter, dict[str, Any], pathlib.Path]:
    writer, state = prepare_save()
    assert writer.path is not None
    stored = to_storable(expand_stateful(state))
    warn_of_nested_stateful(stored, rank)
    return writer, stored, writer.path


@hold_signals()
def save_with_writer(
    prepare_save: PrepareSave, *, process_group: dist.ProcessGroup | None = None, no_dist: bool = False,
    staged: bool = False,
) -> SaveResult:
    """Save with the writer of the caller; with `staged`, it searches and quantizes before DCP plans."""
    expect_flags(no_dist=no_dist)
    background.wait()
    comm = SingleProcess() if no_dist else communicator(process_group)
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    writer, state_dict, path = run_on_all_ranks(comm, lambda: _prepare_stored_state(prepare_save, comm.rank))
    if staged:
        writer.async_call = AsyncCall(default_planner=True, no_dist=no_dist, process_group=process_group)
        state_dict = writer.stage(state_dict)
    with (
        unwrap_dcp_errors(SaveFailed, comm.rank, writer.discard), no_single_process_warning(no_dist),
        no_garbage_collection(),
    ):
        dcp.save(
            state_dict, storage_writer=writer, planner=NestedSavePlanner(), process_group=process_group, no_dist=no_dist
        )
    result = run_on_all_ranks(comm, lambda: _read_result(path, writer.save_id, comm.rank))
    writer.history.add_committed(path, result.save_id)
    return result


def _read_result(path: pathlib.Path, save_id: str | None, rank: int) -> SaveResult:
    """Return the result of the committed save.

    Raises:
        SaveFailed: the checkpoint cannot be read on this rank, which may not share the directory, or was replaced.
    """
    try:
        result = SaveResult.of(path, Manifest.read(path))
    except (CheckpointNotFound, FileNotFoundError) as error:
        if rank == 0:  # the rank that commits
            raise SaveFailed(
                f"the checkpoint was committed, but is gone: another process has removed or renamed '{path}' since"
            ) from error
        raise SaveFailed(
            f"the checkpoint was committed, but host {platform.node()} does not see it: '{path}' is not shared by all "
            "hosts; save to a directory that is"
        ) from error
    except (DSQError, OSError) as error:
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
    """Save in the background; training continues as soon as the state is copied or quantized.

    The configuration's `storage.stage` selects what the call waits for. By default it copies the state to CPU memory
    that the next save reuses; with `processes`, it quantizes the state. A thread with a gloo group of its own does the
    rest, or, with `processes`, DCP's background process. A save waits for the previous one. A thread of this process
    calls `on_save` before the future has its result.

    Args:
        state_dict: as for `save`.
        path: as for `save`.
        config: as for `save`.
        parent: as for `save`.
        overwrite: as for `save`.
        model: as for `save`.
        process_group: as for `save`; with `processes`, only None is possible.
        pinned: as for `save`.
        no_dist: as for `save`; not possible with `processes`.
        processes: save in DCP's background process instead of a thread. Needs an initialized `torch.distributed`, all
            of whose ranks save.
        history: as for `save`.
        on_save: as for `save`.

    Returns:
        A future of the result of `save`; its `result()` raises the error of a save that failed. It may fail on one
        rank alone, after the commit, if that rank cannot read the manifest back.

    Raises:
        ConfigError: an argument has a wrong type or value.
        DSQError: any other failure before the call returns, such as a checkpoint at `path` without `overwrite`.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> future = dsq_ckpt.async_save({"model": model.state_dict()}, "run/step-000500")
        >>> future.result().depth  # waits for the commit; 0: a keyframe
        0
    """
    return async_save_with_writer(
        _prepare_save(
            state_dict, path, model, config=config, parent=parent, overwrite=overwrite, process_group=process_group,
            pinned=pinned, no_dist=no_dist, history=history, on_save=on_save,
        ),
        process_group=process_group, no_dist=no_dist, processes=processes,
    )


@hold_signals()
def async_save_with_writer(
    prepare_save: PrepareSave, *, process_group: dist.ProcessGroup | None = None, no_dist: bool = False,
    processes: bool = False,
) -> Future[SaveResult]:
    """Save in the background with the writer of the caller."""
    expect_flags(no_dist=no_dist, processes=processes)
    comm = SingleProcess() if no_dist else communicator(process_group)
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    if processes and (no_dist or process_group is not None):
        raise SaveFailed(
            "processes=True needs torch.distributed, and saves on all its ranks: initialize a process group and pass "
            "none here, nor no_dist, or leave processes out"
        )
    if processes and (problem := explain_missing_cpu_backend(dist.get_backend_config())) is not None:
        raise SaveFailed(problem)
    writer, state_dict, path = run_on_all_ranks(comm, lambda: _prepare_stored_state(prepare_save, comm.rank))
    on_save = writer.take_on_save() if processes else None
    background.wait()
    kind = AsyncCheckpointerType.PROCESS if processes else AsyncCheckpointerType.THREAD
    group = None if processes or no_dist else background.get_group(process_group)
    if no_dist:
        silence_single_process_warning()
    writer.async_call = AsyncCall(default_planner=True, no_dist=no_dist, process_group=group, processes=processes)
    planner = NestedSavePlanner()
    with unwrap_dcp_errors(SaveFailed, comm.rank), explain_exit():
        response = dcp.async_save(
            state_dict, storage_writer=writer, planner=planner, async_checkpointer_type=kind, no_dist=no_dist,
            process_group=group,
        )
    inner = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
    outer: Future[SaveResult] = Future()
    outer.set_running_or_notify_cancel()  # a timeout of asyncio, say, cannot cancel a save that has begun

    def get_result(future: Future[Any]) -> SaveResult:
        error = future.exception()
        planner.state_dict = {}  # the ending thread refers to the planner and its copy; the next save needs the memory
        writer.release()
        if isinstance(error, CheckpointException):
            writer.discard()
            raise unwrap_dcp_error(error, SaveFailed, None if processes else comm.rank) from error
        if isinstance(error, Exception) and not isinstance(error, DSQError):
            exit_text = describe_exit(after_error=True) if processes else None
            location = "in DCP's background process: " if processes else ""
            if processes and exit_text is None and comm.size > 1:
                kill_process()
            raise SaveFailed(
                f"{location}{described(error)}" if exit_text is None
                else f"DCP's background process {exit_text}; the next save starts another"
            ) from error
        if error is not None:
            raise error
        result = _read_result(path, writer.save_id, comm.rank)
        if processes and comm.rank == 0:  # the background process logs its result elsewhere
            announce(path, lambda: result, on_save)
        return result

    def forward_result(future: Future[Any]) -> None:
        try:
            outer.set_result(get_result(future))
        except BaseException as failure:  # any kind, or the next save would wait forever
            outer.set_exception(failure)

    inner.add_done_callback(forward_result)
    background.set_pending(outer)
    return outer
