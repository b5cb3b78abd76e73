"""Detection of changes outside of the optimizer, which gradients do not contain and replay would miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from dsq_ckpt.kernels.scan import Samples

_RUNS = 512


class ChangeDetector:
    """A detector of changes of parameters, and of the optimizer's state, since the last `record`.

    It compares torch's version counter and the address of each parameter. Changes through `parameter.data` affect
    neither, so it also compares about 32 kB of values, some of each parameter. A change of a few elements through
    `parameter.data` may therefore go undetected, and on a GPU, where the comparison would make training wait, always
    does. Of the optimizer's state it compares identities and version counters.

    Args:
        parameters: parameters to monitor.
        state: returns the tensors of the optimizer's state, which are made in its first step.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], state: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters, self._state = list(parameters), state
        self._seen: list[tuple[int, int, int]] = []
        self.record()

    def record(self) -> None:
        """Record the current parameters."""
        seen = self._now()
        if [one[1:] for one in seen] != [one[1:] for one in self._seen]:
            self._samples = Samples(self._parameters, _RUNS)
        self._seen, self._sampled = seen, self._samples.take()
        self._state_seen = self._state_now()

    def changed(self) -> str | None:
        """Return what has changed since the last `record`, for people; None: nothing."""
        if self._seen != self._now() or not np.array_equal(self._sampled, self._samples.take()):
            return "parameters were"
        return "the state of the optimizer was" if self._state_seen != self._state_now() else None

    def _now(self) -> list[tuple[int, int, int]]:
        return [(parameter._version, parameter.data_ptr(), parameter.nbytes) for parameter in self._parameters]

    def _state_now(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for tensor in self._state()]
