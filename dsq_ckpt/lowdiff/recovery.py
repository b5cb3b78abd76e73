"""Recovery of a run: `recover` loads the newest snapshot, and replays every complete logged step after it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.arguments import expect_flags, expect_run
from dsq_ckpt.core.interrupts import hold_signals, run_pending_handlers
from dsq_ckpt.core.notices import warn
from dsq_ckpt.distributed.comm import Communicator, communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.errors import CorruptCheckpoint, DSQError, LoadFailed
from dsq_ckpt.lowdiff import segments
from dsq_ckpt.lowdiff.locks import wait_for_writers
from dsq_ckpt.lowdiff.parameter_exchange import exchange_parameters
from dsq_ckpt.lowdiff.plain_data import NotLoggable, from_plain
from dsq_ckpt.lowdiff.recovered import Recovered
from dsq_ckpt.lowdiff.replay import ReplayResult, owned_parameters, replay, updates_independently
from dsq_ckpt.lowdiff.replica_transfer import MemorySnapshot, SurvivingReplica
from dsq_ckpt.lowdiff.rollback import rollback_on_failure
from dsq_ckpt.lowdiff.segments import LogSegment
from dsq_ckpt.lowdiff.snapshots import RESIDUAL, Snapshot, list_sessions, list_snapshots
from dsq_ckpt.lowdiff.step_merging import check_linear
from dsq_ckpt.lowdiff.train_state import (
    MODEL,
    OPTIMIZER,
    ParameterEntry,
    Stateful,
    TrainState,
    check_optimizer_state,
    entries_from,
)
from dsq_ckpt.quantization.restored_values import record_load
from dsq_ckpt.storage.paths import resolve_local_path


def recover(
    run: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, *,
    state: Mapping[str, Stateful] | None = None, replay_log: bool = True, partial: bool = False, memory: bool = True,
    merge: bool = False, process_group: dist.ProcessGroup | None = None, timeout: float = 300.0,
) -> Recovered | None:
    """Restore model and optimizer to the state after the last step of a run that is complete on disk; collective.

    The newest snapshot is loaded, and the optimizer replays the logged gradients. The result is bit for bit the state
    of training if the snapshot is exact and the machine, its number of threads and torch are the same.

    Args:
        run: directory of the run.
        model: model with the logged structure; its values are overwritten.
        optimizer: optimizer of the logged class, with the logged groups.
        state: schedulers, scalers and the like, by their names in the log.
        replay_log: replay the log after the snapshot. False restores the snapshot alone, from which a run with error
            feedback continues exactly.
        partial: restore as much as possible if parameters, groups or the number of ranks differ from the log; otherwise
            a difference is an error.
        memory: take the state from the memory of a `Replica` that survived its training process, if there is one.
        merge: merge the logged steps in pairs instead of replaying them (SGD only); equal up to rounding.
        process_group: process group of the ranks that recover; None for the default group.
        timeout: seconds to wait for checkpointing processes that still write steps from before a failure.

    Returns:
        A `Recovered`; None on all ranks if the run has no snapshot.

    Raises:
        ConfigError: the model or optimizer cannot be recovered, or steps cannot be merged. Nothing has changed.
        LoadFailed: model, optimizer or ranks differ from the log, the run is a file, or another process still writes
            into it after `timeout`. Nothing has changed.
        CorruptCheckpoint: no snapshot can be read, or the log changed while it was read. Nothing has changed.

    Example:
        >>> model = torch.nn.Linear(16, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> dsq_ckpt.lowdiff.GradientLog("run", model, optimizer).close()  # a log of no steps
        >>> dsq_ckpt.lowdiff.recover("run", model, optimizer).step
        0
    """
    comm = communicator(process_group)

    def prepare() -> tuple[Path, TrainState]:
        expect_run(run)
        expect_flags(replay_log=replay_log, partial=partial, memory=memory, merge=merge)
        return resolve_local_path(run), TrainState(model, optimizer, state)

    directory, train_state = run_on_all_ranks(comm, prepare, LoadFailed)
    return recover_train_state(
        directory, train_state, comm, replay_log=replay_log, partial=partial, memory=memory, merge=merge,
        timeout=timeout,
    )


@hold_signals()
def recover_train_state(
    directory: Path, train_state: TrainState, comm: Communicator, *, replay_log: bool = True, partial: bool = False,
    memory: bool = True, merge: bool = False, timeout: float = 300.0,
) -> Recovered | None:
    """Restore a train state; see `recover` for the arguments."""
    started = time.monotonic()
    if merge:
        run_on_all_ranks(comm, lambda: check_linear(train_state.optimizer), LoadFailed)
    survivors = SurvivingReplica(directory, comm, timeout)
    in_memory = survivors.fetch_state() if memory else None
    if in_memory is not None:
        # After a failure the surviving processes stay, so that recovery can be tried again.
        with rollback_on_failure(train_state):
            load_state = functools.partial(_load_snapshot, train_state, in_memory, comm, partial)
            recovered = run_on_all_ranks(comm, load_state, LoadFailed)
        recovered.seconds = (time.monotonic() - started, 0.0)
        recovered.sessions = frozenset([*list_sessions(directory), in_memory.meta["session"]])
        survivors.dismiss()
        return recovered
    survivors.dismiss()
    run_on_all_ranks(comm, lambda: _wait_for_run(directory, timeout, started), LoadFailed)
    chosen = gather_from_all_ranks(comm, lambda: _choose_snapshot(directory) if comm.rank == 0 else None, LoadFailed)[0]
    if chosen is None:
        return None
    path, step, ended, sessions = chosen
    last, ended = (step, ended) if replay_log else (None, None)

    def load() -> Recovered:
        run_pending_handlers()
        with Snapshot(path) as snapshot, snapshot.translate_errors():
            recovered = _load_snapshot(train_state, snapshot, comm, partial)
            record_load(snapshot.lossy_kinds)
        recovered.seconds, recovered.sessions = (time.monotonic() - started, 0.0), sessions
        return recovered

    with rollback_on_failure(train_state):
        recovered = run_on_all_ranks(comm, load, LoadFailed)
        recovered.ended = ended
        if last is not None and not recovered.left_out:
            recovered = _replay_log(directory, train_state, recovered, last, merge, comm, load)
        elif last is not None and last > recovered.step:
            recovered.ended = f"{last - recovered.step} logged steps were not replayed: they need what was left out"
    recovered.seconds = (recovered.seconds[0], time.monotonic() - started - recovered.seconds[0])
    return recovered


def _wait_for_run(run: Path, timeout: float, started: float) -> None:
    """Wait until no process writes into the run."""
    if run.exists() and not run.is_dir():
        raise LoadFailed(f"'{run}' is a file; expected the directory of a run, as a log was given it")
    wait_for_writers(run, timeout, error_type=LoadFailed, started=started)


def _choose_snapshot(run: Path) -> tuple[Path, int, str | None, frozenset[str]] | None:
    """Return the newest readable snapshot, the last step that can be replayed, why the log ends there, and sessions."""
    problems, sessions = [], frozenset(list_sessions(run))
    for path, _ in list_snapshots(run) if run.is_dir() else ():
        try:
            with Snapshot(path) as snapshot, snapshot.translate_errors():
                damaged = [f"'{path / name}' {problem}" for name, problem in snapshot.find_damage()]
                if damaged:
                    raise CorruptCheckpoint("; ".join(damaged[:3]))
                step, session = int(snapshot.meta["step"]), str(snapshot.meta["session"])
        except DSQError as error:
            problems.append(str(error))
            continue
        if problems:
            warn(f"an older snapshot is used, '{path}': {problems[0]}")
        log_steps = segments.replayable_steps(run, session, step)
        return path, step + len(log_steps.segments), log_steps.ended, sessions | {session}
    if problems:
        raise CorruptCheckpoint(f"no snapshot of '{run}' can be read: {'; '.join(problems[:3])}")
    return None


def _load_snapshot(
    train_state: TrainState, snapshot: Snapshot | MemorySnapshot, comm: Communicator, partial: bool
) -> Recovered:
    """Load a snapshot into the train state. Nothing changes if the snapshot does not fit or cannot be read."""
    meta = snapshot.meta
    if (layout := meta.get("layout", TrainState.layout)) != train_state.layout:
        raise LoadFailed(
            f"'{snapshot.path}' is of {layout}, to be recovered is {train_state.layout}: ranks hold other parts of it; "
            "recover with what was logged"
        )
    entries, owned = entries_from(meta["entries"]), train_state.entries(1)
    problems = [] if train_state.optimizer.__class__.__name__ == meta["optimizer"] else [
        f"the optimizer is {train_state.optimizer.__class__.__name__}, logged was {meta['optimizer']}"
    ]
    problems += describe_differences(entries, owned)
    if len(meta["hyper"]) != len(train_state.optimizer.param_groups) and not problems:
        problems.append(f"{len(meta['hyper'])} groups were logged, {len(train_state.optimizer.param_groups)} are there")
    if set(meta["states"]) != set(train_state.states):
        problems.append(
            f"states {sorted(meta['states'])} were logged, {sorted(train_state.states)} are to be recovered (state=)"
        )
    names = set(snapshot.names())
    prefix = f"{'.'.join(RESIDUAL)}."
    has_residuals = any(name.startswith(prefix) for name in names)
    rank_problems = []
    if has_residuals and int(meta["ranks"]) != comm.size:
        rank_problems.append(
            f"{meta['ranks']} ranks were logged, {comm.size} recover: what error feedback holds back belongs to ranks"
        )
    targets = {".".join(path): tensor for path, tensor, _ in train_state.tensors() if path[0] == MODEL}
    for name, tensor in targets.items():
        if name not in names:
            problems.append(f"'{name}' was not logged")
        elif snapshot.shape(name)[0] != tuple(tensor.shape):
            problems.append(f"'{name}' was logged with shape {snapshot.shape(name)[0]}, is {tuple(tensor.shape)}")
    if (problems or rank_problems) and not partial:
        raise LoadFailed(
            f"'{snapshot.path}' is of another run: {'; '.join([*problems, *rank_problems][:5])}. Recover with the "
            "same model, optimizer, states and ranks, or what is possible with partial=True"
        )
    # All tensors are read before any is changed.
    values = {
        name: snapshot.tensor(name) for name, tensor in targets.items()
        if name in names and snapshot.shape(name)[0] == tuple(tensor.shape)
    }
    state = _optimizer_state(train_state, snapshot, {entry.name: entry for entry in owned}) if not problems else None
    residual = None
    if has_residuals and not rank_problems:
        own_prefix = f"{prefix}{comm.rank}."
        residual = {n.removeprefix(own_prefix): snapshot.tensor(n) for n in names if n.startswith(own_prefix)}
    if state is not None:
        train_state.set_states(meta["states"])
        train_state.set_hyper(meta["hyper"])
        train_state.replace_state(state)
    with torch.no_grad():
        for name, tensor in targets.items():
            if name in values:
                tensor.copy_(values[name])
    closed = isinstance(snapshot, Snapshot)
    closed = closed and segments.closed_marker_path(snapshot.path.parent, meta["session"]).exists()
    return Recovered(
        step=int(meta["step"]), snapshot=int(meta["step"]), path=snapshot.path, ended=None, closed=closed,
        lossy=bool(snapshot.lossy or meta["lossy"]), from_memory=isinstance(snapshot, MemorySnapshot),
        # A replay needs the optimizer's state, but no residuals.
        left_out=problems, feedback_lost=bool(rank_problems), seconds=(0.0, 0.0), compressor=meta["compressor"],
        residual=residual, tuner=meta["tuner"],
    )


def describe_differences(logged: Sequence[ParameterEntry], entries: Sequence[ParameterEntry]) -> list[str]:
    """Return messages about the differences between logged parameters and an optimizer's own."""
    old, new = {entry.name: entry for entry in logged}, {entry.name: entry for entry in entries}
    messages = [f"'{name}' was not logged" for name in new if name not in old]
    messages += [f"'{name}' was logged, and the optimizer has no such parameter" for name in old if name not in new]
    for name in old.keys() & new.keys():
        for attribute in ("shape", "dtype", "group"):
            before, after = getattr(old[name], attribute), getattr(new[name], attribute)
            if before != after:
                messages.append(f"'{name}' was logged with {attribute} {before}, is {after}")
    if not messages and [entry.name for entry in logged] != [entry.name for entry in entries]:
        messages.append("the parameters of the optimizer are in another order than was logged")
    return messages


def _optimizer_state(
    train_state: TrainState, snapshot: Snapshot | MemorySnapshot, entries: Mapping[str, ParameterEntry]
) -> dict[str, dict[str, Any]]:
    """Return the saved state of the optimizer by parameter."""
    state: dict[str, dict[str, Any]] = {}
    prefix = f"{OPTIMIZER}.state."
    for name in snapshot.names():
        if name.startswith(prefix):
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            if parameter in train_state.parameters or parameter not in entries:  # skip parameters of other ranks
                state.setdefault(parameter, {})[key] = snapshot.tensor(name)
    for parameter, values in snapshot.meta["plain"].items():
        if parameter in train_state.parameters or parameter not in entries:
            state.setdefault(parameter, {}).update({key: from_plain(value) for key, value in values.items()})
    if unknown := sorted(set(state) - set(entries)):
        raise CorruptCheckpoint(f"'{snapshot.path}' has optimizer state of '{unknown[0]}', which it does not log")
    order = snapshot.meta["state_keys"]
    return {name: {key: values[key] for key in order.get(name, values)} for name, values in state.items()}


def _replay_log(
    run: Path, train_state: TrainState, recovered: Recovered, last: int, merge: bool, comm: Communicator,
    load: Callable[[], Recovered],
) -> Recovered:
    """Replay up to step `last`, or to an earlier step if the log is damaged; collective."""
    while True:
        replay_share = functools.partial(_replay_share, run, train_state, recovered, last, merge, comm)
        log_steps, result, shared = run_on_all_ranks(comm, replay_share, LoadFailed)
        steps = comm.gather((result.steps, result.ended, result.drew))
        if len({count for count, *_ in steps}) == 1:
            break
        # A rank could not read all of its share. Replay again up to the last step that all ranks can read.
        count, ended, _ = min(steps, key=lambda share: share[0])
        last = recovered.snapshot + count
        recovered = run_on_all_ranks(comm, load, LoadFailed)
        recovered.ended = ended
    if shared and result.steps:
        exchange_parameters(train_state, owned_parameters(train_state, log_steps, comm.rank), comm)
    recovered.step += result.steps
    recovered.merged = merge and result.steps > 0
    recovered.inexact = _find_inexact(train_state, recovered, any(drew for *_, drew in steps))
    recovered.ended = result.ended or recovered.ended

    def finish() -> None:
        if result.steps:
            with torch.no_grad(), log_steps[result.steps - 1][0].translate_errors(recovered.step):
                train_state.set_hyper(result.hyper)
                train_state.set_states(result.states)
                for name, buffer in train_state.buffers():
                    if name in result.buffers:
                        buffer.copy_(result.buffers[name])
        if recovered.residual is not None:
            recovered.sent = _collect_sent_indices(log_steps[: result.steps], recovered.snapshot + 1)

    run_on_all_ranks(comm, finish, LoadFailed)
    if recovered.inexact is not None:
        warn(
            f"the recovered state is not exactly that of step {recovered.step}: {recovered.inexact}. replay_log=False "
            f"restores the snapshot after step {recovered.snapshot}, without the steps since", rank=comm.rank,
        )
    return recovered


def _find_inexact(train_state: TrainState, recovered: Recovered, drew: bool) -> str | None:
    """Return a reason why replayed steps are others than those of training, or None."""
    if drew:
        return (
            f"{type(train_state.optimizer).__name__} draws random numbers in its steps, and the replay has drawn others"
        )
    try:
        check_optimizer_state(train_state.optimizer)
    except NotLoggable as error:  # earlier versions logged such state without
        return str(error) if recovered.snapshot else None
    return None


def _replay_share(
    run: Path, train_state: TrainState, recovered: Recovered, last: int, merge: bool, comm: Communicator
) -> tuple[list[list[LogSegment]], ReplayResult, bool]:
    """Replay this rank's share; return the log, the result, and whether the ranks must exchange parameters."""
    with Snapshot(recovered.path) as snapshot:
        session = snapshot.meta["session"]
    log_steps = segments.replayable_steps(run, session, recovered.snapshot, last)
    if len(log_steps.segments) != last - recovered.snapshot:
        raise CorruptCheckpoint(f"the log of '{run}' changed while it was read: {log_steps.ended}")
    shared = (
        comm.size > 1 and not merge and updates_independently(train_state.optimizer)
        and bool(log_steps.segments) and log_steps.segments[0][0].ranks == comm.size
    )
    threads, rank = StorageConfig().thread_count(), comm.rank if shared or train_state.partitioned else None
    result = replay(train_state, log_steps.segments, recovered.snapshot + 1, threads, merge, rank)
    return log_steps.segments, result, shared and not train_state.partitioned


def _collect_sent_indices(log_steps: Sequence[Sequence[LogSegment]], first: int) -> dict[str, torch.Tensor | None]:
    """Return the int64 indices of the elements sent in these steps, by parameter; None for all elements."""
    sparse: dict[str, list[torch.Tensor]] = {}
    dense: set[str] = set()
    for number, step_segments in enumerate(log_steps, first):
        for segment in step_segments:
            for name, indices in segment.sent_indices(number).items():
                if indices is None:
                    dense.add(name)
                elif name not in dense:
                    sparse.setdefault(name, []).append(indices)
    merged = {name: torch.cat(indices).unique() for name, indices in sparse.items() if name not in dense}
    return {**merged, **dict.fromkeys(dense)}
