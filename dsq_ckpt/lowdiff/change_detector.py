"""Detection of changes outside of the optimizer's step, which a replay of gradients would miss."""

from __future__ import annotations

import numpy as np

from dsq_ckpt.kernels.scan import Samples
from dsq_ckpt.lowdiff.train_state import TrainState

_SAMPLE_RUNS = 512


class ChangeDetector:
    """A detector of changes of parameters and of the optimizer's state since the last `record`.

    The detector compares torch's version counter and the address of each parameter. Changes through `parameter.data`
    affect neither, so it also compares about 32 kB of values, some of each parameter. A change of a few elements
    through `parameter.data` may go undetected. On a GPU it always does, since a comparison would make training wait.
    For the optimizer's state the detector compares identities and version counters.

    Args:
        train_state: train state to monitor.
    """

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self._parameters = train_state.monitored_tensors()
        self._recorded: list[tuple[int, int, int]] = []
        self.record()

    def record(self) -> None:
        """Record the current parameters and the optimizer's state."""
        versions = self._parameter_versions()
        if [address for _, *address in versions] != [address for _, *address in self._recorded]:
            self._samples = Samples(self._parameters, _SAMPLE_RUNS)
        self._recorded, self._recorded_samples = versions, self._samples.take()
        self._state, self._recorded_state = self._train_state.optimizer.state, self._state_versions()

    def describe_change(self) -> str | None:
        """Return the subject of a warning about changes since the last `record`; None if nothing has changed."""
        if self._recorded != self._parameter_versions():
            return "parameters were"
        if not np.array_equal(self._recorded_samples, self._samples.take()):
            return "parameters were"
        replaced = self._train_state.optimizer.state is not self._state
        return "the state of the optimizer was" if replaced or self._recorded_state != self._state_versions() else None

    def _parameter_versions(self) -> list[tuple[int, int, int]]:
        return [(parameter._version, parameter.data_ptr(), parameter.nbytes) for parameter in self._parameters]

    def _state_versions(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for tensor in self._train_state.state_tensors()]
