"""What a compressor of gradients is, and what it leaves for whoever records the gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dsq_ckpt.errors import LoadFailed


class GradientInfo(NamedTuple):
    """What a compressor knows of the synchronized gradient of one parameter.

    It holds for `p.grad` from the end of the backward pass on, and after clipping too, up to the scalar that clipping
    multiplies by: `support` is not touched by a scalar, and the witness tells which one it was.
    """

    support: Tensor | None
    """int64, row-major indices where the gradient may be non-zero, duplicates allowed; None: anywhere."""
    dtype: torch.dtype | None
    """A 16-bit type that holds every value exactly; None: there is none."""
    levels: Tensor | None
    """float32 on the CPU, at most 256, ascending: every value is one of them; None: not known to be so."""
    witness: tuple[Tensor, Tensor] | None
    """Row-major int64 indices of a few elements and their values, of the gradient's dtype; large ones preferred."""


class Compressor(ABC):
    """Changes how the gradients of a model are synchronized, and says of each what it has become.

    Example:
        >>> from dsq_ckpt.lowdiff.compressors import compressor
        >>> model = nn.Linear(100, 10)
        >>> topk = compressor("topk:0.01")
        >>> topk.attach(model)
        >>> model(torch.ones(1, 100)).sum().backward()
        >>> topk.take()[model.weight].support.shape
        torch.Size([10])
    """

    name: ClassVar[str]
    """The kind, as a spec begins with it."""
    spec: str
    """What `compressor` makes an equal one from."""

    def __init__(self, spec: str) -> None:
        self.spec = spec

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Compress the gradients of a model from now on; residuals start as zeros.

        On `DistributedDataParallel` this is its communication hook. On any other module each gradient is compressed
        where it is accumulated, and nothing is synchronized; a gradient that is accumulated over several backward
        passes is compressed after each of them.

        Raises:
            ConfigError: this compressor is attached already, the model has another communication hook, or gradients
                that cannot be compressed.
        """

    @abstractmethod
    def detach(self) -> None:
        """Leave the gradients alone. A hook cannot be removed from DDP: there it averages from now on, as DDP does."""

    @abstractmethod
    def take(self) -> dict[nn.Parameter, GradientInfo]:
        """What the last synchronization left, which is then forgotten.

        Parameters are absent where the hook did not run, where there is no gradient, or where nothing is known of it.
        """

    def state(self) -> dict[str, Tensor]:
        """Live residuals by parameter name: float32 of the parameter's shape, for every parameter, on this rank only.

        Raises:
            ConfigError: the compressor was never attached.
        """
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, on the same rank of as many.

        Raises:
            ConfigError: the compressor was never attached.
            LoadFailed: names are missing or unexpected, or shapes differ; nothing was changed.
        """
        self._check_names({}, state)

    def _check_names(self, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        """Raise `LoadFailed` with everything in which `given` is not as `own`."""
        wrong = [f"{name} is missing" for name in own if name not in given]
        wrong += [f"{name} is not expected" for name in given if name not in own]
        wrong += [
            f"{name} has shape {list(given[name].shape)}, expected {list(own[name].shape)}"
            for name in own if name in given and given[name].shape != own[name].shape
        ]
        if wrong:
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise LoadFailed(f"residuals do not fit compressor '{self.spec}': {'; '.join(wrong[:8])}{more}")
