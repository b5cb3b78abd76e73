"""Checkpoints of every iteration: periodic snapshots, and a log of the gradients between two snapshots.

    log = dsq_ckpt.lowdiff.GradientLog("run", model, optimizer, compressor="topk:0.01")
    ...
    optimizer.step(); log.step()

    recovered = dsq_ckpt.lowdiff.recover("run", model, optimizer)

LowDiff and LowDiff+: Yao et al., "Optimizing Frequent Checkpointing via Low-Cost Differential for Distributed Training
Systems".
"""

from dsq_ckpt.lowdiff.compressors import GradientCompressor, compressor
from dsq_ckpt.lowdiff.log import GradientLog
from dsq_ckpt.lowdiff.recovered import Recovered
from dsq_ckpt.lowdiff.recovery import recover
from dsq_ckpt.lowdiff.replica import Replica

Compressor = GradientCompressor
"""Former name of `GradientCompressor`."""

__all__ = ["Compressor", "GradientCompressor", "GradientLog", "Recovered", "Replica", "compressor", "recover"]
