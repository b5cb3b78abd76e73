"""`Replica`: an up-to-date copy of model and optimizer in another process, without gradient compression.

LowDiff+ (Yao et al., section VI): gradients are streamed to a checkpointing process during the backward pass. The
process applies them to its replica on the CPU, saves the replica as often as the disk allows, and survives training.
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

from dsq_ckpt.engine.tied import share_memory
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.kernels.scan import find_scale
from dsq_ckpt.lowdiff.capture import CapturedStep
from dsq_ckpt.lowdiff.encoding import scales_from_probes
from dsq_ckpt.lowdiff.plain_data import to_plain
from dsq_ckpt.lowdiff.recorder import Recorder
from dsq_ckpt.lowdiff.recovered import Recovered
from dsq_ckpt.lowdiff.streamer import GradientStreamer
from dsq_ckpt.lowdiff.train_state import Stateful, TrainState, check_state_keys, dtype_name
from dsq_ckpt.lowdiff.worker_client import ProcessGone

_PROBED_PARAMETERS, _PROBED_ELEMENTS = 8, 64
"""Number of parameters, and of elements of each, from which the factor of gradients is determined."""
_MAX_SLOWDOWN = 0.01
"""Largest share of training time that saves may cost."""


class Replica(Recorder):
    """A replica of a training loop's state in another process, updated after every step.

    `replica.step()` ends an iteration, like `GradientLog.step`. A new training process on the same host recovers the
    state from memory (`recover`); after a failure of the host, it recovers the last saved state.

    The replica runs the optimizer on the CPU: bit for bit equal if training runs on the CPU too, and equal up to
    rounding if training runs on a GPU.

    Args:
        run: directory of the run, on storage that all ranks share.
        model: model under DDP, or strip_wrappers in a single process.
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
        if isinstance(queue, int) and queue < 2:  # the base class rejects other types
            raise ConfigError(f"queue is {queue}; a replica needs at least 2, since it may be a step behind")
        self._hook, self._linger = hook, linger
        self._persist_every = self._save_interval = persist_every
        self._requested_step, self._proposed_interval = 0, 1
        self._save_started: tuple[float, float] | None = None
        self._last_save_end, self._save_seconds, self._idle_wait_share = (time.perf_counter(), 0.0), 0.0, 0.0
        super().__init__(
            run, model, optimizer, resume=resume, state=state, base=base, queue=queue, keep=keep, cores=cores,
            process_group=process_group, timeout=timeout,
        )

    @property
    def bound(self) -> int:
        """Largest number of steps that a failure of the training processes alone loses, while `logging`."""
        return 1

    def _create_train_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful]
    ) -> TrainState:
        train_state = super()._create_train_state(model, optimizer, states)
        if share_memory(train_state.parameters.values()):
            raise ConfigError(
                "two parameters of the optimizer share memory, or one lies in the gaps of another, and a replica would "
                "hold and update it twice. Use GradientLog, which replays with your own model"
            )
        self._optimizer_spec = _describe_optimizer(optimizer)
        return train_state

    def _attach(self, resume: Recovered | None) -> None:
        self._streamer = GradientStreamer(self._train_state, self._hook, self._cores)
        self._streamer.attach()

    def _detach(self) -> None:
        self._streamer.detach()

    def _process_options(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer_spec, "linger": self._linger, "path": sys.path}

    def _on_process_started(self) -> None:
        buffer_bytes = self._buffer_bytes()
        self._save_started, self._last_save_end = None, (time.perf_counter(), self._require_client().waited)
        self._streamer.discard_slot()  # its layout is that of the previous parameters
        self._streamer.start(self._require_client(), self._train_state, self._own_entries, buffer_bytes)

    def _suspend(self) -> None:
        self._streamer.stop()
        super()._suspend()

    def _send_step(self) -> None:
        check_state_keys(self._train_state.optimizer)  # the replica's saves do not contain other state
        if not self._stepped:
            self._streamer.discard_slot()  # a replica that is a step behind may hold all other slots
        super()._send_step()

    def _capture_gradients(self, buffer_bytes: int) -> None:
        streamer = self._streamer
        streamer.wait()  # after a backward pass that failed
        if streamer.error is not None:
            raise streamer.error
        streamer.acquire_slot()
        streamer.reserve(buffer_bytes)
        for entry in self._own_entries:
            gradient = self._train_state.parameters[entry.name].grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or dtype_name(gradient.dtype) != entry.dtype:
                raise ConfigError(
                    f"the gradient of '{entry.name}' is {gradient.dtype}, {gradient.layout}; a replica "
                    f"needs it dense and of the parameter's {entry.dtype}"
                )
        factor = self._gradient_factor()
        parts: list[dict[str, Any]] = []
        for number, entry in enumerate(self._own_entries):
            parameter = self._train_state.parameters[entry.name]
            if parameter.grad is None:
                continue
            if factor is None:
                streamer.view(parameter).copy_(parameter.grad)
            parts.append({"param": number, "dtype": entry.dtype, "at": streamer.offset(parameter)})
        slot, needs_mapping = streamer.transfer_slot()
        hints = {"scales": [1.0 if factor is None else factor], "half": None}
        message = {"sparse": [], "dense": parts, "hints": hints}
        self._pending = CapturedStep(message, slot, streamer.buffers_at, needs_mapping)

    def _gradient_factor(self) -> float | None:
        """Return the factor by which gradients were multiplied after streaming; None if they changed in another way."""
        streamer = self._streamer
        owned = [self._train_state.parameters[entry.name] for entry in self._own_entries]
        if any(parameter.grad is not None and parameter not in streamer.streamed_parameters for parameter in owned):
            return None
        present = [parameter for parameter in owned if parameter.grad is not None]
        before = [streamer.view(parameter) for parameter in present]
        after = [parameter.grad.detach() for parameter in present if parameter.grad is not None]
        probes = []
        for streamed, current in list(zip(before, after, strict=True))[:: max(len(before) // _PROBED_PARAMETERS, 1)]:
            stride = max(streamed.numel() // _PROBED_ELEMENTS, 1)
            probes.append((streamed.view(-1)[::stride].float(), current.reshape(-1)[::stride].cpu().float()))
        return find_scale(before, scales_from_probes(probes), after)

    def _discard_gradients(self) -> None:
        self._streamer.streamed_parameters.clear()

    def _required_shape(self, buffer: torch.Tensor) -> None:
        return None  # a replica accepts any shape

    def _snapshot_due(self) -> bool:
        return False

    def _on_sent_by_all_ranks(self, step: int) -> None:
        """Request a save of the replica if the save interval has passed.

        All ranks have sent the step, so no process waits for a step that another process will never receive.
        """
        client = self._require_client()
        if step <= self._last_snapshot_step or client.saving or step - self._requested_step < self._save_interval:
            return
        self._train_state.plain_state()  # it fails if the replica cannot be saved
        now, waited = time.perf_counter(), client.waited
        if now - self._last_save_end[0] > self._save_seconds:  # long enough for a comparison
            self._idle_wait_share = (waited - self._last_save_end[1]) / (now - self._last_save_end[0])
        self._save_started = now, waited
        client.saving = True
        client.send({"kind": "persist", "step": step})
        self._requested_step = step

    def _proposed_settings(self) -> dict[str, int]:
        return {"persist": self._proposed_interval}

    def _apply_settings(self, settings: Mapping[str, int]) -> None:
        self._save_interval = max(settings["persist"], self._persist_every)

    def _observe(self, **measured: Any) -> None:
        """Adapt the interval between saves by CheckFreq's rule: saves cost at most `_MAX_SLOWDOWN` of training time.

        Training also waits for a slow replica. Only the additional waiting time during saves counts.
        """
        if "snapshot" not in measured or self._save_started is None or self._client is None:
            return
        (started, before), now, waited = self._save_started, time.perf_counter(), self._client.waited
        self._save_seconds = now - started
        additional = waited - before - self._idle_wait_share * self._save_seconds
        slowed = additional > _MAX_SLOWDOWN * (now - self._last_save_end[0])
        self._proposed_interval = min(2 * self._save_interval, 1 << 20) if slowed else max(self._save_interval // 2, 1)
        self._save_started, self._last_save_end = None, (now, waited)

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self._leave_process()

    def _leave_process(self) -> None:
        """Leave the replica running for a later training process, as if this process had died."""
        if not self._hooks:
            return
        self._remove_hooks()
        if self._client is None:
            self._warn_missing_steps("not all")
        else:
            if self._gap:
                self._warn_missing_steps("not all")
            with suppress(ProcessGone):
                self._client.send({"kind": "leave"})
            self._client.close(None)
            self._client = None
        self._state = "waiting"

    def _at_exit(self) -> None:
        if not hasattr(sys, "last_value"):  # set by Python when an exception ends the process
            super()._at_exit()


@cache
def _standard_attributes() -> frozenset[str]:
    """Return the attributes that every optimizer has. Creating an optimizer takes torch most of a second."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, fused=True))) | {
        "step", "_opt_called", "_warned_capturable_if_run_uncaptured",  # schedulers and CUDA graphs leave them
    }


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a description from which another process creates an equal optimizer.

    Raises:
        ConfigError: another process cannot create the optimizer.
    """
    kind = type(optimizer)
    extra = sorted(set(vars(optimizer)) - _standard_attributes() - {name for name in vars(optimizer) if "hook" in name})
    importable = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    if kind.__module__ == "__main__" or importable is not kind or extra:
        reason = f"it has attributes of its own ({', '.join(extra)})" if extra else "its class cannot be imported"
        raise ConfigError(
            f"a replica of {kind.__qualname__} cannot be made in another process: {reason}. Use GradientLog, which "
            "replays with your own optimizer"
        )
    return {
        "module": kind.__module__, "name": kind.__name__,
        "defaults": to_plain(dict(optimizer.defaults), "the optimizer's defaults"),
    }
