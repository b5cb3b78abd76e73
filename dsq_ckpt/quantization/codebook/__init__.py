"""Fitted codebooks: levels, thresholds and the table from keys to codes, fitted on a sketch."""

from dsq_ckpt.quantization.codebook.base import Codebook, PartitionTurn, SensitivitySplit
from dsq_ckpt.quantization.codebook.fit import GroupFit, GroupSketch, fit_group

__all__ = ["Codebook", "GroupFit", "GroupSketch", "PartitionTurn", "SensitivitySplit", "fit_group"]
