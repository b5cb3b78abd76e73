"""Gradient logs of DeepSpeed engines, which store the gradients of each optimizer step.

In ZeRO stages 1 to 3 each rank logs the gradients of its own partitions, without loss or communication. In bf16 these
are reduced 16-bit gradients times one factor of unscaling and clipping, so that two bytes per element suffice. In stage
0 all ranks have all gradients: they share the work, and gradients may be compressed before they are averaged.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from dsq_ckpt.core.arguments import expect_flags
from dsq_ckpt.deepspeed.flat_buffers import get_base_optimizer
from dsq_ckpt.deepspeed.train_state import ENGINE, MasterState
from dsq_ckpt.deepspeed.weight_refresh import create_refresh
from dsq_ckpt.distributed.comm import communicator, run_on_all_ranks
from dsq_ckpt.errors import ConfigError, LoadFailed, SaveFailed
from dsq_ckpt.lowdiff.buckets import HookedCompressor
from dsq_ckpt.lowdiff.capture import CapturedStep, capture_gradients
from dsq_ckpt.lowdiff.compressors import GradientCompressor, GradientInfo, Uncompressed, gradient_compressor
from dsq_ckpt.lowdiff.log import GradientLog
from dsq_ckpt.lowdiff.recovered import Recovered
from dsq_ckpt.lowdiff.recovery import recover_train_state
from dsq_ckpt.lowdiff.train_state import ParameterEntry, Stateful, TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import ArenaLayout, WorkerClient
from dsq_ckpt.storage.paths import resolve_local_path
from dsq_ckpt.storage.record_fields import parse_dtype


class EngineLog(GradientLog):
    """A log of every step of a DeepSpeed engine; created by `gradient_log`.

    Call `step` after every `engine.step()`; it does nothing if the engine only accumulated gradients. A step that
    DeepSpeed skips because of an overflow is logged as a step without changes.

    Attributes:
        steps_done: `engine.global_steps` of the last logged step.
    """

    def __init__(
        self, run: str | os.PathLike[str], engine: Any, *, compressor: str | GradientCompressor,
        resume: Recovered | None, state: Mapping[str, Stateful] | None, **options: Any,
    ) -> None:
        self._engine = engine
        self._partition_capture: _PartitionCapture | None = None
        self._gradient_infos: dict[nn.Parameter, GradientInfo] = {}
        self._updated_masters: set[str] = set()
        self._allreduce: Any = None
        super().__init__(
            run, engine.module, get_base_optimizer(engine), compressor=compressor, resume=resume, state=state, **options
        )

    def step(self) -> None:
        """Log the engine's step, if it made one; see `GradientLog.step`.

        Raises:
            SaveFailed: the engine made more than one step since the last call, or another rank is gone.
        """
        steps_done = int(self._engine.global_steps)
        if steps_done == self.steps_done:
            return
        if steps_done != self.steps_done + 1:
            raise SaveFailed(
                f"the engine has done {steps_done} steps, and its log {self.steps_done}: call log.step() after every "
                "engine.step(); after engine.load_checkpoint() close the log and begin another one"
            )
        if self._stepped and self._updated_masters != set(self._train_state.parameters):
            self._gap = True
            self._warn("the engine updated weights outside of its optimizer's step; the log goes on with a snapshot")
        super().step()

    def _create_train_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful]
    ) -> TrainState:
        return MasterState(self._engine, {name: state for name, state in states.items() if name != ENGINE})

    def _prepare(self, resume: Recovered | None) -> None:
        super()._prepare(resume)
        steps = int(self._engine.global_steps)
        if resume is not None and resume.step != steps:
            raise ConfigError(f"step {resume.step} was recovered, and the engine has done {steps}: recover it again")
        self.steps_done = self._last_snapshot_step = steps

    def _attach_compressor(self) -> None:
        """Replace DeepSpeed's averaging, unless the compressor is "none"."""
        if isinstance(self._compressor, Uncompressed):
            return
        assert isinstance(self._compressor, HookedCompressor)
        engine, compressor = self._engine, self._compressor
        compressor.attach_without_hooks(engine.module)
        group = engine.seq_data_parallel_group

        def allreduce_gradients(*args: Any, **kwargs: Any) -> None:
            if engine.is_gradient_accumulation_boundary():
                compressor.synchronize(group if group.size() > 1 else None)
                self._gradient_infos = compressor.take()

        self._allreduce = engine.allreduce_gradients = allreduce_gradients

    def _detach(self) -> None:
        super()._detach()
        if self._allreduce is not None and vars(self._engine).get("allreduce_gradients") is self._allreduce:
            del self._engine.allreduce_gradients
        self._allreduce = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Capture gradients; DeepSpeed calls the optimizer for all masters at once, or for some masters at a time."""
        train_state = self._get_master_state()
        names = train_state.get_master_names(optimizer.param_groups)
        if not self._stepped or names & self._updated_masters:  # a second update of a master: an error
            self._updated_masters, self._partition_capture = set(), None
            super()._before_step(optimizer, args, kwargs)
        elif self._partition_capture is not None and not self._broken:
            partitions = self._partition_capture
            self._hyper = train_state.hyper()
            self._run_guarded(lambda: partitions.copy_gradients(train_state, names))
        self._updated_masters |= names

    def _capture_gradients(self, buffer_bytes: int) -> None:
        train_state = self._get_master_state()
        # The masters' gradients are values of the module's dtype times one factor.
        dtype = self._engine.get_data_types()[0]
        half_dtype = dtype_name(dtype) if dtype.itemsize == 2 else None
        if train_state.partitioned:
            client = self._require_client()
            self._partition_capture = _PartitionCapture(self._own_entries, half_dtype, buffer_bytes, client)
            names = train_state.get_master_names(self._train_state.optimizer.param_groups)
            self._partition_capture.copy_gradients(train_state, names)
            self._pending = self._partition_capture.captured
            return
        captured = capture_gradients(
            train_state, self._own_entries, self._take_master_infos(), self._dense_only, buffer_bytes,
            self._require_client(),
        )
        hints = captured.message["hints"]
        if half_dtype is not None and hints["half"] is None:
            hints |= {"half": half_dtype, "search": True}
        self._pending = captured

    def _discard_gradients(self) -> None:
        self._gradient_infos = {}

    def _own_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._train_state.buffers())

    def _writes_tensor(self, path: tuple[str, ...], parameter: str | None) -> bool:
        return self._get_master_state().is_rank_local(path) or super()._writes_tensor(path, parameter)

    def _get_master_state(self) -> MasterState:
        assert isinstance(self._train_state, MasterState)
        return self._train_state

    def _take_master_infos(self) -> dict[nn.Parameter, GradientInfo]:
        """Return the collected information about the module's gradients by master, and reset it."""
        infos, self._gradient_infos = self._gradient_infos, {}
        by_name = {self._engine.param_names[parameter]: info for parameter, info in infos.items()}
        return {
            master: by_name[name] for name, master in self._train_state.parameters.items() if name in by_name
        }


class _PartitionCapture:
    """A capture in one slot of partitions whose gradients become available one after the other.

    Args:
        entries: parameters that this rank logs.
        half_dtype: name of the gradients' 16-bit dtype before scaling, or None.
        buffer_bytes: bytes to reserve for buffers of the model.
        client: client of the checkpointing process.
    """

    def __init__(
        self, entries: Sequence[ParameterEntry], half_dtype: str | None, buffer_bytes: int, client: WorkerClient
    ) -> None:
        layout = ArenaLayout()
        self._own_entries = entries
        self._offsets = [layout.add(entry.elements * parse_dtype(entry.dtype).itemsize) for entry in entries]
        buffers_offset = layout.add(buffer_bytes)
        slot = client.acquire_slot()
        self._arena, is_new_arena = client.ensure_arena(slot, layout.size)
        self._dense: list[dict[str, Any]] = []
        hints = {"scales": [1.0], "half": half_dtype, "search": half_dtype is not None}
        message = {"sparse": [], "dense": self._dense, "hints": hints}
        self.captured = CapturedStep(message, slot, buffers_offset, is_new_arena)

    def copy_gradients(self, train_state: MasterState, names: Collection[str]) -> None:
        """Copy the gradients of the named partitions; those of other partitions may not be final yet."""
        for index, entry in enumerate(self._own_entries):
            gradient = train_state.parameters[entry.name].grad
            if gradient is None or entry.name not in names:
                continue
            offset, dtype = self._offsets[index], parse_dtype(entry.dtype)
            self._arena.view(offset, entry.shape, dtype).copy_(gradient)
            self._dense.append({"param": index, "dtype": dtype_name(dtype), "at": offset})


def gradient_log(
    engine: Any, run: str | os.PathLike[str], *, compressor: str | GradientCompressor = "none",
    resume: Recovered | None = None, state: Mapping[str, Stateful] | None = None,
    snapshot_every: int | Literal["auto"] = "auto", batch: int | Literal["auto"] = "auto", mtbf: float | None = None,
    queue: int = 4, keep: int = 1, cores: Collection[int] | None = None, timeout: float = 300.0,
) -> EngineLog:
    """Log every step of an engine, so that `recover` restores the state after the last step; collective.

        log = dsq_ckpt.deepspeed.gradient_log(engine, "run")
        ...
        engine.step(); log.step()

    Args:
        engine: DeepSpeed engine.
        run: directory of the run, on storage that all ranks share.
        compressor: gradient compressor, in ZeRO stage 0 only; see `dsq_ckpt.lowdiff.GradientLog`. "none" does not
            change training.
        resume: result of `recover`.
        state: objects with a state besides the engine, by name; the engine's own scheduler is always logged.
        snapshot_every, batch, mtbf, queue, keep, cores, timeout: see `dsq_ckpt.lowdiff.GradientLog`.

    Raises:
        CheckpointExists: the run has a log, and `resume` is None.
        ConfigError: an argument is out of range, or steps of this engine cannot be replayed from gradients.
    """
    chosen = gradient_compressor(compressor)
    if not isinstance(chosen, Uncompressed):
        _check_compressor(engine, chosen)
    _check_state_names(state)
    return EngineLog(
        run, engine, compressor=chosen, resume=resume, state=state, snapshot_every=snapshot_every, batch=batch,
        mtbf=mtbf, queue=queue, keep=keep, cores=cores, timeout=timeout,
    )


def recover(
    engine: Any, run: str | os.PathLike[str], *, state: Mapping[str, Stateful] | None = None, replay_log: bool = True,
    timeout: float = 300.0,
) -> Recovered | None:
    """Restore an engine to the state after the last step of a run that is complete on disk; collective.

    Masters, moments, scheduler, counters and loss scaler are loaded from the snapshot. On each rank the basic optimizer
    replays the logged steps of its partitions. Then the module's weights are cast from the masters, as DeepSpeed does
    after every step.

    Args:
        engine: engine with the logged configuration, on the same number of ranks.
        run: directory of the run.
        state: further logged objects, by the same names.
        replay_log: see `dsq_ckpt.lowdiff.recover`.
        timeout: seconds to wait for checkpointing processes that still write.

    Returns:
        A `Recovered`; None on all ranks if the run has no snapshot.

    Raises:
        LoadFailed: stage, number of ranks, model or optimizer differ from the log. Nothing has changed.
        CorruptCheckpoint: no snapshot can be read. Nothing has changed.
    """
    expect_flags(replay_log=replay_log)
    _check_state_names(state)
    comm = communicator(None)
    train_state = run_on_all_ranks(comm, lambda: MasterState(engine, state), LoadFailed)
    with train_state.expose_masters():
        recovered = recover_train_state(
            resolve_local_path(run), train_state, comm, replay_log=replay_log, memory=False, timeout=timeout
        )
    if recovered is not None:
        create_refresh(engine)()
    return recovered


def _check_compressor(engine: Any, compressor: GradientCompressor) -> None:
    stage = int(engine.zero_optimization_stage())
    if stage:
        raise ConfigError(
            f"compressor '{compressor.spec}' with ZeRO stage {stage}: DeepSpeed averages gradients itself there, while "
            "the backward pass is running; leave compressor out, what is logged is exact in two bytes per parameter"
        )
    if not isinstance(compressor, HookedCompressor) or not engine.gradient_average:
        raise ConfigError(
            f"compressor '{compressor.spec}' cannot average gradients in DeepSpeed's place"
            + ("" if engine.gradient_average else ", which sums them (gradient_average is off)")
        )


def _check_state_names(state: Mapping[str, Stateful] | None) -> None:
    if ENGINE in (state or {}):
        raise ConfigError(f"'{ENGINE}' in state= is the name of the engine's own state; choose another one")
