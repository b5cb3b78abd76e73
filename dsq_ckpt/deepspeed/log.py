"""Gradient logs of DeepSpeed engines: every step on disk by the gradients that its optimizer steps with.

In bf16 and ZeRO stages 1 to 3 these are the reduced 16-bit gradients times one number, by which DeepSpeed unscales and
clips: each rank logs those of its partitions in two bytes per element, and nothing is lost or communicated for it. In
stage 0, where all ranks have all gradients, they share the work, and gradients may be compressed before DeepSpeed
averages them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from dsq_ckpt.deepspeed.masters import refresh_of
from dsq_ckpt.deepspeed.train_state import ENGINE, MasterState
from dsq_ckpt.distributed.comm import communicator, run_on_all_ranks
from dsq_ckpt.errors import ConfigError, LoadFailed, SaveFailed
from dsq_ckpt.lowdiff.buckets import Hooked
from dsq_ckpt.lowdiff.capture import Captured, capture
from dsq_ckpt.lowdiff.compressors import Compressor, GradientInfo, Uncompressed
from dsq_ckpt.lowdiff.compressors import compressor as compressor_of
from dsq_ckpt.lowdiff.log import GradientLog
from dsq_ckpt.lowdiff.recovery import Recovered, recover_subject
from dsq_ckpt.lowdiff.train_state import Entry, Stateful, TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import Layout, WorkerClient
from dsq_ckpt.storage.checkpoint import dtype_of
from dsq_ckpt.storage.paths import local_path


class EngineLog(GradientLog):
    """Logs every step of a DeepSpeed engine; made by `gradient_log`.

    `step` is called after every `engine.step()`. Where that only accumulated gradients, it does nothing. A step that
    DeepSpeed skips because of an overflow is logged as one that changes no weights.

    Attributes:
        steps_done: `engine.global_steps` of the last step that was logged.
    """

    def __init__(
        self, run: str | os.PathLike[str], engine: Any, *, compressor: str | Compressor, resume: Recovered | None,
        state: Mapping[str, Stateful] | None, **options: Any,
    ) -> None:
        self._engine = engine
        self._parts: _Parts | None = None
        self._traces: dict[nn.Parameter, GradientInfo] = {}
        self._called: set[str] = set()
        self._reduction: Any = None
        super().__init__(
            run, engine.module, engine.basic_optimizer, compressor=compressor, resume=resume, state=state, **options
        )

    def step(self) -> None:
        """End an iteration, if the engine made a step; see `GradientLog.step`.

        Raises:
            SaveFailed: the engine made more steps than were logged, or another rank is gone.
        """
        done = int(self._engine.global_steps)
        if done == self.steps_done:
            return
        if done != self.steps_done + 1:
            raise SaveFailed(
                f"the engine has done {done} steps, and its log {self.steps_done}: call log.step() after every "
                "engine.step(); after engine.load_checkpoint() close the log and begin another one"
            )
        if self._stepped and self._called != set(self._subject.parameters):
            self._gap = True
            self._warn("the engine updated weights outside of its optimizer's step; the log goes on with a snapshot")
        super().step()

    def _subject_of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful]
    ) -> TrainState:
        return MasterState(self._engine, {name: state for name, state in states.items() if name != ENGINE})

    def _prepare(self, resume: Recovered | None) -> None:
        super()._prepare(resume)
        steps = int(self._engine.global_steps)
        if resume is not None and resume.step != steps:
            raise ConfigError(f"step {resume.step} was recovered, and the engine has done {steps}: recover it again")
        self.steps_done = self._snapshot_at = steps

    def _attach_compressor(self) -> None:
        """Take the place of DeepSpeed's averaging, where there is something to compress."""
        if isinstance(self._compressor, Uncompressed):
            return
        assert isinstance(self._compressor, Hooked)
        engine, compressor = self._engine, self._compressor
        compressor.adopt(engine.module)
        group = engine.seq_data_parallel_group

        def allreduce_gradients(*args: Any, **kwargs: Any) -> None:
            if engine.is_gradient_accumulation_boundary():
                compressor.synchronize(group if group.size() > 1 else None)
                self._traces = compressor.take()

        self._reduction = engine.allreduce_gradients = allreduce_gradients

    def _detach(self) -> None:
        super()._detach()
        if self._reduction is not None and vars(self._engine).get("allreduce_gradients") is self._reduction:
            del self._engine.allreduce_gradients
        self._reduction = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer is called for all masters together, or for some after the other."""
        subject = self._engine_state()
        names = subject.updated_in(optimizer.param_groups)
        if not self._stepped or names & self._called:  # twice for the same: an error
            self._called, self._parts = set(), None
            super()._before_step(optimizer, args, kwargs)
        elif self._parts is not None and not self._broken:
            parts = self._parts
            self._hyper = subject.hyper()
            self._guarded(lambda: parts.put(subject, names))
        self._called |= names

    def _capture(self, room: int) -> None:
        subject = self._engine_state()
        # What stands in the masters' gradients is rounded to the module's dtype, times a number.
        dtype = self._engine.get_data_types()[0]
        half = dtype_name(dtype) if dtype.itemsize == 2 else None
        if subject.partitioned:
            self._parts = _Parts(self._own, half, room, self._running())
            self._parts.put(subject, subject.updated_in(self._subject.optimizer.param_groups))
            self._pending = self._parts.captured
            return
        captured = capture(subject, self._own, self._master_traces(), self._whole, room, self._running())
        hints = captured.message["hints"]
        if half is not None and hints["half"] is None:
            hints |= {"half": half, "search": True}
        self._pending = captured

    def _discard(self) -> None:
        self._traces = {}

    def _own_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._subject.buffers())

    def _brings(self, path: tuple[str, ...], parameter: str | None) -> bool:
        return self._engine_state().is_own(path) or super()._brings(path, parameter)

    def _engine_state(self) -> MasterState:
        assert isinstance(self._subject, MasterState)
        return self._subject

    def _master_traces(self) -> dict[nn.Parameter, GradientInfo]:
        """What is known of the module's gradients, for the masters that have the same."""
        traces, self._traces = self._traces, {}
        by_name = {self._engine.param_names[parameter]: trace for parameter, trace in traces.items()}
        return {
            master: by_name[name] for name, master in self._subject.parameters.items() if name in by_name
        }


class _Parts:
    """Gradients of partitions, which are there one after the other, in one slot.

    Args:
        own: what this rank logs.
        half: torch's name of the 16-bit floats that the gradients are multiples of; None: they are of none.
        room: bytes for buffers of the model.
        handle: of the checkpointing process.
    """

    def __init__(self, own: Sequence[Entry], half: str | None, room: int, handle: WorkerClient) -> None:
        layout = Layout()
        self._own = own
        self._places = [layout.add(entry.elements * dtype_of(entry.dtype).itemsize) for entry in own]
        buffers_at = layout.add(room)
        slot = handle.slot()
        self._arena, new = handle.room(slot, layout.size)
        self._dense: list[dict[str, Any]] = []
        hints = {"scales": [1.0], "half": half, "search": half is not None}
        self.captured = Captured({"sparse": [], "dense": self._dense, "hints": hints}, slot, buffers_at, new)

    def put(self, subject: MasterState, names: Collection[str]) -> None:
        """Copy the gradients of some partitions; those of others may be there, but not as they will be used."""
        for place, entry in enumerate(self._own):
            gradient = subject.parameters[entry.name].grad
            if gradient is None or entry.name not in names:
                continue
            at, dtype = self._places[place], dtype_of(entry.dtype)
            self._arena.view(at, entry.shape, dtype).copy_(gradient)
            self._dense.append({"param": place, "dtype": dtype_name(dtype), "at": at})


def gradient_log(
    engine: Any, run: str | os.PathLike[str], *, compressor: str | Compressor = "none",
    resume: Recovered | None = None, state: Mapping[str, Stateful] | None = None,
    snapshot_every: int | Literal["auto"] = "auto", batch: int | Literal["auto"] = "auto", mtbf: float | None = None,
    queue: int = 4, keep: int = 1, cores: Collection[int] | None = None, timeout: float = 300.0,
) -> EngineLog:
    """Log every step of an engine, so that `recover` gives the state after the last one; collective.

        log = dsq_ckpt.deepspeed.gradient_log(engine, "run")
        ...
        engine.step(); log.step()

    Args:
        engine: of DeepSpeed.
        run: directory of the run, on storage that all ranks share.
        compressor: of gradients before they are averaged, in ZeRO stage 0 only; see `dsq_ckpt.lowdiff.GradientLog`.
            "none" changes nothing about training.
        resume: what `recover` returned.
        state: what the engine does not know of, by name; its own scheduler is logged anyway.
        snapshot_every, batch, mtbf, queue, keep, cores, timeout: see `dsq_ckpt.lowdiff.GradientLog`.

    Raises:
        CheckpointExists: the run has a log, and `resume` is None.
        ConfigError: an argument is out of range, or steps of this engine cannot be repeated from gradients.
    """
    chosen = compressor_of(compressor)
    if not isinstance(chosen, Uncompressed):
        _check_compressor(engine, chosen)
    _check_names(state)
    return EngineLog(
        run, engine, compressor=chosen, resume=resume, state=state, snapshot_every=snapshot_every, batch=batch,
        mtbf=mtbf, queue=queue, keep=keep, cores=cores, timeout=timeout,
    )


def recover(
    engine: Any, run: str | os.PathLike[str], *, state: Mapping[str, Stateful] | None = None, replay_log: bool = True,
    timeout: float = 300.0,
) -> Recovered | None:
    """Give an engine the state after the last step of a run that is complete on disk; collective.

    Masters, moments, scheduler, counters and loss scaler are those of the snapshot; the basic optimizer does the logged
    steps again, each rank those of its partitions; then the module's weights are cast from the masters, as after every
    step of DeepSpeed's.

    Args:
        engine: made from the same configuration, on as many ranks.
        run: directory of the run.
        state: what else was logged, by the same names.
        replay_log: see `dsq_ckpt.lowdiff.recover`.
        timeout: seconds to wait for checkpointing processes that still write.

    Returns:
        None where the run has nothing to recover from, on all ranks.

    Raises:
        LoadFailed: the run is of another stage, number of ranks, model or optimizer; nothing was changed.
        CorruptCheckpoint: there are snapshots, and none can be read; nothing was changed.
    """
    _check_names(state)
    comm = communicator(None)
    subject = run_on_all_ranks(comm, lambda: MasterState(engine, state), LoadFailed)
    with subject.replayable():
        recovered = recover_subject(
            local_path(run), subject, comm, replay_log=replay_log, memory=False, timeout=timeout
        )
    if recovered is not None:
        refresh_of(engine)()
    return recovered


def _check_compressor(engine: Any, compressor: Compressor) -> None:
    stage = int(engine.zero_optimization_stage())
    if stage:
        raise ConfigError(
            f"compressor '{compressor.spec}' with ZeRO stage {stage}: DeepSpeed averages gradients itself there, while "
            "the backward pass is running; leave compressor out, what is logged is exact in two bytes per parameter"
        )
    if not isinstance(compressor, Hooked) or not engine.gradient_average:
        raise ConfigError(
            f"compressor '{compressor.spec}' cannot average gradients in DeepSpeed's place"
            + ("" if engine.gradient_average else ", which sums them (gradient_average is off)")
        )


def _check_names(state: Mapping[str, Stateful] | None) -> None:
    if ENGINE in (state or {}):
        raise ConfigError(f"'{ENGINE}' in state= is the name of the engine's own state; choose another one")
