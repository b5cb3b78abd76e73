"""Arrays that share large pieces of memory, which the system finds and clears in fewer and larger steps."""

from __future__ import annotations

import numpy as np

from dsq_ckpt.core.arrays import U8

_PIECE = 1 << 25
_ALIGNED = 64


class Arena:
    """Memory for arrays that are kept about as long as each other: a piece is freed with the last array in it."""

    def __init__(self) -> None:
        self._rest: U8 = np.empty(0, np.uint8)

    def take(self, size: int) -> U8:
        """Return an array of so many bytes, of undefined content."""
        if size > _PIECE // 2:
            return np.empty(size, np.uint8)
        if size > len(self._rest):
            self._rest = np.empty(_PIECE, np.uint8)  # of which pages are taken as they are used
        taken, self._rest = self._rest[:size], self._rest[-(-size // _ALIGNED) * _ALIGNED :]
        return taken
