"""`Replica`: an up-to-date copy of model and optimizer in another process, without gradient compression.

LowDiff+ (Yao et al., section VI): gradients are streamed during the backward pass to a checkpointing process, which
applies them to its replica on the CPU, saves the replica as often as the disk allows, and survives training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.kernels.scan import factor_between
from dsq_ckpt.lowdiff.capture import CapturedStep
from dsq_ckpt.lowdiff.encoding import scales_from
from dsq_ckpt.lowdiff.plain import to_plain
from dsq_ckpt.lowdiff.recorder import Recorder
from dsq_ckpt.lowdiff.recovery import Recovered
from dsq_ckpt.lowdiff.streamer import GradientStreamer
from dsq_ckpt.lowdiff.train_state import Stateful, TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import ProcessGone

_SEEN, _PROBES = 8, 64
"""Number of parameters, and of elements of each, from which the factor of gradients is determined."""
_SLOWED = 0.01


class Replica(Recorder):
    """A replica of a training loop's state in another process, updated after every step.

    `replica.step()` ends an iteration, like `GradientLog.step`. A new training process on the same host recovers the
    state from memory (`recover`); after a failure of the host, it recovers the last saved state.

    The replica runs the optimizer on the CPU: bit for bit equal if training runs on the CPU too, and equal up to
    rounding if training runs on a GPU.

    Args:
        run: directory of the run, on storage that all ranks share.
        model: model under DDP, or unwrapped in a single process.
        optimizer: optimizer of the model's parameters, of an importable class without state beyond groups and `state`.
        resume: result of `recover`, which may be None.
        state: schedulers, scalers and the like by name.
        base: configuration of saved states: "exact", "dsq" (small and lossy), or a configuration of the engine.
        hook: (state, hook), communication hook for DDP; None for an all-reduce.
        persist_every: least number of steps between saves; increased while saving slows training down.
        queue: largest number of steps in transit; training waits at this limit.
        keep: number of saved states to keep.
        cores: CPUs of the checkpointing process and of the threads that copy gradients; None for all.
        linger: seconds for which the replica outlives the training process.
        process_group: process group of DDP; None for the default group.
        timeout: seconds after which ranks that cannot reach each other give up.

    Raises:
        CheckpointExists: the run has saved states, and `resume` is None.
        ConfigError: an argument is out of range, or the optimizer cannot be created in another process.
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
        if isinstance(queue, int) and queue < 2:  # another type is refused with those of all logs
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
        """Largest number of steps that a failure of the training processes alone loses, while `logging`."""
        return 1

    def _train_state_of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful]
    ) -> TrainState:
        train_state = super()._train_state_of(model, optimizer, states)
        self._kind = _importable(optimizer)
        return train_state

    def _attach(self, resume: Recovered | None) -> None:
        self._streamer = GradientStreamer(self._train_state, self._hook, self._cores)
        self._streamer.attach()

    def _detach(self) -> None:
        self._streamer.detach()

    def _begin(self) -> dict[str, Any]:
        return {"optimizer": self._kind, "linger": self._linger, "path": sys.path}

    def _started(self) -> None:
        buffer_bytes = self._buffer_bytes()
        self._began, self._ended = None, (time.perf_counter(), self._running().waited)
        self._streamer.discard_slot()  # its memory is laid out for the parameters before
        self._streamer.start(self._running(), self._train_state, self._own, buffer_bytes)

    def _suspend(self) -> None:
        self._streamer.stop()
        super()._suspend()

    def _send_step(self) -> None:
        if not self._stepped:
            self._streamer.discard_slot()  # a replica that is a step behind may have all others
        super()._send_step()

    def _capture(self, buffer_bytes: int) -> None:
        streamer = self._streamer
        streamer.wait()  # where a backward pass failed
        if streamer.failed is not None:
            raise streamer.failed
        streamer.take_slot()
        streamer.reserve(buffer_bytes)
        for entry in self._own:
            gradient = self._train_state.parameters[entry.name].grad
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
            parameter = self._train_state.parameters[entry.name]
            if parameter.grad is None:
                continue
            if scale is None:
                streamer.view(parameter).copy_(parameter.grad)
            parts.append({"param": place, "dtype": entry.dtype, "at": streamer.place(parameter)})
        slot, new = streamer.transfer_slot()
        hints = {"scales": [1.0 if scale is None else scale], "half": None}
        self._pending = CapturedStep({"sparse": [], "dense": parts, "hints": hints}, slot, streamer.buffers_at, new)

    def _scale(self) -> float | None:
        """Return the factor of the gradients since they were streamed; None if they changed in another way."""
        streamer = self._streamer
        own = [self._train_state.parameters[entry.name] for entry in self._own]
        if any(parameter.grad is not None and parameter not in streamer.streamed for parameter in own):
            return None
        present = [parameter for parameter in own if parameter.grad is not None]
        before = [streamer.view(parameter) for parameter in present]
        after = [parameter.grad.detach() for parameter in present if parameter.grad is not None]
        probes = []
        for one, other in list(zip(before, after, strict=True))[:: max(len(before) // _SEEN, 1)]:
            every = max(one.numel() // _PROBES, 1)
            probes.append((one.view(-1)[::every].float(), other.reshape(-1)[::every].cpu().float()))
        return factor_between(before, scales_from(probes), after)

    def _discard(self) -> None:
        self._streamer.streamed.clear()

    def _fixed_shape(self, buffer: torch.Tensor) -> None:
        return None  # the replica takes any

    def _snapshot_due(self) -> bool:
        return False

    def _all_sent(self, step: int) -> None:
        """Request a save of the replica unless saving slows training down.

        The step has been sent by all ranks, so no process waits for a step that another will never receive.
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
        """Adapt the interval between saves by CheckFreq's rule: at most a hundredth of training's time.

        Training also waits for a slow replica; only the additional waiting time during saves counts.
        """
        if "snapshot" not in measured or self._began is None or self._client is None:
            return
        (began, before), now, waited = self._began, time.perf_counter(), self._client.waited
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
        """Leave the replica running for a successor, as if this process had died."""
        if not self._hooks:
            return
        self._unhook()
        if self._client is None:
            self._tell_missing("not all")
        else:
            if self._gap:
                self._tell_missing("not all")
            with suppress(ProcessGone):
                self._client.send({"kind": "leave"})
            self._client.close(None)
            self._client = None
        self._state = "waiting"

    def _at_exit(self) -> None:
        if not hasattr(sys, "last_value"):  # set by Python when an exception ends the process
            super()._at_exit()


@cache
def _standard() -> frozenset[str]:
    """Return the attributes that every optimizer has; not at import, since making one takes torch most of a second."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, fused=True))) | {
        "step", "_opt_called", "_warned_capturable_if_run_uncaptured",  # schedulers and CUDA graphs leave them
    }


def _importable(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a description from which another process creates an equal optimizer.

    Raises:
        ConfigError: another process cannot create the optimizer.
    """
    kind = type(optimizer)
    extra = sorted(set(vars(optimizer)) - _standard() - {name for name in vars(optimizer) if "hook" in name})
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
