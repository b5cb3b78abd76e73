"""Back-off of differences of refinement that save less than the older file, which they keep on the disk, is worth."""

from __future__ import annotations

from typing import NamedTuple

_MAX_FULL_LAYERS = 16
"""Most layers in full after a difference that saved too little: 2 after the first miss, twice as many after each."""


class BackOff(NamedTuple):
    """Wait until a difference of refinement is tried again.

    Attributes:
        full_layers: how many of the next saves store refinement in full.
        misses: consecutive rows whose first difference saved too little.
    """

    full_layers: int = 0
    misses: int = 0

    def after_save(self) -> BackOff:
        """Return the wait that is left after one more save."""
        return self._replace(full_layers=max(self.full_layers - 1, 0))

    def after_miss(self) -> BackOff:
        """Return the wait after a first difference that saved too little."""
        misses = self.misses + 1
        return BackOff(min(2**misses, _MAX_FULL_LAYERS), misses)
