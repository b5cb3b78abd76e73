"""Interface of entropy coders: one model, many blocks.

A model is fitted once per group on counts[p, c], the number of times code c followed the previous code p, and
then encodes any number of blocks. Fitted coders are immutable, so threads may share one and work on different
blocks at once; the compiled kernels release the GIL. The bytes that a coder writes are part of the format: to
change them is to change the format.

    >>> coder = RansCoder.fit(counts)                       # int64 (contexts + 1, symbols)
    >>> data = coder.encode(codes, parent)                  # uint8 (n,) each
    >>> coder.decode(data, parent, out := np.empty_like(codes))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from dsq_ckpt.core.arrays import I64, U8, Array
from dsq_ckpt.errors import CodingError

MAX_SYMBOLS = 256
_MAX_COUNT = 1 << 43  # the fit multiplies counts by 2**19 in int64


class Coder(ABC):
    """A fitted model of codes given previous codes.

    Attributes:
        name: name of the coder in the registry and in files.
        contexts: size of the alphabet of previous codes, 0 to 256.
        symbols: size of the alphabet of the codes, 1 to 256.
        in_place: whether `update` needs no copy of the codes, and less time than `decode`.
    """

    name: ClassVar[str]
    in_place: ClassVar[bool] = False

    def __init__(self, contexts: int, symbols: int) -> None:
        self.contexts = contexts
        self.symbols = symbols

    @classmethod
    @abstractmethod
    def fit(cls, counts: Array) -> Coder:
        """Fit the model to counts, int64 of shape (contexts + 1, symbols).

        The last row counts the codes that have no previous code (keyframes). Rows may be all zero; a code
        whose count is zero in its row cannot be encoded.

        Raises:
            CodingError: shape, dtype or values are out of range.
        """

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Serialize the model for `from_bytes`; the coder read back writes identical blocks.

        Only for the current model version. Coders of earlier versions decode, but write nothing.
        """

    @classmethod
    @abstractmethod
    def from_bytes(cls, data: bytes | memoryview) -> Coder:
        """Return the coder whose `to_bytes` returned `data`.

        Raises:
            CodingError: the bytes are not a valid model of this coder.
        """

    @abstractmethod
    def expected_bits(self, counts: Array) -> float:
        """Return the bits that this model spends on codes with these counts, without the small frame of each block.

        Infinite if the model cannot encode one of the counted codes.
        """

    def encode(self, codes: U8, parent: U8 | None) -> bytes:
        """Encode codes, uint8 (n,), given previous codes, uint8 (n,), or None for a keyframe.

        Raises:
            CodingError: a code has no count in the row of its previous code, or the arrays do not fit.
        """
        check_vector("codes", codes)
        if parent is not None:
            parent = self._check_parent(parent, codes.size)
        return self._encode(np.ascontiguousarray(codes), parent) if codes.size else b""

    def decode(self, data: bytes | memoryview, parent: U8 | None, out: U8) -> None:
        """Decode one block into `out`, uint8 (n,), contiguous; `out` must not share memory with `parent`.

        `parent` holds the codes that the block was encoded with. After an error the contents of `out` are undefined.
        Damaged bytes raise an error or yield wrong codes, but do no other harm; the container has the checksums.

        Raises:
            CodingError: the bytes end early, have a remainder, or are not a block of this model.
        """
        check_vector("out", out)
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise CodingError("out must be a contiguous, writeable array")
        if parent is not None:
            parent = self._check_parent(parent, out.size)
            if np.may_share_memory(parent, out):  # exact, both being contiguous
                raise CodingError("out overlaps parent, which is read again after parts of out are written")
        if out.size:
            self._decode(np.frombuffer(data, np.uint8), parent, out)
        elif len(data):
            raise CodingError(f"a block of 0 codes has {len(data)} bytes, expected none")

    def update(self, data: bytes | memoryview, codes: U8) -> None:
        """Decode one block in place of the previous codes; otherwise like `decode`.

        Raises:
            CodingError: see `decode`.
        """
        previous = codes.copy()
        self.decode(data, previous, codes)

    def lane_coder(self, parent: U8 | None) -> Coder | None:
        """Return the 32-lane coder that decodes blocks with this `parent`; None if another kind of coder does."""
        return None

    @abstractmethod
    def _encode(self, codes: U8, parent: U8 | None) -> bytes: ...

    @abstractmethod
    def _decode(self, data: U8, parent: U8 | None, out: U8) -> None: ...

    def _check_parent(self, parent: U8, n: int) -> U8:
        check_vector("parent", parent)
        if parent.size != n:
            raise CodingError(f"parent has {parent.size} codes, expected {n}, one for each code")
        if n and int(parent.max()) >= self.contexts:
            raise CodingError(
                f"parent has code {int(parent.max())}, but the model has {self.contexts} contexts"
            )
        return np.ascontiguousarray(parent)

    def _check_counts(self, counts: Array) -> I64:
        counts = check_counts(counts)
        if counts.shape != (self.contexts + 1, self.symbols):
            raise CodingError(
                f"counts have shape {counts.shape}, the model has {(self.contexts + 1, self.symbols)}"
            )
        return counts


def check_counts(counts: Array) -> I64:
    """Return counts as contiguous int64; raise `CodingError` if they are not valid."""
    if counts.ndim != 2 or counts.dtype.kind not in "iu":
        raise CodingError(f"counts must be a matrix of integers, got {counts.dtype} of shape {counts.shape}")
    rows, symbols = counts.shape
    if not (1 <= rows <= MAX_SYMBOLS + 1 and 1 <= symbols <= MAX_SYMBOLS):
        raise CodingError(f"counts have shape {counts.shape}, expected (1..257, 1..256)")
    if int(counts.min()) < 0 or float(counts.sum(dtype=np.float64)) >= _MAX_COUNT:
        raise CodingError("counts must not be negative, nor sum to 2**43 or more")
    return np.ascontiguousarray(counts, np.int64)


def check_vector(name: str, array: U8) -> None:
    """Raise `CodingError` unless an array is a valid vector of codes."""
    if array.dtype != np.uint8 or array.ndim != 1:
        raise CodingError(f"{name} must be a uint8 vector, got {array.dtype} of shape {array.shape}")
