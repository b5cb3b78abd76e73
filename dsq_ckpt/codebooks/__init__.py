"""Codebooks: one module each, with the settings and the fit of levels to a histogram. See `base` to add one."""

from importlib import import_module
from pkgutil import iter_modules

from dsq_ckpt.codebooks.base import NOTHING, CodebookConfig, LevelFit, RefinementFit, Weighing
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.registry import CODEBOOKS, AnyCodebook, register_codebook

for _module in iter_modules(__path__):
    if not _module.ispkg:  # the package `algorithms` imports Numba
        import_module(f"{__name__}.{_module.name}")

__all__ = [
    "CODEBOOKS",
    "NOTHING",
    "AnyCodebook",
    "CodebookConfig",
    "Histogram",
    "LevelFit",
    "RefinementFit",
    "Weighing",
    "register_codebook",
]
