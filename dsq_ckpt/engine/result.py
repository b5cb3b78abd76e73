"""`SaveResult`: the result of a save, as one line of text and as numbers for a logger."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.errors import described
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.description import compute_logical_size, format_losses
from dsq_ckpt.storage.manifest import MANIFEST, Manifest

logger = logging.getLogger(__name__)

_in_on_save: ContextVar[bool] = ContextVar("this thread is in the caller's on_save", default=False)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, repr=False)
class SaveResult:
    """A committed checkpoint.

    Attributes:
        path: its directory.
        save_id: id of this save; an overwritten checkpoint has another one.
        bytes_written: bytes of all files that this save wrote, on all ranks.
        bytes_logical: uncompressed size of the state in bytes, with DeepSpeed's own files as they are.
        depth: deltas since the keyframe; 0: it is one.
        seconds: from the call until the commit.
        refinement: "kept", or "none" where nothing has one.
        quality: measurements of the search of a `Compressor`, as in the manifest; None without a search.
    """

    path: Path
    save_id: str
    bytes_written: int
    bytes_logical: int
    depth: int
    seconds: float
    refinement: str
    quality: dict[str, Any] | None = None

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> SaveResult:
        """Return the result of a save that was just committed.

        Args:
            path: directory of the checkpoint.
            manifest: its manifest.
        """
        written = manifest.sum_bytes("own", "index", "refinement", "attachment")
        written += get_storage(path).size(path / MANIFEST)
        return cls(
            path, manifest.save_id, written, compute_logical_size(manifest), manifest.depth, manifest.seconds,
            manifest.refinement,
            copy.deepcopy(manifest.quality),  # the caller may change it, and the manifest is shared
        )

    @property
    def keyframe(self) -> bool:
        """Whether the checkpoint is coded by itself, not against a parent."""
        return self.depth == 0

    @property
    def ratio(self) -> float:
        """Uncompressed bytes over bytes written."""
        return self.bytes_logical / max(self.bytes_written, 1)

    @property
    def degradation(self) -> float | None:
        """Relative degradation of the metric by the base layer, negative if it improved; None: it was not measured."""
        value = (self.quality or {}).get("degradation")
        return None if value is None else float(value)

    def scalars(self) -> dict[str, float]:
        """Return numbers for TensorBoard or Weights & Biases.

        They are bytes_written, bytes_logical, ratio, depth, keyframe, seconds, and degradation if it was measured.
        """
        values = {
            "bytes_written": float(self.bytes_written), "bytes_logical": float(self.bytes_logical),
            "ratio": self.ratio, "depth": float(self.depth), "keyframe": float(self.keyframe), "seconds": self.seconds,
        }
        return values if self.degradation is None else {**values, "degradation": self.degradation}

    def __str__(self) -> str:
        depth = "keyframe" if self.keyframe else f"delta {self.depth}"
        parts = [_format_size(self.bytes_written), f"{self.ratio:.1f}x", depth, f"{self.seconds:.1f} s"]
        parts += format_losses(self.quality)
        return f"{self.path.name}: {', '.join(parts)}"

    __repr__ = __str__


OnSave = Callable[[SaveResult], object]
"""A callback for each complete checkpoint, called on the rank that committed it."""


def announce(path: Path, committed: Callable[[], SaveResult], on_save: OnSave | None) -> None:
    """Log a committed checkpoint and call `on_save` with it; an exception of `on_save` becomes a warning.

    Args:
        path: directory of the checkpoint.
        committed: returns the result; called only if it is used, since it may cost a request.
        on_save: the callback.
    """
    if is_hidden(path.name) or (on_save is None and not logger.isEnabledFor(logging.INFO)):
        return  # the publisher of a checkpoint with a hidden name announces it
    try:
        result = committed()
        logger.info("%s", result)
        if on_save is not None:
            token = _in_on_save.set(True)
            try:
                with in_user_code():
                    on_save(result)
            finally:
                _in_on_save.reset(token)
    except Exception as error:
        warn_safely(f"'{path}' is complete, but after its commit on_save raised {described(error)}")


def is_in_on_save() -> bool:
    """Return whether this thread is in `on_save`; the announced save is complete, but has not returned."""
    return _in_on_save.get()


def _format_size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"
