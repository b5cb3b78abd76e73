"""Systems of checkpointing by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evaluation.lowdiff.base import System, Without
from evaluation.lowdiff.checkfreq import CheckFreq
from evaluation.lowdiff.gemini import Gemini
from evaluation.lowdiff.naive import NaiveDifferences
from evaluation.lowdiff.saves import DCPAsyncSave, TorchSave

WITHOUT = "none"
OURS = ("lowdiff", "lowdiff+")
COMPARED = ("torch.save", "dcp.async_save", "checkfreq", "gemini", "naive")
NAMES = (WITHOUT, *COMPARED, *OURS)

_PUBLISHED: dict[str, Callable[..., System]] = {
    "torch.save": TorchSave, "dcp.async_save": DCPAsyncSave, "checkfreq": CheckFreq, "gemini": Gemini,
    "naive": NaiveDifferences,
}


def make(name: str, directory: Path, core: int | None, compressor: str, options: Mapping[str, Any]) -> System:
    """Make a system.

    Args:
        name: One of `NAMES`.
        directory: Where its checkpoints go.
        core: CPU for its threads and processes; None: any.
        compressor: Of gradients; LowDiff registers it, for all others the loop does.
        options: Of the system's constructor.

    Raises:
        ValueError: There is no such system.
    """
    if name == WITHOUT:
        return Without()
    if name in OURS:
        from evaluation.lowdiff import ours

    if name == "lowdiff":
        return ours.LowDiff(directory, core=core, compressor=compressor, **options)
    if name == "lowdiff+":
        return ours.LowDiffPlus(directory, core=core, **options)
    if name not in _PUBLISHED:
        raise ValueError(f"no system is called {name!r}; there are {', '.join(NAMES)}")
    return _PUBLISHED[name](directory, core=core, **options)


def compresses(name: str) -> bool:
    """Return whether a system registers the gradients' compressor itself."""
    return name == "lowdiff"
