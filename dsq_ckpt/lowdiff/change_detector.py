"""Whether anything but the optimizer changed parameters: gradients tell nothing of it, so a log would be wrong."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dsq_ckpt.kernels.scan import Samples

_RUNS = 512


class ChangeDetector:
    """Remembers parameters as they are.

    A change is seen by torch's own count of changes in place, by new memory, and, since neither counts what is done to
    `parameter.data`, by about 32 kB that are compared, some of each parameter. What is done to
    `parameter.data` of a few elements is therefore seen with luck only; on a GPU, where comparing would make training
    wait, not at all.

    Args:
        parameters: that are watched.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._seen: list[tuple[int, int, int]] = []
        self.look()

    def look(self) -> None:
        """Remember them as they are now."""
        seen = self._now()
        if [one[1:] for one in seen] != [one[1:] for one in self._seen]:
            self._samples = Samples(self._parameters, _RUNS)
        self._seen, self._sampled = seen, self._samples.take()

    def changed(self) -> bool:
        """Whether they changed since they were last looked at."""
        return self._seen != self._now() or not np.array_equal(self._sampled, self._samples.take())

    def _now(self) -> list[tuple[int, int, int]]:
        return [(parameter._version, parameter.data_ptr(), parameter.nbytes) for parameter in self._parameters]
