"""`recover`: the latest snapshot, and every complete logged step after it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.interrupts import held_signals, let_signals_through
from dsq_ckpt.core.notices import warn
from dsq_ckpt.distributed.comm import Communicator, communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.errors import CorruptCheckpoint, DSQError, LoadFailed
from dsq_ckpt.lowdiff import segments
from dsq_ckpt.lowdiff.linear import check_linear
from dsq_ckpt.lowdiff.locks import wait_for_writers
from dsq_ckpt.lowdiff.memory import InMemory, Survivors
from dsq_ckpt.lowdiff.plain import from_plain
from dsq_ckpt.lowdiff.replay import Replayed, by_parameter, replay, share
from dsq_ckpt.lowdiff.segments import Segment
from dsq_ckpt.lowdiff.sharing import exchange
from dsq_ckpt.lowdiff.snapshots import RESIDUAL, Snapshot, newest_first
from dsq_ckpt.lowdiff.train_state import MODEL, OPTIMIZER, Entry, Stateful, TrainState, entries_from
from dsq_ckpt.lowdiff.unchanged import unchanged_on_failure
from dsq_ckpt.storage.paths import local_path


@dataclass
class Recovered:
    """What `recover` gave back.

    Attributes:
        step: optimizer steps done in the recovered state.
        snapshot: of the snapshot it was replayed from.
        path: of that snapshot; of the run, where the state came from memory.
        lossy: the snapshot was stored lossy, so the state is near to what training had, not equal.
        from_memory: the state came from a process that survived.
        closed: the log was closed, so there was no failure.
        ended: why the log ends where it does, where some of it is missing or damaged; None: it ends as it was left.
        left_out: what was logged and could not be given back, with `partial`.
        feedback_lost: with `partial`, what error feedback held back could not be given back.
        seconds: that loading the snapshot and replaying took.
        residual: gradients that were not sent yet, by parameter, of this rank; None: there are none for it.
        merged: steps were merged, so the state is that of a replay up to rounding.
        sent: by parameter, where gradients were sent since the snapshot, int64; None: everywhere.
    """

    step: int
    snapshot: int
    path: Path
    lossy: bool
    closed: bool
    from_memory: bool
    ended: str | None
    left_out: list[str]
    feedback_lost: bool
    seconds: tuple[float, float]
    compressor: str
    residual: dict[str, torch.Tensor] | None = None
    sent: dict[str, torch.Tensor | None] = field(default_factory=dict)
    tuner: dict[str, Any] | None = None
    merged: bool = False

    @property
    def replayed(self) -> int:
        """Steps that were replayed."""
        return self.step - self.snapshot

    @property
    def exact(self) -> bool:
        """Whether model, optimizer and states are bit for bit those after `step` steps of the run."""
        return not (self.lossy or self.left_out or self.merged)

    @property
    def continues_exactly(self) -> bool:
        """Whether the run goes on exactly as it would have without the failure. What error feedback holds back is known
        at the snapshot; after steps that were replayed it is that of the snapshot, without what was sent since.
        """
        return self.exact and not self.feedback_lost and (self.replayed == 0 or self.residual is None)

    def residuals(self) -> dict[str, torch.Tensor]:
        """What error feedback goes on with: that of the snapshot where nothing was sent since, zero elsewhere."""
        found = {name: tensor.clone() for name, tensor in (self.residual or {}).items()}
        for name, places in self.sent.items():
            if name in found:
                found[name].view(-1)[slice(None) if places is None else places] = 0
        return found


def recover(
    run: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, *,
    state: Mapping[str, Stateful] | None = None, replay_log: bool = True, partial: bool = False, memory: bool = True,
    merge: bool = False, process_group: dist.ProcessGroup | None = None, timeout: float = 300.0,
) -> Recovered | None:
    """Give model and optimizer the state after the last step of a run that is complete on disk; collective.

    The snapshot is loaded, and the optimizer run again over the logged gradients: bit for bit what training had, if the
    snapshot is exact and the machine, its number of threads and torch are the same.

    Args:
        run: directory of the run.
        model: as it was logged, of any values.
        optimizer: of the same kind and with the same groups.
        state: schedulers and the like, by the names they were logged under.
        replay_log: go on from the snapshot through the log; False: the snapshot alone, from which a run with error
            feedback goes on exactly.
        merge: merge the logged steps in pairs instead of replaying them, which SGD allows: the same up to rounding.
        memory: take the state from the memory of a `Replica` that survived its training process, if there is one.
        partial: recover what is possible where parameters, groups or the number of ranks are others than were logged;
            otherwise that is an error.
        process_group: of the ranks that recover; None: the default one.
        timeout: seconds to wait for checkpointing processes that still write what they were given before a failure.

    Returns:
        None where the run has nothing to recover from, on all ranks.

    Raises:
        ConfigError: something cannot be recovered, or steps cannot be merged; nothing was changed.
        LoadFailed: model, optimizer or ranks are not those that were logged, the run is a file, or another process
            still writes into it after `timeout`; nothing was changed.
        CorruptCheckpoint: there are snapshots, and none can be read, or the log changed while it was read; nothing was
            changed.
    """
    comm = communicator(process_group)
    subject = run_on_all_ranks(comm, lambda: TrainState(model, optimizer, state), LoadFailed)
    return recover_subject(
        local_path(run), subject, comm, replay_log=replay_log, partial=partial, memory=memory, merge=merge,
        timeout=timeout,
    )


@held_signals()
def recover_subject(
    directory: Path, subject: TrainState, comm: Communicator, *, replay_log: bool = True, partial: bool = False,
    memory: bool = True, merge: bool = False, timeout: float = 300.0,
) -> Recovered | None:
    """As `recover`, of anything that is logged by names."""
    started = time.perf_counter()
    if merge:
        run_on_all_ranks(comm, lambda: check_linear(subject.optimizer), LoadFailed)
    survivors = Survivors(directory, comm)
    in_memory = survivors.state() if memory else None
    if in_memory is not None:
        kept = in_memory
        # If this fails the processes stay, and it may be tried again.
        with unchanged_on_failure(subject):
            recovered = run_on_all_ranks(comm, lambda: _restore(subject, kept, comm, partial), LoadFailed)
        recovered.seconds = (time.perf_counter() - started, 0.0)
        survivors.dismiss()
        return recovered
    survivors.dismiss()
    run_on_all_ranks(comm, lambda: _wait(directory, timeout), LoadFailed)
    chosen = gather_from_all_ranks(comm, lambda: _choose(directory) if comm.rank == 0 else None, LoadFailed)[0]
    if chosen is None:
        return None
    path, step, ended = chosen
    last: int | None = step
    if not replay_log:
        last, ended = None, None

    def load() -> Recovered:
        let_signals_through()
        with Snapshot(path) as snapshot, snapshot.naming():
            recovered = _restore(subject, snapshot, comm, partial)
        recovered.seconds = (time.perf_counter() - started, 0.0)
        return recovered

    with unchanged_on_failure(subject):
        recovered = run_on_all_ranks(comm, load, LoadFailed)
        recovered.ended = ended
        if last is not None and not recovered.left_out:
            recovered = _replayed(directory, subject, recovered, last, merge, comm, load)
        elif last is not None and last > recovered.step:
            recovered.ended = f"{last - recovered.step} logged steps were not replayed: they need what was left out"
    recovered.seconds = (recovered.seconds[0], time.perf_counter() - started - recovered.seconds[0])
    return recovered


def _wait(run: Path, timeout: float) -> None:
    """Until nothing is written into the run any more."""
    if run.exists() and not run.is_dir():
        raise LoadFailed(f"'{run}' is a file; expected the directory of a run, as a log was given it")
    wait_for_writers(run, timeout, failed=LoadFailed)


def _choose(run: Path) -> tuple[Path, int, str | None] | None:
    """The newest snapshot that can be read, the last step that follows it, and why there are no more."""
    problems = []
    for path, _ in newest_first(run) if run.is_dir() else ():
        try:
            with Snapshot(path) as snapshot, snapshot.naming():
                damaged = [f"'{path / name}' {problem}" for name, problem in snapshot.damaged()]
                if damaged:
                    raise CorruptCheckpoint("; ".join(damaged[:3]))
                step, session = int(snapshot.meta["step"]), str(snapshot.meta["session"])
        except DSQError as error:
            problems.append(str(error))
            continue
        if problems:
            warn(f"an older snapshot is used, '{path}': {problems[0]}")
        course = segments.course(run, session, step)
        return path, step + len(course.segments), course.ended
    if problems:
        raise CorruptCheckpoint(f"no snapshot of '{run}' can be read: {'; '.join(problems[:3])}")
    return None


def _restore(subject: TrainState, snapshot: Snapshot | InMemory, comm: Communicator, partial: bool) -> Recovered:
    """Load a snapshot; nothing is changed if that fails."""
    meta = snapshot.meta
    if (layout := meta.get("layout", TrainState.layout)) != subject.layout:
        raise LoadFailed(
            f"'{snapshot.path}' is of {layout}, to be recovered is {subject.layout}: ranks hold other parts of it; "
            "recover with what was logged"
        )
    entries, own = entries_from(meta["entries"]), subject.entries(1)
    problems = [] if subject.optimizer.__class__.__name__ == meta["optimizer"] else [
        f"the optimizer is {subject.optimizer.__class__.__name__}, logged was {meta['optimizer']}"
    ]
    problems += differences(entries, own)
    if len(meta["hyper"]) != len(subject.optimizer.param_groups) and not problems:
        problems.append(f"{len(meta['hyper'])} groups were logged, {len(subject.optimizer.param_groups)} are there")
    if set(meta["states"]) != set(subject.states):
        problems.append(
            f"states {sorted(meta['states'])} were logged, {sorted(subject.states)} are to be recovered (state=)"
        )
    names = set(snapshot.names())
    prefix = f"{'.'.join(RESIDUAL)}."
    held_back = any(name.startswith(prefix) for name in names)
    lost = []
    if held_back and int(meta["ranks"]) != comm.size:
        lost.append(
            f"{meta['ranks']} ranks were logged, {comm.size} recover: what error feedback holds back belongs to ranks"
        )
    wanted = {".".join(path): tensor for path, tensor, _ in subject.tensors() if path[0] == MODEL}
    for name, tensor in wanted.items():
        if name not in names:
            problems.append(f"'{name}' was not logged")
        elif snapshot.shape(name)[0] != tuple(tensor.shape):
            problems.append(f"'{name}' was logged with shape {snapshot.shape(name)[0]}, is {tuple(tensor.shape)}")
    if (problems or lost) and not partial:
        raise LoadFailed(
            f"'{snapshot.path}' is of another run: {'; '.join([*problems, *lost][:5])}. Recover with the same model, "
            "optimizer, states and ranks, or what is possible with partial=True"
        )
    # All is read before anything is changed.
    values = {
        name: snapshot.tensor(name) for name, tensor in wanted.items()
        if name in names and snapshot.shape(name)[0] == tuple(tensor.shape)
    }
    state = _optimizer_state(subject, snapshot, {entry.name: entry for entry in own}) if not problems else None
    residual = None
    if held_back and not lost:
        start = f"{prefix}{comm.rank}."
        residual = {name.removeprefix(start): snapshot.tensor(name) for name in names if name.startswith(start)}
    if state is not None:
        subject.set_states(meta["states"])
        subject.set_hyper(meta["hyper"])
        subject.replace_state(state)
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in values:
                tensor.copy_(values[name])
    return Recovered(
        step=int(meta["step"]), snapshot=int(meta["step"]), path=snapshot.path,
        lossy=bool(snapshot.lossy or meta["lossy"]), ended=None,
        from_memory=isinstance(snapshot, InMemory),
        closed=isinstance(snapshot, Snapshot) and segments.end_of(snapshot.path.parent, meta["session"]).exists(),
        # Without the optimizer's state nothing can be replayed; without residuals everything can.
        left_out=problems, feedback_lost=bool(lost), seconds=(0.0, 0.0), compressor=meta["compressor"],
        residual=residual, tuner=meta["tuner"],
    )


def differences(logged: Sequence[Entry], own: Sequence[Entry]) -> list[str]:
    """What is different about the parameters of an optimizer, in words."""
    before, now = {entry.name: entry for entry in logged}, {entry.name: entry for entry in own}
    found = [f"'{name}' was not logged" for name in now if name not in before]
    found += [f"'{name}' was logged, and the optimizer has no such parameter" for name in before if name not in now]
    for name in before.keys() & now.keys():
        for what in ("shape", "dtype", "group"):
            if getattr(before[name], what) != getattr(now[name], what):
                found.append(
                    f"'{name}' was logged with {what} {getattr(before[name], what)}, is {getattr(now[name], what)}"
                )
    if not found and [entry.name for entry in logged] != [entry.name for entry in own]:
        found.append("the parameters of the optimizer are in another order than was logged")
    return found


def _optimizer_state(
    subject: TrainState, snapshot: Snapshot | InMemory, entries: Mapping[str, Entry]
) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter, as it was."""
    state: dict[str, dict[str, Any]] = {}
    prefix = f"{OPTIMIZER}.state."
    for name in snapshot.names():
        if name.startswith(prefix):
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            if parameter in subject.parameters or parameter not in entries:  # others are of other ranks
                state.setdefault(parameter, {})[key] = snapshot.tensor(name)
    for parameter, values in snapshot.meta["plain"].items():
        if parameter in subject.parameters or parameter not in entries:
            state.setdefault(parameter, {}).update({key: from_plain(value) for key, value in values.items()})
    if unknown := sorted(set(state) - set(entries)):
        raise CorruptCheckpoint(f"'{snapshot.path}' has optimizer state of '{unknown[0]}', which it does not log")
    order = snapshot.meta["state_keys"]
    return {name: {key: values[key] for key in order.get(name, values)} for name, values in state.items()}


def _replayed(
    run: Path, subject: TrainState, recovered: Recovered, last: int, merge: bool, comm: Communicator,
    load: Callable[[], Recovered],
) -> Recovered:
    """The state after step `last`, or after an earlier one where the log turns out to be damaged; collective."""
    while True:
        once = functools.partial(_replay, run, subject, recovered, last, merge, comm)
        course, done, shared = run_on_all_ranks(comm, once, LoadFailed)
        steps = comm.gather((done.steps, done.ended))
        if len({count for count, _ in steps}) == 1:
            break
        # Some rank could not read all of its share: once more, to where all can.
        count, ended = min(steps, key=lambda pair: pair[0])
        last = recovered.snapshot + count
        recovered = run_on_all_ranks(comm, load, LoadFailed)
        recovered.ended = ended
    if shared and done.steps:
        exchange(subject, share(subject, course, comm.rank), comm)
    recovered.step += done.steps
    recovered.merged = merge and done.steps > 0
    recovered.ended = done.ended or recovered.ended

    def finish() -> None:
        if done.steps:
            with torch.no_grad(), course[done.steps - 1][0].readable(recovered.step):
                subject.set_hyper(done.hyper)
                subject.set_states(done.states)
                for name, buffer in subject.buffers():
                    if name in done.buffers:
                        buffer.copy_(done.buffers[name])
        if recovered.residual is not None:
            recovered.sent = _sent(course[: done.steps], recovered.snapshot + 1)

    run_on_all_ranks(comm, finish, LoadFailed)
    return recovered


def _replay(
    run: Path, subject: TrainState, recovered: Recovered, last: int, merge: bool, comm: Communicator
) -> tuple[list[list[Segment]], Replayed, bool]:
    """Replay what is this rank's to replay: the log, what came of it, and whether the other ranks have the rest."""
    with Snapshot(recovered.path) as snapshot:
        session = snapshot.meta["session"]
    course = segments.course(run, session, recovered.snapshot, last)
    if len(course.segments) != last - recovered.snapshot:
        raise CorruptCheckpoint(f"the log of '{run}' changed while it was read: {course.ended}")
    shared = (
        comm.size > 1 and not merge and by_parameter(subject.optimizer)
        and bool(course.segments) and course.segments[0][0].ranks == comm.size
    )
    threads, rank = StorageConfig().thread_count(), comm.rank if shared or subject.partitioned else None
    done = replay(subject, course.segments, recovered.snapshot + 1, threads, merge, rank)
    return course.segments, done, shared and not subject.partitioned


def _sent(course: Sequence[Sequence[Segment]], first: int) -> dict[str, torch.Tensor | None]:
    """Where gradients were sent in these steps, by parameter; None: everywhere."""
    found: dict[str, list[torch.Tensor]] = {}
    everywhere: set[str] = set()
    for number, segments_of in enumerate(course, first):
        for segment in segments_of:
            for name, places in segment.sent(number).items():
                if places is None:
                    everywhere.add(name)
                elif name not in everywhere:
                    found.setdefault(name, []).append(places)
    sparse = {name: torch.cat(places).unique() for name, places in found.items() if name not in everywhere}
    return {**sparse, **dict.fromkeys(everywhere)}
