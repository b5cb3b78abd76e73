"""`GradientLog`: a checkpoint of every training step, from the gradients that training synchronizes anyway.

LowDiff (Yao et al., section V): periodic snapshots, and between snapshots the compressed gradient of every step. A
checkpointing process batches and writes the gradients while training continues.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from dsq_ckpt.core.checksums import quote
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.capture import capture_gradients
from dsq_ckpt.lowdiff.compressors import GradientCompressor, gradient_compressor
from dsq_ckpt.lowdiff.recorder import Recorder
from dsq_ckpt.lowdiff.recovered import Recovered, check_resume
from dsq_ckpt.lowdiff.train_state import Stateful
from dsq_ckpt.lowdiff.tuning import Bounds, Tuner


class GradientLog(Recorder):
    """A log of every step of a training loop, from which `recover` restores the state after the last complete step.

    `log.step()` ends an iteration: call it after `optimizer.step()` and after the schedulers' steps. Construction and
    `step` are collective.

    Args:
        run: directory of the snapshots and the log, on storage that all ranks share.
        model: model under DDP, or strip_wrappers in a single process. The compressor attaches to it.
        optimizer: optimizer of the model's parameters.
        compressor: gradient compressor, "topk:0.01", "fp16", "bf16" or "kmeans:16"; "none" logs the result of the job's
            own communication hook (PowerSGD, fp16, none).
        resume: result of `recover`, which may be None.
        state: schedulers, scalers and the like by name, logged with every step.
        base: configuration of snapshots: "exact", "dsq" (small and lossy), or a configuration of the engine.
        snapshot_every: steps between snapshots, or "auto" to tune it from measured costs.
        batch: steps per written segment, or "auto".
        mtbf: mean time between failures of the whole job, in seconds; None to estimate it, starting at hours.
        queue: largest number of steps in transit to the checkpointing process; training waits at this limit.
        keep: number of snapshots to keep, with the log since the oldest of them.
        cores: CPUs of the checkpointing process; None for those of this process.
        process_group: process group of DDP; None for the default group.
        timeout: seconds after which ranks that cannot reach each other give up, and after which a checkpointing process
            that accepts no step is treated as dead.

    Attributes:
        steps_done: optimizer steps done, including those before a recovery.
        spent: seconds that training spent in the log between backward passes, including waiting.

    Raises:
        CheckpointExists: the run has a log, and `resume` is None.
        ConfigError: an argument is out of range, or the model or the optimizer cannot be logged.

    Example:
        >>> model = torch.nn.Linear(16, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with dsq_ckpt.lowdiff.GradientLog("run", model, optimizer, compressor="topk:0.1") as log:
        ...     for batch in torch.randn(3, 8, 16):
        ...         optimizer.zero_grad()
        ...         model(batch).square().mean().backward()
        ...         optimizer.step()
        ...         log.step()
        >>> dsq_ckpt.lowdiff.recover("run", model, optimizer).step  # in a new process after a failure
        3
    """

    def __init__(
        self, run: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, *,
        compressor: str | GradientCompressor = "topk:0.01", resume: Recovered | None = None,
        state: Mapping[str, Stateful] | None = None, base: str | Mapping[str, Any] = "exact",
        snapshot_every: int | Literal["auto"] = "auto", batch: int | Literal["auto"] = "auto",
        mtbf: float | None = None, queue: int = 4, keep: int = 1, cores: Collection[int] | None = None,
        process_group: dist.ProcessGroup | None = None, timeout: float = 300.0,
    ) -> None:
        for name, value in (("snapshot_every", snapshot_every), ("batch", batch)):
            if value != "auto" and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; expected a positive number of steps, or 'auto'")
        self._compressor = gradient_compressor(compressor)
        self._tuner = _create_tuner(snapshot_every, batch, mtbf, check_resume(resume))
        self._agreed_settings = self._proposed_settings()
        super().__init__(
            run, model, optimizer, resume=resume, state=state, base=base, queue=queue, keep=keep, cores=cores,
            process_group=process_group, timeout=timeout,
        )

    @property
    def snapshot_every(self) -> int:
        """Current number of steps between snapshots."""
        return self._agreed_settings["snapshot_every"]

    @property
    def batch(self) -> int:
        """Current number of steps per written segment."""
        return self._agreed_settings["batch"]

    @property
    def bound(self) -> int:
        """Largest number of steps that a failure of all processes at once loses, while `logging`.

        The sum of steps in transit, steps that wait for their batch, and the step under way.
        """
        return self._queue + self.batch + 1

    def _attach(self, resume: Recovered | None) -> None:
        self._attach_compressor()
        if resume is not None and (recovered := resume.residuals()):
            self._continue_residuals(recovered, resume.compressor)

    def _continue_residuals(self, recovered: Mapping[str, torch.Tensor], spec: str) -> None:
        """Load the recovered residuals of a compressor that may be another one; warn of those that do not fit."""
        state, fitting = self._compressor.state(), {}
        # Residuals of top-k are of a rank's own gradient, and those of k-means of the mean over ranks.
        if self._comm.size == 1 or spec.partition(":")[0] == self._compressor.name:
            fitting = {name: recovered[name] for name, residual in state.items()
                       if name in recovered and recovered[name].shape == residual.shape}
        if fitting:
            self._compressor.load_state({**state, **fitting})
        if dropped := sorted(name for name, residual in recovered.items() if name not in fitting and residual.any()):
            self._warn(
                f"the residuals of error feedback of compressor '{spec}' do not fit compressor "
                f"'{self._compressor.spec}' ({quote(dropped)}): this part of earlier gradients is dropped. To keep it, "
                f"go on with compressor='{spec}'"
            )

    def _attach_compressor(self) -> None:
        self._compressor.attach(self._train_state.model)

    def _detach(self) -> None:
        self._compressor.detach()

    def _process_options(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def _capture_gradients(self, buffer_bytes: int) -> None:
        infos = self._compressor.take()
        self._pending = capture_gradients(
            self._train_state, self._own_entries, infos, self._dense_only, buffer_bytes, self._require_client()
        )

    def _discard_gradients(self) -> None:
        self._compressor.take()

    def _snapshot_due(self) -> bool:
        return self.steps_done - self._last_snapshot_step >= self.snapshot_every

    def _proposed_settings(self) -> dict[str, int]:
        return {"snapshot_every": self._tuner.settings.snapshot_every, "batch": self._tuner.settings.batch}

    def _apply_settings(self, settings: Mapping[str, int]) -> None:
        if not settings["batch"]:  # rank 0 has not posted settings yet
            return
        if settings["batch"] != self.batch and self._state == "running":
            self._run_guarded(lambda: self._require_client().send({"kind": "batch", "size": settings["batch"]}))
        self._agreed_settings = dict(settings)

    def _residuals(self) -> Mapping[str, torch.Tensor]:
        return self._compressor.state()

    def _observe(self, **measured: Any) -> None:
        self._tuner.observe(**measured)
        if "snapshot" in measured:  # once per snapshot, the settings move towards the optimum
            self._tuner.suggest()

    def _log_metadata(self) -> dict[str, Any]:
        return {"compressor": self._compressor.spec, "tuner": self._tuner.state()}


def _create_tuner(
    snapshot_every: int | Literal["auto"], batch: int | Literal["auto"], mtbf: float | None, resume: Recovered | None
) -> Tuner:
    """Return a tuner whose settings are fixed unless "auto", with the measurements of the recovered log."""
    default = Bounds()
    every_bounds = default.every if snapshot_every == "auto" else (snapshot_every, snapshot_every)
    batch_bounds = default.batch if batch == "auto" else (batch, batch)
    bounds = Bounds((max(every_bounds[0], batch_bounds[0]), max(every_bounds[1], batch_bounds[0])), batch_bounds)
    if resume is None or resume.tuner is None:
        return Tuner(bounds=bounds, mtbf=mtbf)
    tuner = Tuner.from_state(resume.tuner, bounds, mtbf)
    steps = max(resume.replayed, 1)
    tuner.observe(
        failures=0 if resume.closed else 1, load=resume.seconds[0],
        replay=resume.seconds[1] / steps if resume.replayed else None,
    )
    return tuner
