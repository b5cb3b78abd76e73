"""Type aliases of NumPy arrays, by element type, and by meaning for arrays that subpackages exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]

Codes = U8
"""Quantization codes: the index of a level for each element."""
Counts = I64
"""Numbers of elements, as in the bins of a histogram."""
Bits = U32
"""Bit patterns of fp32 values."""
