"""Tensors of a load that are one, as tied weights are, though the checkpoint has different values for their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dsq_ckpt.core.notices import warn
from dsq_ckpt.storage.shard import RecordRef

_NAMED = 5  # in the warning
_BLOCK = 1 << 20  # elements compared at once
_FAR = 0.5
"""Relative difference from which lossy values are of different tensors. Of one tensor, which ranks under DDP stored by
two names, each has an error of its own, of a few percent; of unrelated weights it is about 1.4."""


class TiedTargets:
    """Records that the targets of a load were filled from, by the memory of these."""

    def __init__(self) -> None:
        self._last: dict[Any, tuple[str, RecordRef, bool]] = {}
        self._differing: dict[str, str] = {}

    def add(self, fqn: str, ref: RecordRef, lossy: bool, target: torch.Tensor, values: torch.Tensor) -> None:
        """Note what is written next to a target, or was just decoded into it.

        Args:
            fqn: name that the values were stored by.
            ref: record that they were read from.
            lossy: whether they were stored lossy.
            target: tensor, or a part of one, which stays alive: with what was written to it in this load before.
            values: of the same shape.
        """
        if not target.numel():
            return
        place = target.device, target.data_ptr(), target.shape, target.stride(), target.dtype
        last, self._last[place] = self._last.get(place), (fqn, ref, lossy)
        if last is not None and last[0] != fqn and last[1] != ref and _differ(target, values, lossy or last[2]):
            self._differing[fqn] = last[0]

    def warn(self, path: Path) -> None:
        """Warn of names whose values were replaced by those of another name."""
        if self._differing:
            pairs = [f"'{last}' and '{fqn}'" for fqn, last in self._differing.items()]
            more = f", and {len(pairs) - _NAMED} more pairs" if len(pairs) > _NAMED else ""
            warn(
                f"'{path}' has different values for names that are one tensor where they are loaded into, such as tied "
                f"weights ({', '.join(pairs[:_NAMED])}{more}): that tensor has the values of the second name. Load "
                "into a model that is not tied, or leave one name out"
            )


def _differ(one: torch.Tensor, other: torch.Tensor, lossy: bool) -> bool:
    """Return whether values are those of different tensors; NaN is NaN."""
    rows = max(1, _BLOCK * len(one) // one.numel()) if one.dim() else 1
    parts = zip(one.split(rows), other.split(rows), strict=True) if one.dim() else [(one, other)]
    apart, size = 0.0, 0.0
    for mine, theirs in parts:
        theirs = theirs.to(mine)
        if not lossy:
            if not bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all()):
                return True
            continue
        a, b = mine.double(), theirs.double()
        apart += float((a - b).square().nansum())
        size += float(torch.maximum(a.square(), b.square()).nansum())
    return apart > _FAR**2 * size
