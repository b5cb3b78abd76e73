"""The interface of gradient compressors, and their description of a synchronized gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dsq_ckpt.errors import LoadFailed


class GradientInfo(NamedTuple):
    """Properties of the synchronized gradient of one parameter.

    They describe `p.grad` from the end of the backward pass on. Clipping multiplies the gradient by a scalar: `support`
    stays valid, and the factor can be computed from `probe`.
    """

    support: Tensor | None
    """int64 row-major indices of all elements that may be non-zero, with possible duplicates; None for all elements."""
    dtype: torch.dtype | None
    """A 16-bit dtype that represents every value exactly; None if unknown."""
    levels: Tensor | None
    """float32 on the CPU, at most 256 ascending levels that contain every value; None if unknown."""
    probe: tuple[Tensor, Tensor] | None
    """int64 row-major indices of a few elements, preferably large ones, and their values in the gradient's dtype."""


class GradientCompressor(ABC):
    """A compressor that synchronizes the gradients of a model, and describes each result.

    Example:
        >>> from dsq_ckpt.lowdiff.compressors import gradient_compressor
        >>> model = nn.Linear(100, 10)
        >>> topk = gradient_compressor("topk:0.01")
        >>> topk.attach(model)
        >>> model(torch.ones(1, 100)).sum().backward()
        >>> topk.take()[model.weight].support.shape
        torch.Size([10])
    """

    name: ClassVar[str]
    """Kind of the compressor, the first word of its spec."""
    spec: str
    """Spec from which `gradient_compressor` creates an equal compressor."""

    def __init__(self, spec: str) -> None:
        self.spec = spec

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Compress the gradients of a model from now on; residuals start at zero.

        On `DistributedDataParallel` the compressor becomes the communication hook. On any other module each gradient is
        compressed when it is accumulated, without synchronization; with gradient accumulation it is compressed after
        each backward pass.

        Raises:
            ConfigError: this compressor is attached already, the model has another communication hook, or its gradients
                cannot be compressed.
        """

    @abstractmethod
    def detach(self) -> None:
        """Stop compressing. DDP cannot remove a hook; the hook then averages gradients, as DDP does by default."""

    @abstractmethod
    def take(self) -> dict[nn.Parameter, GradientInfo]:
        """Return and clear the information about the last synchronization.

        A parameter is absent if the hook did not run, if it has no gradient, or if nothing is known about it.
        """

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residuals by parameter name, float32 of the parameter's shape; not a copy.

        Raises:
            ConfigError: the compressor was never attached.
        """
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` of the same rank and the same number of ranks.

        Raises:
            ConfigError: the compressor was never attached.
            LoadFailed: names are missing or unexpected, or shapes differ. Nothing has changed.
        """
        self._check_state({}, state)

    def _check_state(self, expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Raise a `LoadFailed` that names the differences between `expected` and the loaded `state`."""
        problems = [f"{name} is missing" for name in expected if name not in state]
        problems += [f"{name} is not expected" for name in state if name not in expected]
        problems += [
            f"{name} has shape {list(state[name].shape)}, expected {list(expected[name].shape)}"
            for name in expected if name in state and state[name].shape != expected[name].shape
        ]
        if problems:
            suffix = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise LoadFailed(f"residuals do not fit compressor '{self.spec}': {'; '.join(problems[:8])}{suffix}")
