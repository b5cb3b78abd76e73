"""Tensors of a load that are one, as tied weights are, though the checkpoint has different values for their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dsq_ckpt.core.notices import warn

_NAMED = 5  # in the warning


class TiedTargets:
    """What each target of a load was filled with, by its memory."""

    def __init__(self) -> None:
        self._first: dict[Any, str] = {}
        self._differing: list[str] = []

    def add(self, fqn: str, target: torch.Tensor, values: torch.Tensor) -> None:
        """Note the values of a name, before they are written to its target; the target itself if that was done.

        Args:
            fqn: name that the values were stored by.
            target: tensor, or a part of one, with what was written to it in this load before.
            values: of the same shape.
        """
        place = target.device, target.data_ptr(), target.shape, target.stride(), target.dtype
        first = self._first.setdefault(place, fqn) if target.numel() else fqn
        if first != fqn and not _equal(target, values.to(target)):
            self._differing.append(f"'{fqn}' as '{first}'")

    def warn(self, path: Path) -> None:
        """Warn of names whose values were replaced by those of another name."""
        if self._differing:
            named, more = ", ".join(self._differing[:_NAMED]), len(self._differing) - _NAMED
            warn(
                f"'{path}' has different values for names that are one tensor where they are loaded into, such as tied "
                f"weights ({named}{f', and {more} more' if more > 0 else ''}): that tensor has the values of the name "
                "that was read last. Load into a model that is not tied, or leave one name out"
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same values; NaN is NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
