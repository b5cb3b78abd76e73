"""Codebooks: levels, thresholds and the table key -> code, fitted on a sketch."""

from dsq_ckpt.quantization.codebook.base import Codebook, PartitionTurn, SensitivitySplit
from dsq_ckpt.quantization.codebook.fit import GroupFit, GroupSketch, fit_group

__all__ = ["Codebook", "GroupFit", "GroupSketch", "PartitionTurn", "SensitivitySplit", "fit_group"]
