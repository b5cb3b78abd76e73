"""Checkpoints of every iteration: periodic snapshots, and a log of the gradients between two snapshots.

    log = dsq_ckpt.lowdiff.GradientLog("run", model, optimizer, compressor="topk:0.01")
    ...
    optimizer.step(); log.step()

    recovered = dsq_ckpt.lowdiff.recover("run", model, optimizer)

LowDiff and LowDiff+: Yao et al., "Optimizing Frequent Checkpointing via Low-Cost Differential for Distributed Training
Systems".
"""

import warnings
from typing import Any

from dsq_ckpt.lowdiff.compressors import GradientCompressor, gradient_compressor
from dsq_ckpt.lowdiff.log import GradientLog
from dsq_ckpt.lowdiff.recovered import Recovered
from dsq_ckpt.lowdiff.recovery import recover
from dsq_ckpt.lowdiff.replica import Replica

__all__ = ["GradientCompressor", "GradientLog", "Recovered", "Replica", "gradient_compressor", "recover"]

_FORMER = {"Compressor": "GradientCompressor", "compressor": "gradient_compressor"}
"""Former names, which `dsq_ckpt.Compressor` made ambiguous."""


def __getattr__(name: str) -> Any:
    """Return an object by its former name, with a warning."""
    if name not in _FORMER:
        raise AttributeError(f"module 'dsq_ckpt.lowdiff' has no attribute {name!r}")
    warnings.warn(
        f"dsq_ckpt.lowdiff.{name} is now dsq_ckpt.lowdiff.{_FORMER[name]}", DeprecationWarning, stacklevel=2
    )
    return globals()[_FORMER[name]]
