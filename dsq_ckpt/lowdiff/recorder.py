"""What LowDiff and LowDiff+ have in common in the training process: steps and snapshots handed to checkpointing
processes that may die, on ranks that decide together.
"""

from __future__ import annotations

import atexit
import os
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dsq_ckpt import gc
from dsq_ckpt.comm import communicator, together
from dsq_ckpt.errors import CheckpointExists, ConfigError, SaveFailed
from dsq_ckpt.lowdiff import segments, snapshots
from dsq_ckpt.lowdiff.capture import Captured, put_buffers
from dsq_ckpt.lowdiff.consensus import Consensus, cpu_group
from dsq_ckpt.lowdiff.encoding import identical
from dsq_ckpt.lowdiff.handle import Handle, Layout, NotSparse, ProcessGone, nbytes
from dsq_ckpt.lowdiff.locks import wait_for_writers
from dsq_ckpt.lowdiff.memory import Survivors
from dsq_ckpt.lowdiff.recovery import Recovered
from dsq_ckpt.lowdiff.subject import Stateful, Subject, dtype_name
from dsq_ckpt.lowdiff.watch import Watch
from dsq_ckpt.manifest import local_path

_POSTED = ("broken", "starting", "saving", "wanted", "whole", "restart")
_START = 120.0
_PAUSES = (0.0, 5.0, 30.0, 120.0, 600.0)
"""Seconds before the checkpointing processes are started again, after as many failures in a row."""

_Self = TypeVar("_Self", bound="Recorder")


class Recorder(ABC):
    """Hands every step of a training loop to a checkpointing process; see `GradientLog` for the arguments.

    The log is *running*, or *waiting* until rank 0 says that processes are started again, or *starting*. What happens
    is decided by all ranks together, a step late (`Consensus`), so that all of them do it at the same step.

    Attributes:
        steps_done: optimizer steps done, with those before a recovery.
    """

    def __init__(
        self, run: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, *,
        resume: Recovered | None, state: Mapping[str, Stateful] | None, base: str | Mapping[str, Any],
        queue: int, keep: int, cores: Collection[int] | None, process_group: dist.ProcessGroup | None, timeout: float,
    ) -> None:
        for name, value in (("queue", queue), ("keep", keep)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; expected a positive number")
        self.run = local_path(run)
        self.steps_done = 0 if resume is None else resume.step
        self._subject = self._subject_of(model, optimizer, state or {})
        self._comm = communicator(process_group)
        self._config = snapshots.config_of(base)
        self._queue, self._keep, self._cores, self._timeout = queue, keep, sorted(cores or ()), timeout
        self._lossy = resume is not None and resume.lossy
        self._base = base
        self._needed: int | None = None
        """Steps done at the snapshot that nothing can be recovered without, until it is on disk."""
        self._told: set[str] = set()
        self._pending: Captured | None = None
        self._watch = Watch(self._subject.parameters.values())
        self._buffers: dict[str, torch.Tensor] = {}
        self._hyper: list[dict[str, Any]] = []
        self._stepped = False
        self._handle: Handle | None = None
        self._state: Literal["running", "starting", "waiting"] = "waiting"
        self._whole = self._gap = self._broken = self._fresh = False
        self._failures, self._retry_at = 0, 0.0
        self._snapshot_at = self.steps_done
        self._last_step, self._waited = time.perf_counter(), 0.0
        self._hooks: list[Any] = []
        together(self._comm, lambda: self._prepare(resume))
        self._seed, self._starts = self._comm.broadcast(uuid.uuid4().int >> 80), 0
        self._group = cpu_group(self._comm)
        self._consensus = Consensus((*_POSTED, *self._settings()), self._group)
        together(self._comm, lambda: self._attach(resume))
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(self._after_step),
        ]
        self._begin_first()

    # What LowDiff and LowDiff+ do each in its own way.

    def _subject_of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful]
    ) -> Subject:
        """What is logged, as it is now."""
        return Subject(model, optimizer, states)

    @abstractmethod
    def _attach(self, resume: Recovered | None) -> None:
        """Hook into the synchronization of gradients."""

    @abstractmethod
    def _detach(self) -> None:
        """Leave the gradients alone."""

    @abstractmethod
    def _begin(self) -> dict[str, Any]:
        """What the checkpointing process is told first, besides what all are."""

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

    def _settings(self) -> dict[str, int]:
        """What rank 0 decides for all."""
        return {}

    @abstractmethod
    def _set(self, settings: Mapping[str, int]) -> None:
        """What rank 0 decided."""

    def _started(self) -> None:  # noqa: B027
        """A checkpointing process was started."""

    def _sent(self, saving: bool) -> None:  # noqa: B027
        """A step was sent; `saving`: some rank is still saving."""

    def _held_back(self) -> Mapping[str, torch.Tensor]:
        """What of the gradients was not sent yet, by parameter."""
        return {}

    @abstractmethod
    def _observe(self, **measured: Any) -> None:
        """A measurement; see `tuning.Tuner.observe`."""

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
        if self._state == "running":
            if agreed["broken"] or self._subject.changed():
                self._suspend()
            else:
                self._guarded(self._send_step)
                if not self._gap:
                    self._guarded(lambda: self._sent(bool(agreed["saving"])))
        self._stepped = False
        if self._state == "running" and (self._snapshot_due() or agreed["wanted"]) and not agreed["saving"]:
            self._guarded(self._send_snapshot)
        elif self._state == "waiting" and agreed["restart"]:
            before = self._subject
            self._subject = self._subject_of(before.model, before.optimizer, before.states)
            self._watch = Watch(self._subject.parameters.values())
            self._broken = False
            self._state = "starting"
            self._guarded(self._start)
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
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._detach()
        atexit.unregister(self._at_exit)
        if self._handle is not None:
            if (problem := self._handle.close(self._timeout)) is not None:
                self._warn(f"{problem}. The last steps may not be in the log")
            self._handle = None
        self._state = "waiting"

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _measure(self) -> None:
        """How long the step took, without what it waited for its log."""
        now = time.perf_counter()
        waited = 0.0 if self._handle is None else self._handle.waited
        self._observe(iteration=max(now - self._last_step - (waited - self._waited), 0.0))
        self._last_step, self._waited = now, waited

    # What the optimizer tells.

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
        if self._has_gap():
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

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._watch.look()

    def _has_gap(self) -> bool:
        """Whether gradients do not lead to the parameters as they are, so that the next to be sent is a snapshot."""
        if self._watch.changed():
            self._gap = True
            self._warn(
                "parameters were changed by something other than the optimizer, of which gradients tell nothing; "
                "whenever that happens, the log goes on with a snapshot"
            )
        return self._gap

    # What is sent.

    def _send_step(self) -> None:
        """The step that was captured, with what it left behind."""
        assert self._handle is not None
        pending, self._pending = self._pending, None
        if self._has_gap():
            if pending is not None:
                self._handle.release(pending.slot)
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
            message["buffers"], grown = put_buffers(changed, self._handle, pending.slot, pending.buffers_at)
            new = new or grown
            self._buffers |= {name: buffer.clone() for name, buffer in changed}
        arena = self._handle.arena(pending.slot) if new else None
        self._handle.send_when(pending.copied, message, arena)

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

    # The checkpointing process.

    def _prepare(self, resume: Recovered | None) -> None:
        """What can be wrong before anything was started."""
        (self.run / segments.LOG).mkdir(parents=True, exist_ok=True)
        survivors = Survivors(self.run, self._comm)
        survivors.dismiss()  # its state was recovered, or is not wanted
        wait_for_writers(self.run, self._timeout)
        if resume is None and (found := snapshots.newest_first(self.run)):
            raise CheckpointExists(
                f"'{self.run}' has snapshots, the newest '{found[0][0].name}': recover from them and pass what "
                "`recover` returned as resume=, or log into another directory"
            )
        if self._comm.rank == 0:
            for path in segments.leftovers(self.run):
                path.unlink(missing_ok=True)
            gc.collect(self.run, 0)  # snapshots that were interrupted; nobody writes here now
        self._subject.hyper()
        self._subject.states_now()

    def _begin_first(self) -> None:
        """Start, and wait until the first snapshot is on disk: from then on every step counts."""
        try:
            together(self._comm, self._start)
            together(self._comm, lambda: self._running().wait("ready", _START))
            self._join()
            together(self._comm, self._send_snapshot)
            together(self._comm, self._saved)
        except BaseException:
            for hook in self._hooks:
                hook.remove()
            self._detach()
            if self._handle is not None:
                self._handle.close(None)
            raise
        self._state = "running"
        self._take(self._running())
        self._last_step = time.perf_counter()
        atexit.register(self._at_exit)

    def _saved(self) -> None:
        """Wait for the first snapshot."""
        handle = self._running()
        handle.wait("saved", self._timeout + _START)
        for report in handle.reports:
            if report["kind"] == "unsaved":
                raise SaveFailed(report["text"])

    def _start(self) -> None:
        self._session = self._comm_session()
        self._entries = self._subject.entries(self._comm.size)
        self._owner = {entry.name: entry.owner for entry in self._entries}
        self._own = [entry for entry in self._entries if entry.owner == self._comm.rank]
        self._handle = Handle({
            "run": str(self.run), "session": self._session, "rank": self._comm.rank, "ranks": self._comm.size,
            "parameters": [list(entry) for entry in self._own], "keep": self._keep,
            "config": snapshots.config_of(self._base, bool(self._held_back())).model_dump(mode="json"),
            "cores": self._cores,
            "threads": len(self._cores) or self._config.storage.thread_count(), "timeout": self._timeout,
            **self._begin(),
        }, self._queue)
        self._gap, self._fresh = False, True
        self._started()

    def _comm_session(self) -> str:
        """The name of a session, the same on all ranks without asking: each start gives the next."""
        self._starts += 1
        return f"{self._seed:012x}{self._starts:04x}"

    def _join(self) -> None:
        """Tell the checkpointing processes of each other; all ranks at the same step."""
        if self._group is None:
            return
        address: list[Any] = [None]
        if self._comm.rank == 0 and self._handle is not None and self._handle.ready is not None:
            address = [[self._handle.ready["host"], self._handle.ready["port"]]]
        try:
            dist.broadcast_object_list(address, group=self._group, group_src=0)
        except RuntimeError as error:
            raise SaveFailed(f"the ranks of the gradient log cannot reach each other: {error}") from error
        if address[0] is None:
            self._broken = True
            return
        host, port = address[0]
        self._guarded(lambda: self._running().send({"kind": "join", "host": host, "port": port}))

    def _running(self) -> Handle:
        assert self._handle is not None
        return self._handle

    def _suspend(self) -> None:
        """Stop logging on all ranks; the processes write what they were given. Rank 0 says when to go on."""
        if self._handle is not None:
            self._handle.close(None)
            self._handle = None
        self._pending = None
        self._state, self._broken = "waiting", False
        pause = _PAUSES[min(self._failures, len(_PAUSES) - 1)]
        self._failures += 1
        self._retry_at = time.monotonic() + pause

    def _guarded(self, work: Callable[[], None]) -> None:
        """Work that training goes on without."""
        if self._broken:
            return
        try:
            work()
        except (ProcessGone, OSError) as error:
            self._broken = True
            self._whole = self._whole or isinstance(error, NotSparse)
            self._warn(f"{error}. Training goes on; the log goes on with a snapshot as soon as it can")

    def _post(self) -> None:
        """Tell the other ranks how this one stands."""
        if self._handle is not None:
            self._guarded(lambda: self._take(self._running()))
        self._consensus.post({
            "broken": self._broken, "wanted": self._gap, "whole": self._whole,
            "saving": self._handle is not None and self._handle.saving,
            "starting": self._state == "starting" and (self._handle is None or self._handle.ready is None),
            "restart": self._comm.rank == 0 and self._state == "waiting" and time.monotonic() >= self._retry_at
            and bool(self._hooks),
            **(self._settings() if self._comm.rank == 0 else {}),
        })

    def _take(self, handle: Handle) -> None:
        handle.poll()
        reports, handle.reports = handle.reports, []
        for report in reports:
            if report["kind"] == "snapshot":
                self._observe(snapshot=(report["seconds"], report["bytes"]))
                self._failures = 0
                if self._needed is not None and report["step"] >= self._needed:
                    self._needed = None
            elif report["kind"] == "unsaved":
                self._warn(f"{report['text']}. Training goes on, and so does its replica; it is saved again later")
            elif report["kind"] == "written":
                count = report["last"] - report["first"] + 1
                self._observe(batch=(report["seconds"], report["bytes"], count), encoding=report["encoding"])

    def _warn(self, text: str) -> None:
        """Say something once."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text if self._comm.size == 1 else f"rank {self._comm.rank}: {text}", stacklevel=4)

    def _at_exit(self) -> None:
        if self._hooks:
            self.close()
