"""The common part of LowDiff and LowDiff+ in the training process: sending steps and snapshots to a checkpointing
process that may fail, with the same decisions on all ranks.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dsq_ckpt.core.arguments import expect_run
from dsq_ckpt.distributed.comm import communicator, run_on_all_ranks
from dsq_ckpt.engine.tied import get_memory_key
from dsq_ckpt.errors import ConfigError, SaveFailed
from dsq_ckpt.kernels.scan import bitwise_equal
from dsq_ckpt.lowdiff import snapshots
from dsq_ckpt.lowdiff.capture import CapturedStep, copy_buffers
from dsq_ckpt.lowdiff.change_detector import ChangeDetector
from dsq_ckpt.lowdiff.recovered import Recovered, check_resume
from dsq_ckpt.lowdiff.train_state import Stateful, TrainState, dtype_name, format_differing_names
from dsq_ckpt.lowdiff.worker_client import ArenaLayout, ProcessGone, nbytes
from dsq_ckpt.lowdiff.worker_group import WorkerGroup
from dsq_ckpt.storage.paths import resolve_local_path

_Self = TypeVar("_Self", bound="Recorder")
_Parameters = ParamSpec("_Parameters")


def _count_spent_time(
    method: Callable[Concatenate[Recorder, _Parameters], None]
) -> Callable[Concatenate[Recorder, _Parameters], None]:
    """Decorate a method so that its duration is added to `spent`."""
    @wraps(method)
    def timed(self: Recorder, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        started = time.perf_counter()
        try:
            method(self, *args, **kwargs)
        finally:
            self.spent += time.perf_counter() - started

    return timed


class Recorder(WorkerGroup):
    """A recorder that sends every step of a training loop to a checkpointing process; see `GradientLog`.

    Attributes:
        steps_done: optimizer steps done, including those before a recovery.
        spent: seconds that training spent in the recorder, between backward passes.
    """

    def __init__(
        self, run: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, *,
        resume: Recovered | None, state: Mapping[str, Stateful] | None, base: str | Mapping[str, Any],
        queue: int, keep: int, cores: Collection[int] | None, process_group: dist.ProcessGroup | None, timeout: float,
    ) -> None:
        expect_run(run)
        resume = check_resume(resume)
        for hook in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
            if isinstance(other := getattr(hook, "__self__", None), Recorder):
                raise ConfigError(f"this optimizer is logged already, into '{other.run}'; close() that first")
        comm, states = communicator(process_group), state or {}
        train_state = self._create_train_state(model, optimizer, states)
        super().__init__(resolve_local_path(run), train_state, comm, base, queue, keep, cores, timeout)
        self.steps_done = 0 if resume is None else resume.step
        self.spent = 0.0
        self._lossy = resume is not None and resume.lossy
        self._change_detector = ChangeDetector(train_state)
        self._buffers: dict[str, torch.Tensor] = {}
        self._hyper: list[dict[str, Any]] = []
        self._last_snapshot_step = self.steps_done
        run_on_all_ranks(comm, lambda: self._prepare(resume))
        self._set_up_consensus()
        try:
            run_on_all_ranks(comm, lambda: self._attach(resume))
        except BaseException:
            with suppress(Exception):  # this rank may have no hook
                self._detach()
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(self._after_step),
        ]
        self._reorder_hooks()
        self._last_step_time, self._last_waited = time.perf_counter(), 0.0
        self._start_first_session(resume)
        self._last_step_time = time.perf_counter()

    # Methods that LowDiff and LowDiff+ implement.

    def _create_train_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful]
    ) -> TrainState:
        """Return the current train state of a model and its optimizer."""
        return TrainState(model, optimizer, states)

    @abstractmethod
    def _attach(self, resume: Recovered | None) -> None:
        """Register the hooks on gradients."""

    @abstractmethod
    def _capture_gradients(self, buffer_bytes: int) -> None:
        """Copy the gradients of the next optimizer step into shared memory, and set `_pending`.

        Args:
            buffer_bytes: bytes to reserve for buffers of the model.
        """

    @abstractmethod
    def _discard_gradients(self) -> None:
        """Drop the gradients of a step that is not logged."""

    @abstractmethod
    def _snapshot_due(self) -> bool:
        """Return whether a snapshot is due. The result must be equal on all ranks at the same step."""

    @abstractmethod
    def _apply_settings(self, settings: Mapping[str, int]) -> None:
        """Apply settings that rank 0 proposed."""

    def _on_sent_by_all_ranks(self, step: int) -> None:
        """Handle a step that all ranks have sent, while no rank saves a snapshot."""

    def _log_metadata(self) -> dict[str, Any]:
        """Return the metadata that this kind of log adds to a snapshot."""
        return {"compressor": "none", "tuner": None}

    # Public interface.

    @property
    def logging(self) -> bool:
        """True if the current steps can be recovered.

        False after a checkpointing process failed, and after something other than the optimizer's step changed
        parameters or the structure of model and optimizer, until the next snapshot is on disk.
        """
        return self._state == "running" and not self._broken and not self._gap and self._required_snapshot is None

    @_count_spent_time
    def step(self) -> None:
        """End an iteration, and send its step; collective.

        Raises:
            SaveFailed: another rank ended. Failures of the log are warnings, and training continues.
        """
        self.steps_done += 1
        if not self._hooks:  # closed
            return
        self._measure_iteration()
        agreed = self._consensus.collect()
        self._dense_only = self._dense_only or bool(agreed["whole"])
        self._apply_settings({name: agreed[name] for name in self._proposed_settings()})
        if self._state == "running" and agreed["broken"]:
            self._suspend()
        elif self._state == "running":
            if not (agreed["saving"] or agreed["wanted"]):
                self._run_guarded(lambda: self._on_sent_by_all_ranks(self.steps_done - 1))
            self._run_guarded(self._send_step)
        self._stepped = False
        self._reorder_hooks()
        if self._state == "running" and (self._snapshot_due() or agreed["wanted"]) and not agreed["saving"]:
            self._run_guarded(self._send_snapshot)
        elif self._state == "waiting" and agreed["restart"]:
            self._broken = False
            self._state, self._starting_since = "starting", time.monotonic()
            self._run_guarded(self._restart)
        elif self._state == "starting":
            if agreed["broken"]:
                self._suspend()
            elif not agreed["starting"]:
                self._exchange_address()
                self._state = "running"
                self._run_guarded(self._send_snapshot)
        self._post_state()

    def close(self) -> None:
        """Stop the log after all sent steps are written, and warn of missing steps. Training may continue."""
        self._close(done=True)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(done=kind is None)

    def _measure_iteration(self) -> None:
        """Record the duration of the iteration, without the time spent waiting for the log."""
        now = time.perf_counter()
        waited = 0.0 if self._client is None else self._client.waited
        self._observe(iteration=max(now - self._last_step_time - (waited - self._last_waited), 0.0))
        self._last_step_time, self._last_waited = now, waited

    # Hooks of the optimizer.

    @_count_spent_time
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepped:
            raise SaveFailed("optimizer.step() ran twice since the last log.step(): call log.step() after each")
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first is the optimizer
            raise ConfigError("optimizer.step(closure) cannot be logged: call backward() before, and step() without it")
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise ConfigError("with a GradScaler, fused optimizers skip steps by themselves; make it with fused=False")
        self._stepped = True
        if self._state != "running" or self._broken:
            self._discard_gradients()
            return
        if self._check_gap(self.steps_done + 1) or not self._is_last_hook():
            self._gap = True
            self._discard_gradients()
            return
        self._run_guarded(self._capture_step)

    def _capture_step(self) -> None:
        self._hyper = self._train_state.hyper()
        self._capture_gradients(self._buffer_bytes())

    def _buffer_bytes(self) -> int:
        """Return an upper bound of the bytes that buffers of the model take in a slot."""
        return sum(nbytes(buffer) + 64 for _, buffer in self._own_buffers())

    def _own_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers of the model that this rank logs."""
        return [] if self._comm.rank else list(self._train_state.buffers())

    def _writes_tensor(self, path: tuple[str, ...], parameter: str | None) -> bool:
        """Return whether this rank writes a tensor of a snapshot, which belongs to a parameter or to none."""
        return self._comm.rank == (0 if parameter is None else self._owners[parameter])

    @_count_spent_time
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._change_detector.record()

    def _check_gap(self, step: int) -> bool:
        """Warn and set `_gap` if gradients do not reproduce the current state; return `_gap`.

        Args:
            step: current step, which is not logged after a change.
        """
        if (change := self._train_state.describe_change() or self._describe_buffer_change()) is not None:
            self._gap = True
            self._warn(
                f"{change}, which gradients do not contain; steps from {step} on are not logged until the log goes on "
                "with a snapshot, as soon as it can, and so whenever that happens", change
            )
        elif (change := self._change_detector.describe_change()) is not None:
            self._gap = True
            self._warn(
                f"{change} changed by something other than the optimizer, which gradients do not contain; whenever "
                "that happens, the log goes on with a snapshot"
            )
        return self._gap

    def _describe_buffer_change(self) -> str | None:
        """Describe changes of buffers' names or shapes since the last snapshot for a warning; return None without any.

        The last snapshot does not fit the model after such a change.
        """
        old, new = ({name: self._required_shape(buffer) for name, buffer in buffers}
                       for buffers in (self._buffers.items(), self._own_buffers()))
        return None if old == new else f"buffers were added, removed or resized{format_differing_names(old, new)}"

    def _required_shape(self, buffer: torch.Tensor) -> torch.Size | None:
        """Return the shape that a buffer must keep between snapshots; None if the shape may change."""
        return buffer.shape

    def _restart(self) -> None:
        """Start a checkpointing process for the current train state."""
        self._refresh_train_state()
        self._start()

    def _refresh_train_state(self) -> None:
        """Replace the train state by that of the current model and optimizer.

        Raises:
            ProcessGone: the new train state cannot be logged.
        """
        before = self._train_state
        try:
            self._train_state = self._create_train_state(before.model, before.optimizer, before.states)
            self._snapshot_metadata()
        except ConfigError as error:
            raise ProcessGone(str(error)) from error
        self._change_detector = ChangeDetector(self._train_state)

    def _is_last_hook(self) -> bool:
        """Return whether `_before_step` is the last hook, so that no other hook can change gradients after it."""
        hooks: Any = getattr(self._train_state.optimizer, "_optimizer_step_pre_hooks", None)
        return not hooks or next(reversed(hooks.values())) == self._before_step

    def _reorder_hooks(self) -> None:
        """Move `_before_step` to the end, since other hooks may change gradients, and `_after_step` to the front, since
        other hooks may change parameters.
        """
        for kind, own_hook, last in (("pre", self._before_step, True), ("post", self._after_step, False)):
            hooks: Any = getattr(self._train_state.optimizer, f"_optimizer_step_{kind}_hooks", {})
            for key in [key for key, hook in hooks.items() if hook == own_hook]:
                hooks.move_to_end(key, last=last)

    # Messages to the checkpointing process.

    def _send_step(self) -> None:
        """Send the captured step, with hyperparameters, states and buffers after it."""
        assert self._client is not None
        pending, self._pending = self._pending, None
        if self._check_gap(self.steps_done):
            if pending is not None:
                self._release_slot(pending)
            return
        if pending is None:
            if self._stepped:  # gradients of the step were not captured, so no later step can be replayed
                self._gap = True
                return
            slot = self._client.acquire_slot()
            pending = CapturedStep({"sparse": [], "dense": [], "hints": {"scales": [1.0]}}, slot, 0, False)
        message: dict[str, Any] = {"kind": "step", "step": self.steps_done, "slot": pending.slot, **pending.message}
        hyper, needs_mapping = self._train_state.hyper(), pending.needs_mapping
        message |= {
            "stepped": self._stepped, "hyper": self._hyper if self._stepped else None, "buffers": [],
            "after": {"hyper": None if self._stepped and hyper == self._hyper else hyper, "states": {}},
        }
        if self._comm.rank == 0:
            message["after"]["states"] = self._train_state.states_to_plain()
        changed = [(name, buffer) for name, buffer in self._own_buffers()
                   if name not in self._buffers or not bitwise_equal(self._buffers[name], buffer)]
        if changed:
            copied = copy_buffers(changed, self._client, pending.slot, pending.buffers_at)
            if copied is None:
                self._gap = True
                self._release_slot(pending)
                return
            message["buffers"], needs_mapping = copied[0], needs_mapping or copied[1]
            self._buffers |= {name: buffer.clone() for name, buffer in changed}
        arena = self._client.arena(pending.slot) if needs_mapping else None
        self._client.send_when(pending.copy_event, message, arena)

    def _release_slot(self, pending: CapturedStep) -> None:
        """Release a slot after all copies into it are complete."""
        if pending.copy_event is not None:
            pending.copy_event.synchronize()
        self._require_client().release(pending.slot)

    def _send_snapshot(self) -> None:
        """Copy this rank's share of the state into shared memory, and send it as a snapshot."""
        assert self._client is not None
        started = time.perf_counter()
        if self._train_state.describe_change() is not None:
            self._refresh_train_state()
            self._assign_parameters()
            self._on_process_started()
        rank = self._comm.rank
        snapshot_tensors: list[tuple[tuple[str, ...], torch.Tensor]] = [
            (path, tensor) for path, tensor, parameter in self._train_state.tensors()
            if self._writes_tensor(path, parameter)
        ]
        snapshot_tensors += [
            ((*snapshots.RESIDUAL, str(rank), name), tensor) for name, tensor in self._residuals().items()
        ]
        layout, descriptions, copies = ArenaLayout(), [], {}
        for path, tensor in snapshot_tensors:
            key = get_memory_key(tensor), tensor.shape  # tied: one copy
            if key not in copies or not tensor.numel():
                copies[key] = (layout.add(nbytes(tensor)), tensor)
            descriptions.append([list(path), dtype_name(tensor.dtype), list(tensor.shape), copies[key][0]])
        arena, needs_mapping = self._client.ensure_staging(layout.size)
        for offset, tensor in copies.values():
            arena.view(offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        message = dict(
            kind="snapshot", step=self.steps_done, tensors=descriptions, meta=self._snapshot_metadata(),
            model=snapshots.describe_model(self._train_state.model, self._config),
        )
        if self._gap or self._needs_first_snapshot:
            self._required_snapshot, self._needs_first_snapshot = self.steps_done, False
        self._client.saving = True
        self._client.send(message, arena if needs_mapping else None)
        self._last_snapshot_step = self.steps_done
        self._gap = False
        self._change_detector.record()
        # Buffers are compared by value: batch normalization changes them without a new version number.
        self._buffers = {name: buffer.clone() for name, buffer in self._own_buffers()}
        self._observe(stall=time.perf_counter() - started)

    def _snapshot_metadata(self) -> dict[str, Any]:
        train_state = self._train_state
        return {
            "session": self._session, "step": self.steps_done, "ranks": self._comm.size,
            "entries": [list(entry) for entry in self._entries], "optimizer": type(train_state.optimizer).__name__,
            "hyper": train_state.hyper(), "states": train_state.states_to_plain(), "plain": train_state.plain_state(),
            "state_keys": train_state.state_keys(), "aliases": train_state.aliases, "layout": train_state.layout,
            "lossy": self._lossy, **self._log_metadata(),
        }
