"""Levels at the middle of every octave in use: second moments, on a logarithmic grid that no fit has to choose."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsq_ckpt.quantization.codebook.base import Codebook
from dsq_ckpt.quantization.moments import CENTRE, WINDOW

_BIAS = 127


def octave_book(held: npt.NDArray[np.int64]) -> tuple[Codebook, npt.NDArray[np.uint8], float]:
    """Make the codebook of a group from the octaves that occur in it.

    Args:
        held: int64[WINDOW.size], elements by bin of the window `WINDOW`, as `OctaveFrame` maps values.

    Returns:
        The codebook; the code of every bin, uint8[WINDOW.size]; and the mean square of the values. Zero is code 0.
        Negative values, which no second moment is, are protected.
    """
    exponents = np.arange(1, 255)
    places = exponents + 1  # bins of a sign: zero, then keys from FIRST_NORMAL on, of which an octave's is its exponent
    used = exponents[held[places] > 0]
    levels = CENTRE * np.exp2(used.astype(np.float64) - _BIAS) if used.size else np.array([1.0])
    real = np.concatenate([[0.0], levels])
    book = Codebook(real, WINDOW, "linear", 0.0, real, real)
    codes = np.full(WINDOW.size, book.protected, np.uint8)
    codes[[0, WINDOW.n]] = 0
    codes[used + 1] = np.arange(1, used.size + 1)
    # Evenly spread over the logarithm, squares have 1.5 / (2 ln 2) of the square of the middle as their mean.
    energy = float((held[used + 1] * levels[: used.size] ** 2).sum()) * 1.5 / (2 * np.log(2))
    return book, codes, energy / max(int(held.sum()), 1)
