"""What LowDiff and LowDiff+ have in common in the training process: steps and snapshots handed to checkpointing
processes that may die, on ranks that decide together.
"""

from __future__ import annotations

import atexit
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

from dsq_ckpt.distributed.comm import communicator, run_on_all_ranks
from dsq_ckpt.errors import ConfigError, SaveFailed
from dsq_ckpt.kernels.scan import identical
from dsq_ckpt.lowdiff import snapshots
from dsq_ckpt.lowdiff.capture import Captured, put_buffers
from dsq_ckpt.lowdiff.change_detector import ChangeDetector
from dsq_ckpt.lowdiff.recovery import Recovered
from dsq_ckpt.lowdiff.train_state import Stateful, TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import Layout, ProcessGone, nbytes
from dsq_ckpt.lowdiff.worker_group import WorkerGroup
from dsq_ckpt.storage.paths import local_path


def recovered_or_none(resume: Any) -> Recovered | None:
    """What a log goes on from, as it was given.

    Raises:
        ConfigError: it is something else.
    """
    if resume is None or isinstance(resume, Recovered):
        return resume
    raise ConfigError(f"resume is {resume!r}; expected what dsq_ckpt.lowdiff.recover() returned, or None")


_Self = TypeVar("_Self", bound="Recorder")
_Parameters = ParamSpec("_Parameters")


def _timed(
    method: Callable[Concatenate[Recorder, _Parameters], None]
) -> Callable[Concatenate[Recorder, _Parameters], None]:
    """Have a method count what it takes."""
    @wraps(method)
    def timed(self: Recorder, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        started = time.perf_counter()
        try:
            method(self, *args, **kwargs)
        finally:
            self.spent += time.perf_counter() - started

    return timed


class Recorder(WorkerGroup):
    """Hands every step of a training loop to a checkpointing process; see `GradientLog` for the arguments.

    Attributes:
        steps_done: optimizer steps done, with those before a recovery.
        spent: seconds that training spent here, between backward passes.
    """

    def __init__(
        self, run: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, *,
        resume: Recovered | None, state: Mapping[str, Stateful] | None, base: str | Mapping[str, Any],
        queue: int, keep: int, cores: Collection[int] | None, process_group: dist.ProcessGroup | None, timeout: float,
    ) -> None:
        resume = recovered_or_none(resume)
        for hook in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
            if isinstance(other := getattr(hook, "__self__", None), Recorder):
                raise ConfigError(f"this optimizer is logged already, into '{other.run}'; close() that first")
        comm, states = communicator(process_group), state or {}
        subject = self._subject_of(model, optimizer, states)
        super().__init__(local_path(run), subject, comm, base, queue, keep, cores, timeout)
        self.steps_done = 0 if resume is None else resume.step
        self.spent = 0.0
        self._lossy = resume is not None and resume.lossy
        self._watch = ChangeDetector(subject.watched())
        self._optimizer_state = optimizer.state
        self._buffers: dict[str, torch.Tensor] = {}
        self._hyper: list[dict[str, Any]] = []
        self._stepped = False
        self._snapshot_at = self.steps_done
        run_on_all_ranks(comm, lambda: self._prepare(resume))
        self._agree()
        try:
            run_on_all_ranks(comm, lambda: self._attach(resume))
        except BaseException:
            with suppress(Exception):  # this rank may have no hook
                self._detach()
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(self._after_step),
        ]
        self._in_order()
        self._last_step, self._waited = time.perf_counter(), 0.0
        self._begin_first()
        self._last_step = time.perf_counter()

    # What LowDiff and LowDiff+ do each in its own way.

    def _subject_of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful]
    ) -> TrainState:
        """What is logged, as it is now."""
        return TrainState(model, optimizer, states)

    @abstractmethod
    def _attach(self, resume: Recovered | None) -> None:
        """Hook into the synchronization of gradients."""

    @abstractmethod
    def _capture(self, room: int) -> None:
        """Put the gradients that the optimizer is about to use into shared memory, and set `_pending`.

        Args:
            room: bytes for buffers of the model.
        """

    @abstractmethod
    def _discard(self) -> None:
        """Forget the gradients of a step that is not logged."""

    @abstractmethod
    def _snapshot_due(self) -> bool:
        """Whether the state is to be sent, as all ranks find it at the same step."""

    @abstractmethod
    def _set(self, settings: Mapping[str, int]) -> None:
        """What rank 0 decided."""

    def _all_sent(self, step: int) -> None:
        """All ranks sent this step, and none of them is saving."""

    def _about(self) -> dict[str, Any]:
        """What a snapshot says of the log, besides what all say."""
        return {"compressor": "none", "tuner": None}

    # What the user calls.

    @property
    def logging(self) -> bool:
        """Whether steps that are done now can be recovered.

        They cannot after a checkpointing process failed, or something else than the optimizer changed the parameters,
        until the next snapshot is on disk.
        """
        return self._state == "running" and not self._broken and not self._gap and self._needed is None

    @_timed
    def step(self) -> None:
        """End an iteration: what it did goes on its way.

        Raises:
            SaveFailed: another rank is gone. What goes wrong with the log itself is a warning, and training goes on.
        """
        self.steps_done += 1
        if not self._hooks:  # closed
            return
        self._measure()
        agreed = self._consensus.settle()
        self._whole = self._whole or bool(agreed["whole"])
        self._set({name: agreed[name] for name in self._settings()})
        if self._state == "running" and agreed["broken"]:
            self._suspend()
        elif self._state == "running" and self._subject.changed():
            self._broken = True  # all ranks stop at the next step, and begin anew with what is there then
        elif self._state == "running":
            if not (agreed["saving"] or agreed["wanted"]):
                self._guarded(lambda: self._all_sent(self.steps_done - 1))
            self._guarded(self._send_step)
        self._stepped = False
        self._in_order()
        if self._state == "running" and (self._snapshot_due() or agreed["wanted"]) and not agreed["saving"]:
            self._guarded(self._send_snapshot)
        elif self._state == "waiting" and agreed["restart"]:
            self._broken = False
            self._state, self._starting_since = "starting", time.monotonic()
            self._guarded(self._anew)
        elif self._state == "starting":
            if agreed["broken"]:
                self._suspend()
            elif not agreed["starting"]:
                self._join()
                self._state = "running"
                self._guarded(self._send_snapshot)
        self._post()

    def close(self) -> None:
        """Write all that was handed over, and stop; training may go on without."""
        self._close(done=True)

    def _close(self, done: bool) -> None:
        """Stop; `done`: because training is, not because it failed."""
        if done and self._gap and self._comm.size == 1 and self._state == "running":
            self._guarded(self._last_snapshot)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._detach()
        atexit.unregister(self._at_exit)
        if self._handle is not None:
            if (problem := self._handle.close(self._timeout, done)) is not None:
                self._warn(f"{problem}. The last steps may not be in the log")
            self._handle = None
        self._state = "waiting"

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(done=kind is None)

    def _measure(self) -> None:
        """How long the step took, without what it waited for its log."""
        now = time.perf_counter()
        waited = 0.0 if self._handle is None else self._handle.waited
        self._observe(iteration=max(now - self._last_step - (waited - self._waited), 0.0))
        self._last_step, self._waited = now, waited

    # What the optimizer tells.

    @_timed
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepped:
            raise SaveFailed("optimizer.step() ran twice since the last log.step(): call log.step() after each")
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first is the optimizer
            raise ConfigError("optimizer.step(closure) cannot be logged: call backward() before, and step() without it")
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise ConfigError("with a GradScaler, fused optimizers skip steps by themselves; make it with fused=False")
        self._stepped = True
        if self._state != "running" or self._broken or self._subject.changed():
            self._discard()
            return
        if self._has_gap() or not self._is_last():
            self._gap = True
            self._discard()
            return
        self._hyper = self._subject.hyper()
        self._guarded(lambda: self._capture(self._buffer_room()))

    def _buffer_room(self) -> int:
        """Bytes that buffers of the model may take in a slot."""
        return sum(nbytes(buffer) + 64 for _, buffer in self._own_buffers())

    def _own_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Buffers of the model that this rank logs."""
        return [] if self._comm.rank else list(self._subject.buffers())

    def _brings(self, path: tuple[str, ...], parameter: str | None) -> bool:
        """Whether this rank brings a tensor to a snapshot, of a parameter or of none."""
        return self._comm.rank == (0 if parameter is None else self._owner[parameter])

    @_timed
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._watch.look()

    def _has_gap(self) -> bool:
        """Whether gradients do not lead to the parameters as they are, so that the next to be sent is a snapshot."""
        replaced = self._subject.optimizer.state is not self._optimizer_state
        if replaced or self._watch.changed():
            self._gap = True
            self._optimizer_state = self._subject.optimizer.state
            what = "the state of the optimizer was" if replaced else "parameters were"
            self._warn(
                f"{what} changed by something other than the optimizer, of which gradients tell nothing; whenever that "
                "happens, the log goes on with a snapshot"
            )
        return self._gap

    def _anew(self) -> None:
        """Start a checkpointing process for what there is to log now.

        Raises:
            ProcessGone: that cannot be logged.
        """
        before = self._subject
        try:
            self._subject = self._subject_of(before.model, before.optimizer, before.states)
        except ConfigError as error:
            raise ProcessGone(str(error)) from error
        self._watch = ChangeDetector(self._subject.watched())
        self._optimizer_state = self._subject.optimizer.state
        self._start()

    def _is_last(self) -> bool:
        """Whether no hook comes after this one that could change gradients, or hyperparameters."""
        hooks: Any = getattr(self._subject.optimizer, "_optimizer_step_pre_hooks", None)
        return not hooks or next(reversed(hooks.values())) == self._before_step

    def _in_order(self) -> None:
        """Let the hook before a step be the last of all, since others may change gradients, and the one after it the
        first, since others may change parameters.
        """
        for kind, own, last in (("pre", self._before_step, True), ("post", self._after_step, False)):
            hooks: Any = getattr(self._subject.optimizer, f"_optimizer_step_{kind}_hooks", {})
            for key in [key for key, hook in hooks.items() if hook == own]:
                hooks.move_to_end(key, last=last)

    # What is sent.

    def _send_step(self) -> None:
        """The step that was captured, with what it left behind."""
        assert self._handle is not None
        pending, self._pending = self._pending, None
        if self._has_gap():
            if pending is not None:
                self._release(pending)
            return
        if pending is None:
            if self._stepped:  # it could not be captured, so nothing after it can be replayed
                self._gap = True
                return
            slot = self._handle.slot()
            pending = Captured({"sparse": [], "dense": [], "hints": {"scales": [1.0]}}, slot, 0, False)
        message: dict[str, Any] = {"kind": "step", "step": self.steps_done, "slot": pending.slot, **pending.message}
        hyper, new = self._subject.hyper(), pending.new
        message |= {
            "stepped": self._stepped, "hyper": self._hyper if self._stepped else None, "buffers": [],
            "after": {"hyper": None if self._stepped and hyper == self._hyper else hyper, "states": {}},
        }
        if self._comm.rank == 0:
            message["after"]["states"] = self._subject.states_now()
        changed = [(name, buffer) for name, buffer in self._own_buffers()
                   if name not in self._buffers or not identical(self._buffers[name], buffer)]
        if changed:
            put = put_buffers(changed, self._handle, pending.slot, pending.buffers_at)
            if put is None:
                self._gap = True
                self._release(pending)
                return
            message["buffers"], new = put[0], new or put[1]
            self._buffers |= {name: buffer.clone() for name, buffer in changed}
        arena = self._handle.arena(pending.slot) if new else None
        self._handle.send_when(pending.copied, message, arena)

    def _release(self, pending: Captured) -> None:
        """Give a slot back, once nothing is written into it any more."""
        if pending.copied is not None:
            pending.copied.synchronize()
        self._running().release(pending.slot)

    def _last_snapshot(self) -> None:
        """The state at the end, which gradients do not lead to."""
        self._running().wait("saved", self._timeout)
        self._send_snapshot()
        self._running().wait("saved", self._timeout)

    def _send_snapshot(self) -> None:
        """All of the state that this rank has to bring, copied, and on its way."""
        assert self._handle is not None
        started = time.perf_counter()
        rank = self._comm.rank
        pieces: list[tuple[tuple[str, ...], torch.Tensor]] = [
            (path, tensor) for path, tensor, parameter in self._subject.tensors() if self._brings(path, parameter)
        ]
        pieces += [
            ((*snapshots.RESIDUAL, str(rank), name), tensor) for name, tensor in self._held_back().items()
        ]
        layout, told, copies = Layout(), [], {}
        for path, tensor in pieces:
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)  # tied: once
            if key not in copies or not tensor.numel():
                copies[key] = (layout.add(nbytes(tensor)), tensor)
            told.append([list(path), dtype_name(tensor.dtype), list(tensor.shape), copies[key][0]])
        arena, new = self._handle.staging(layout.size)
        for at, tensor in copies.values():
            arena.view(at, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        message = {"kind": "snapshot", "step": self.steps_done, "tensors": told, "meta": self._meta()}
        if self._gap or self._fresh:
            self._needed, self._fresh = self.steps_done, False
        self._handle.saving = True
        self._handle.send(message, arena if new else None)
        self._snapshot_at = self.steps_done
        self._gap = False
        self._watch.look()
        # Copies are compared, since batch normalization changes its buffers without counting that.
        self._buffers = {name: buffer.clone() for name, buffer in self._own_buffers()}
        self._observe(stall=time.perf_counter() - started)

    def _meta(self) -> dict[str, Any]:
        subject = self._subject
        return {
            "session": self._session, "step": self.steps_done, "ranks": self._comm.size,
            "entries": [list(entry) for entry in self._entries], "optimizer": type(subject.optimizer).__name__,
            "hyper": subject.hyper(), "states": subject.states_now(), "plain": subject.plain_state(),
            "state_keys": subject.state_keys(), "aliases": subject.aliases, "layout": subject.layout,
            "lossy": self._lossy, **self._about(),
        }
