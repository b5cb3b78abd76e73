"""Whether anything but the optimizer changed parameters: gradients tell nothing of it, so a log would be wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ELEMENTS = 8192


class Watch:
    """Remembers parameters as they are.

    A change is seen by torch's own count of changes in place, by new memory, and, since neither counts what is done to
    `parameter.data`, by about 8,000 elements that are compared, evenly spread. What is done to `parameter.data` of a
    few elements is therefore seen with luck only; on a GPU, where comparing would make training wait, not at all.

    Args:
        parameters: that are watched.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        total = sum(parameter.numel() for parameter in self._parameters)
        every = max(total // _ELEMENTS, 1)
        self._samples = [
            parameter.detach().view(-1)[parameter.numel() // 2 % every :: every] for parameter in self._parameters
            if parameter.device.type == "cpu" and parameter.is_contiguous() and parameter.dtype == torch.float32
        ]
        self._seen = self._now()
        self._sampled = self._sample()

    def look(self) -> None:
        """Remember them as they are now."""
        self._seen = self._now()
        self._sampled = self._sample()

    def changed(self) -> bool:
        """Whether they changed since they were last looked at."""
        return self._seen != self._now() or not torch.equal(self._sampled, self._sample())

    def _now(self) -> list[tuple[int, int]]:
        return [(parameter._version, parameter.data_ptr()) for parameter in self._parameters]

    def _sample(self) -> torch.Tensor:
        """As integers: NaN equals itself then."""
        return torch.cat(self._samples).view(torch.int32) if self._samples else torch.empty(0, dtype=torch.int32)
