"""Several differences as one record: for every combination of their codes, what each of them adds, in order.

The numbers are added one after the other, as by a reader of the records themselves: their sum would be rounded
otherwise, and a merged checkpoint is to hold the same values bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import F32, I64, Codes
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.quantization.chunk import add
from dsq_ckpt.quantization.codebook.base import float_array

MOST_CODES = 255
"""Combinations in one record; one more code is for elements with numbers of their own."""
_MOST_OWN = 2
"""Numbers of their own in one record, per element of the chunk: what reading it may take of memory."""


@dataclass(frozen=True)
class SuperStep:
    """What is added to every element of a chunk, in one or several steps.

    Attributes:
        codes: uint8[n], below k, or k for an element that has numbers of its own.
        steps: float32[m, k], what each step adds by code.
        own: float32[m, count], what each step adds to the elements of code k, in their order.
    """

    codes: Codes
    steps: F32
    own: F32

    @property
    def last(self) -> int:
        """The code of elements with numbers of their own."""
        return self.steps.shape[1]

    @classmethod
    def checked(cls, codes: Codes, steps: Any, own: F32, where: str) -> SuperStep:
        """Build a super-step from the content of a file.

        Raises:
            CorruptCheckpoint: the parts do not fit each other.
        """
        try:
            wide = float_array(steps)
        except (TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{where}: steps are no table of numbers: {error}") from error
        with np.errstate(over="ignore"):
            table = wide.astype(np.float32)
        fits = table.ndim == 2 and 1 <= len(table) == len(own) and table.shape[1] <= MOST_CODES
        if not fits or not (table == wide).all() or not np.isfinite(table).all() or not np.isfinite(own).all():
            raise CorruptCheckpoint(f"{where}: {table.shape} steps and {own.shape} numbers of single elements")
        last = table.shape[1]
        if int(codes.max(initial=0)) > last or int(np.count_nonzero(codes == last)) != own.shape[1]:
            raise CorruptCheckpoint(f"{where}: its codes do not fit {last} levels and {own.shape[1]} single elements")
        return cls(codes, table, own)

    def add_to(self, values: F32, workers: Workers) -> None:
        """Add all steps to the chunk's values, float32[n], in place."""
        blocks = list(workers.blocks(len(values)))
        before = np.cumsum([0, *(np.count_nonzero(self.codes[where] == self.last) for where in blocks)])
        tables = np.pad(self.steps, ((0, 0), (0, 1)))

        def work(place: int) -> None:
            where, own = blocks[place], slice(before[place], before[place + 1])
            piece = np.empty(len(values[where]), np.float32)
            for table, numbers in zip(tables, self.own, strict=True):
                kernels.dequantize(self.codes[where], table, 1.0, self.last, numbers[own], piece)
                add(values[where], piece, values[where])

        for _ in workers.map(work, range(len(blocks))):
            pass

    def at(self, places: I64) -> F32:
        """Return what each step adds to some elements: float32[m, len(places)]."""
        codes = self.codes[places]
        found: F32 = np.pad(self.steps, ((0, 0), (0, 1)))[:, codes]
        single = codes == self.last
        found[:, single] = self.own[:, np.searchsorted(np.flatnonzero(self.codes == self.last), places[single])]
        return found

    def then(self, later: SuperStep) -> SuperStep | None:
        """Join two super-steps; None if that has too many combinations, or too many numbers of single elements."""
        single = (self.codes == self.last) | (later.codes == later.last)
        places = np.flatnonzero(single)
        if len(places) * (len(self.steps) + len(later.steps)) > _MOST_OWN * len(self.codes):
            return None
        joint = (self.codes.astype(np.uint16) << np.uint16(8)) | later.codes
        used = np.flatnonzero(np.bincount(joint[~single], minlength=1 << 16))
        if len(used) > MOST_CODES:
            return None
        code_of = np.full(1 << 16, len(used), np.uint8)
        code_of[used] = np.arange(len(used))
        codes = code_of[joint]
        codes[single] = len(used)
        steps = np.vstack([self.steps[:, used >> 8], later.steps[:, used & 255]])
        own = np.vstack([self.at(places), later.at(places)])
        return SuperStep(codes, np.ascontiguousarray(steps), np.ascontiguousarray(own))
