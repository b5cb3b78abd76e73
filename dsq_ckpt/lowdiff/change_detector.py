"""Detection of parameter changes outside of the optimizer, which gradients do not contain and replay would miss."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dsq_ckpt.kernels.scan import Samples

_RUNS = 512


class ChangeDetector:
    """A detector of parameter changes since the last `record`.

    It compares torch's version counter and the address of each parameter. Changes through `parameter.data` affect
    neither, so it also compares about 32 kB of values, some of each parameter. A change of a few elements through
    `parameter.data` may therefore go undetected, and on a GPU, where the comparison would make training wait, always
    does.

    Args:
        parameters: parameters to monitor.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._seen: list[tuple[int, int, int]] = []
        self.record()

    def record(self) -> None:
        """Record the current parameters."""
        seen = self._now()
        if [one[1:] for one in seen] != [one[1:] for one in self._seen]:
            self._samples = Samples(self._parameters, _RUNS)
        self._seen, self._sampled = seen, self._samples.take()

    def changed(self) -> bool:
        """Return whether a parameter has changed since the last `record`."""
        return self._seen != self._now() or not np.array_equal(self._sampled, self._samples.take())

    def _now(self) -> list[tuple[int, int, int]]:
        return [(parameter._version, parameter.data_ptr(), parameter.nbytes) for parameter in self._parameters]
