"""Codebooks: levels, thresholds and the table key -> code, fitted on a sketch."""

from dsq_ckpt.quantization.codebook.base import Aside, Codebook, Turn
from dsq_ckpt.quantization.codebook.fit import Fitted, fit_group

__all__ = ["Aside", "Codebook", "Fitted", "Turn", "fit_group"]
