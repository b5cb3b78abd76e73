"""The systems behind `config.system`: ours and those it is compared with, one small file each."""

from __future__ import annotations

from dsq_ckpt.config.systems import adaptive, dsq, exact, inshrinkerator, kmeans, lc, scar, topn, uniform
from dsq_ckpt.config.systems.base import System

SYSTEMS: dict[str, System] = {
    module.SYSTEM.name: module.SYSTEM
    for module in (dsq, inshrinkerator, uniform, adaptive, kmeans, lc, topn, scar, exact)
}

__all__ = ["SYSTEMS", "System"]
