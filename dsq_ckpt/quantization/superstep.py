"""Super-steps: several differences as one record, with the values that each of them adds, for every combination of
codes.

The values are added one after the other, as a reader of the separate records does: their sum would be rounded
differently, and a merged checkpoint must hold the same values bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import F32, I64, Codes
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.quantization.codebook.base import float_array
from dsq_ckpt.quantization.dequantizer import add_residual

MOST_CODES = 255
"""Combinations in one record; one more code is for elements with values of their own."""
_MOST_ESCAPED = 2
"""Escaped values in one record, per element of the chunk; a bound on the memory of a reader."""


@dataclass(frozen=True)
class SuperStep:
    """Values to add to every element of a chunk, in one or several steps.

    Attributes:
        codes: uint8[n], below k, or k for an escaped element, which has values of its own.
        steps: float32[m, k], the value that each step adds, by code.
        escaped: float32[m, count], the values that each step adds to escaped elements, in their order.
    """

    codes: Codes
    steps: F32
    escaped: F32

    @property
    def escape_code(self) -> int:
        """Code of escaped elements."""
        return self.steps.shape[1]

    @classmethod
    def from_stored(cls, codes: Codes, steps: Any, escaped: F32, name: str) -> SuperStep:
        """Build a super-step from the content of a file.

        Raises:
            CorruptCheckpoint: the parts are inconsistent.
        """
        try:
            wide = float_array(steps)
        except (TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{name}: steps are no table of numbers: {error}") from error
        with np.errstate(over="ignore"):
            table = wide.astype(np.float32)
        fits = table.ndim == 2 and 1 <= len(table) == len(escaped) and table.shape[1] <= MOST_CODES
        if not fits or not (table == wide).all() or not np.isfinite(table).all() or not np.isfinite(escaped).all():
            raise CorruptCheckpoint(f"{name}: {table.shape} steps and {escaped.shape} numbers of single elements")
        last = table.shape[1]
        if int(codes.max(initial=0)) > last or int(np.count_nonzero(codes == last)) != escaped.shape[1]:
            count = escaped.shape[1]
            raise CorruptCheckpoint(f"{name}: its codes do not fit {last} levels and {count} single elements")
        return cls(codes, table, escaped)

    def add_to(self, values: F32, workers: Workers) -> None:
        """Add all steps to the chunk's values, float32[n], in place."""
        blocks = list(workers.blocks(len(values)))
        before = np.cumsum([0, *(np.count_nonzero(self.codes[span] == self.escape_code) for span in blocks)])
        tables = np.pad(self.steps, ((0, 0), (0, 1)))

        def work(index: int) -> None:
            span, escaped_span = blocks[index], slice(before[index], before[index + 1])
            piece = np.empty(len(values[span]), np.float32)
            for table, numbers in zip(tables, self.escaped, strict=True):
                kernels.dequantize(self.codes[span], table, 1.0, self.escape_code, numbers[escaped_span], piece)
                add_residual(values[span], piece, values[span])

        for _ in workers.map(work, range(len(blocks))):
            pass

    def steps_at(self, places: I64) -> F32:
        """Return the values that each step adds to some elements: float32[m, len(places)]."""
        codes = self.codes[places]
        steps: F32 = np.pad(self.steps, ((0, 0), (0, 1)))[:, codes]
        is_escaped = codes == self.escape_code
        escaped_places = np.flatnonzero(self.codes == self.escape_code)
        steps[:, is_escaped] = self.escaped[:, np.searchsorted(escaped_places, places[is_escaped])]
        return steps

    def join(self, later: SuperStep) -> SuperStep | None:
        """Join with a later super-step; None if there would be too many combinations or escaped values."""
        is_escaped = (self.codes == self.escape_code) | (later.codes == later.escape_code)
        places = np.flatnonzero(is_escaped)
        if len(places) * (len(self.steps) + len(later.steps)) > _MOST_ESCAPED * len(self.codes):
            return None
        joint = (self.codes.astype(np.uint16) << np.uint16(8)) | later.codes
        used = np.flatnonzero(np.bincount(joint[~is_escaped], minlength=1 << 16))
        if len(used) > MOST_CODES:
            return None
        code_of = np.full(1 << 16, len(used), np.uint8)
        code_of[used] = np.arange(len(used))
        codes = code_of[joint]
        codes[is_escaped] = len(used)
        steps = np.vstack([self.steps[:, used >> 8], later.steps[:, used & 255]])
        escaped = np.vstack([self.steps_at(places), later.steps_at(places)])
        return SuperStep(codes, np.ascontiguousarray(steps), np.ascontiguousarray(escaped))
