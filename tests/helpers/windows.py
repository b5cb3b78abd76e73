"""Windows of keys that are as small as some values allow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsq_ckpt.kernels.keys import FULL, KeyWindow


def tight_window(values: npt.NDArray[np.float32]) -> KeyWindow:
    """Return the smallest window that has normal numbers, whatever their signs; zeros are in any."""
    keys = FULL.bin_of(np.abs(values[values != 0])) - 1 + FULL.lo
    return KeyWindow(int(keys.min()), int(keys.max()) + 1)
