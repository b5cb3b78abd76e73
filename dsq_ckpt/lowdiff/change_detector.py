"""Detection of changes outside of the optimizer, which gradients do not contain and replay would miss."""

from __future__ import annotations

import numpy as np

from dsq_ckpt.kernels.scan import Samples
from dsq_ckpt.lowdiff.train_state import TrainState

_RUNS = 512


class ChangeDetector:
    """A detector of changes of parameters, and of the optimizer's state, since the last `record`.

    It compares torch's version counter and the address of each parameter. Changes through `parameter.data` affect
    neither, so it also compares about 32 kB of values, some of each parameter. A change of a few elements through
    `parameter.data` may therefore go undetected, and on a GPU, where the comparison would make training wait, always
    does. Of the optimizer's state it compares identities and version counters.

    Args:
        train_state: train state to monitor.
    """

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self._parameters = train_state.monitored()
        self._seen: list[tuple[int, int, int]] = []
        self.record()

    def record(self) -> None:
        """Record the current parameters."""
        seen = self._now()
        if [one[1:] for one in seen] != [one[1:] for one in self._seen]:
            self._samples = Samples(self._parameters, _RUNS)
        self._seen, self._sampled = seen, self._samples.take()
        self._state, self._state_seen = self._train_state.optimizer.state, self._state_now()

    def changed(self) -> str | None:
        """Return what has changed since the last `record`, for people; None: nothing."""
        if self._seen != self._now() or not np.array_equal(self._sampled, self._samples.take()):
            return "parameters were"
        replaced = self._train_state.optimizer.state is not self._state
        return "the state of the optimizer was" if replaced or self._state_seen != self._state_now() else None

    def _now(self) -> list[tuple[int, int, int]]:
        return [(parameter._version, parameter.data_ptr(), parameter.nbytes) for parameter in self._parameters]

    def _state_now(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for tensor in self._train_state.state_tensors()]
