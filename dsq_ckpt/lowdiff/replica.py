"""`Replica`: model and optimizer kept up to date in another process, without compressed gradients.

LowDiff+ (Yao et al., section VI): gradients are handed over while the backward pass goes on, a checkpointing process on
the CPU applies them to its replica, which is saved as often as the disk keeps up, and which survives the training
process.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.kernels.scan import factor_between
from dsq_ckpt.lowdiff.capture import Captured
from dsq_ckpt.lowdiff.encoding import scales_from
from dsq_ckpt.lowdiff.plain import to_plain
from dsq_ckpt.lowdiff.recorder import Recorder
from dsq_ckpt.lowdiff.recovery import Recovered
from dsq_ckpt.lowdiff.streamer import GradientStreamer
from dsq_ckpt.lowdiff.train_state import Stateful, TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import ProcessGone

_STANDARD = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, fused=True))) | {
    "step", "_opt_called", "_warned_capturable_if_run_uncaptured",  # schedulers and CUDA graphs leave them
}
_SEEN, _WITNESSES = 8, 64
"""Parameters, and elements of each, that tell what gradients were multiplied by."""
_SLOWED = 0.01


class Replica(Recorder):
    """Keeps a replica of a training loop's state in another process, after every step.

    `replica.step()` ends an iteration, as that of `GradientLog`. A new training process on the same host gets the state
    from memory (`recover`); after a failure of the host, it gets the last one that was saved.

    The replica does what the optimizer does, on the CPU: bit for bit the same where training is on the CPU too, and
    within rounding where it is on a GPU.

    Args:
        run: directory of the run, on storage that all ranks share.
        model: under DDP, or plain in a single process.
        optimizer: of its parameters; of a class that can be imported, which keeps all it knows in its groups and state.
        resume: what `recover` returned, None where it returned None.
        state: schedulers, scalers and the like by name.
        base: how the replica is saved: "exact", "dsq" (small, and lossy), or a configuration of the engine's.
        hook: (state, hook), a communication hook that DDP is to synchronize with; None: an all-reduce.
        persist_every: steps between saves at least; more where saving slows training down.
        queue: steps that may be on their way; training waits rather than exceed it.
        keep: saved states that are kept.
        cores: CPUs that the checkpointing process, and the threads that copy gradients, may use; None: all.
        linger: seconds that the replica is kept after the training process died.
        process_group: that DDP synchronizes over; None: the default one.
        timeout: seconds after which ranks that cannot reach each other give up.

    Raises:
        CheckpointExists: the run has saved states, and `resume` is None.
        ConfigError: an argument is out of range, or the optimizer cannot be made again in another process.
    """

    def __init__(
        self, run: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, *,
        resume: Recovered | None = None, state: Mapping[str, Stateful] | None = None,
        base: str | Mapping[str, Any] = "exact", hook: tuple[Any, Callable[..., Any]] | None = None,
        persist_every: int = 1, queue: int = 4, keep: int = 1, cores: Collection[int] | None = None,
        linger: float = 600.0, process_group: dist.ProcessGroup | None = None, timeout: float = 300.0,
    ) -> None:
        if not isinstance(persist_every, int) or persist_every < 1:
            raise ConfigError(f"persist_every is {persist_every!r}; expected a positive number of steps")
        if queue < 2:
            raise ConfigError(f"queue is {queue}; a replica needs at least 2, since it may be a step behind")
        self._hook, self._linger = hook, linger
        self._persist_every = self._pace = persist_every
        self._persisted_at, self._wanted_pace = 0, 1
        self._began: tuple[float, float] | None = None
        self._ended, self._took, self._calm = (time.perf_counter(), 0.0), 0.0, 0.0
        super().__init__(
            run, model, optimizer, resume=resume, state=state, base=base, queue=queue, keep=keep, cores=cores,
            process_group=process_group, timeout=timeout,
        )

    @property
    def bound(self) -> int:
        """Steps that a failure of training processes alone costs at most, while `logging`."""
        return 1

    def _subject_of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful]
    ) -> TrainState:
        subject = super()._subject_of(model, optimizer, states)
        self._kind = _importable(optimizer)
        return subject

    def _attach(self, resume: Recovered | None) -> None:
        self._handover = GradientStreamer(self._subject, self._hook, self._cores)
        self._handover.attach()

    def _detach(self) -> None:
        self._handover.detach()

    def _begin(self) -> dict[str, Any]:
        return {"optimizer": self._kind, "linger": self._linger, "path": sys.path}

    def _started(self) -> None:
        room = self._buffer_room()
        self._began, self._ended = None, (time.perf_counter(), 0.0)
        self._handover.start(self._running(), self._subject, self._own, room)

    def _suspend(self) -> None:
        self._handover.stop()
        super()._suspend()

    def _send_step(self) -> None:
        if not self._stepped:
            self._handover.let_go()  # a replica that is a step behind may have all others
        super()._send_step()

    def _capture(self, room: int) -> None:
        over = self._handover
        over.wait()  # where a backward pass failed
        if over.failed is not None:
            raise over.failed
        over.take_slot()
        over.reserve(room)
        for entry in self._own:
            gradient = self._subject.parameters[entry.name].grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or dtype_name(gradient.dtype) != entry.dtype:
                raise ConfigError(
                    f"the gradient of '{entry.name}' is {gradient.dtype}, {gradient.layout}; a replica "
                    f"needs it dense and of the parameter's {entry.dtype}"
                )
        scale = self._scale()
        parts: list[dict[str, Any]] = []
        for place, entry in enumerate(self._own):
            parameter = self._subject.parameters[entry.name]
            if parameter.grad is None:
                continue
            if scale is None:
                over.view(parameter).copy_(parameter.grad)
            parts.append({"param": place, "dtype": entry.dtype, "at": over.place(parameter)})
        slot, new = over.give()
        hints = {"scales": [1.0 if scale is None else scale], "half": None}
        self._pending = Captured({"sparse": [], "dense": parts, "hints": hints}, slot, over.buffers_at, new)

    def _scale(self) -> float | None:
        """What the gradients that were handed over have been multiplied by since; None: something else was done."""
        over = self._handover
        own = [self._subject.parameters[entry.name] for entry in self._own]
        if any(parameter.grad is not None and parameter not in over.handed for parameter in own):
            return None
        present = [parameter for parameter in own if parameter.grad is not None]
        before = [over.view(parameter) for parameter in present]
        after = [parameter.grad.detach() for parameter in present if parameter.grad is not None]
        witnesses = []
        for one, other in list(zip(before, after, strict=True))[:: max(len(before) // _SEEN, 1)]:
            every = max(one.numel() // _WITNESSES, 1)
            witnesses.append((one.view(-1)[::every].float(), other.reshape(-1)[::every].cpu().float()))
        return factor_between(before, scales_from(witnesses), after)

    def _discard(self) -> None:
        self._handover.handed.clear()

    def _snapshot_due(self) -> bool:
        return False

    def _all_sent(self, step: int) -> None:
        """Have the replica saved again, as soon as it is, if that does not slow training down.

        At a step that all ranks have sent, so that none waits for what another will never have.
        """
        if step <= self._snapshot_at or self._running().saving or step - self._persisted_at < self._pace:
            return
        now, waited = time.perf_counter(), self._running().waited
        if now - self._ended[0] > self._took:  # long enough to be compared with
            self._calm = (waited - self._ended[1]) / (now - self._ended[0])
        self._began = now, waited
        self._running().saving = True
        self._running().send({"kind": "persist", "step": step})
        self._persisted_at = step

    def _settings(self) -> dict[str, int]:
        return {"persist": self._wanted_pace}

    def _set(self, settings: Mapping[str, int]) -> None:
        self._pace = max(settings["persist"], self._persist_every)

    def _observe(self, **measured: Any) -> None:
        """CheckFreq's rule: save less often where that takes training more than a hundredth of its time. Training also
        waits where the replica is slower than it is; what counts is what it waits for more than when nothing is saved.
        """
        if "snapshot" not in measured or self._began is None or self._handle is None:
            return
        (began, before), now, waited = self._began, time.perf_counter(), self._handle.waited
        self._took = now - began
        slowed = waited - before - self._calm * self._took > _SLOWED * (now - self._ended[0])
        self._wanted_pace = min(2 * self._pace, 1 << 20) if slowed else max(self._pace // 2, 1)
        self._began, self._ended = None, (now, waited)

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self._leave()

    def _leave(self) -> None:
        """As if this process had died: the replica is there for whoever goes on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._detach()
        atexit.unregister(self._at_exit)
        if self._handle is not None:
            with suppress(ProcessGone):
                self._handle.send({"kind": "leave"})
            self._handle.close(None)
            self._handle = None
        self._state = "waiting"

    def _at_exit(self) -> None:
        if not hasattr(sys, "last_value"):  # which Python sets when an exception ends it
            super()._at_exit()


def _importable(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """How another process makes such an optimizer.

    Raises:
        ConfigError: it cannot.
    """
    kind = type(optimizer)
    extra = sorted(set(vars(optimizer)) - _STANDARD - {name for name in vars(optimizer) if "hook" in name})
    found = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    if kind.__module__ == "__main__" or found is not kind or extra:
        why = f"it has attributes of its own ({', '.join(extra)})" if extra else "its class cannot be imported"
        raise ConfigError(
            f"a replica of {kind.__qualname__} cannot be made in another process: {why}. Use GradientLog, which "
            "replays with your own optimizer"
        )
    return {
        "module": kind.__module__, "name": kind.__name__,
        "defaults": to_plain(dict(optimizer.defaults), "the optimizer's defaults"),
    }
