"""Codebooks: levels, thresholds and the table key -> code, fitted on a sketch."""

from dsq_ckpt.codebook.base import Codebook
from dsq_ckpt.codebook.fit import Fitted, fit_group

__all__ = ["Codebook", "Fitted", "fit_group"]
