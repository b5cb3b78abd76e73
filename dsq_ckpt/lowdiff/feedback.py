"""Error feedback: the compression error of a gradient is added to the next gradient.

Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", Interspeech 2014; for sparse gradients Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018. Without error feedback, elements whose gradients are
always small would never be trained.

Residuals are float32 for every gradient dtype: in bfloat16 a residual that is 256 times a gradient would absorb it.
Gradients of float64 are rounded to float32. A residual has the loss scale of its step, so a loss scale that changes
between steps (`GradScaler` with float16) is not corrected.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.buckets import BucketSlice, HookedCompressor, flatten_in_memory_order, memory_strides


def clear_nonfinite(residual: Tensor, largest: Tensor) -> None:
    """Set infinite and NaN residuals to zero, in place.

    Such gradients come from a loss scale that is too large. Their residuals would spoil every later gradient.

    Args:
        residual: residual of a gradient.
        largest: largest elements of gradient plus residual; if they are finite, so is the residual.
    """
    if residual.is_cuda or not bool(largest.isfinite().all()):  # on a GPU the test would make training wait
        residual.nan_to_num_(0.0, 0.0, 0.0)


class FeedbackCompressor(HookedCompressor):
    """A compressor with a residual for each parameter, on its device and in its memory format."""

    def __init__(self, spec: str, feedback: bool) -> None:
        super().__init__(spec)
        self.feedback = feedback
        self._residuals: dict[nn.Parameter, Tensor] = {}

    def _reset(self) -> None:
        super()._reset()
        self._residuals.clear()

    def state(self) -> dict[str, Tensor]:
        """See `GradientCompressor.state`; missing residuals are created as zeros."""
        if not self._names:
            raise ConfigError(f"compressor '{self.spec}' has no residuals before attach() was called with a model")
        if not self.feedback:
            return {}
        return {name: self._residual(p, memory_strides(p)) for p, name in self._names.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `GradientCompressor.load_state`."""
        residuals = self.state()
        self._check_state(residuals, state)
        for name, residual in residuals.items():
            residual.copy_(state[name])

    def _residual(self, parameter: nn.Parameter, strides: tuple[int, ...]) -> Tensor:
        """Return the residual in the gradient's layout, initially zeros."""
        existing = self._residuals.get(parameter)
        if existing is not None and existing.stride() == strides:
            return existing
        residual = torch.empty_strided(parameter.shape, strides, dtype=torch.float32, device=parameter.device)
        self._residuals[parameter] = residual.zero_() if existing is None else residual.copy_(existing)
        return residual

    def _flat_residual(self, slice_: BucketSlice) -> Tensor:
        """Return a view of a parameter's residual in memory order, float32[elements]."""
        return flatten_in_memory_order(self._residual(slice_.parameter, slice_.strides))

    def _is_dropped(self, gradient: Tensor) -> bool:
        """Return whether DDP may drop the synchronized gradient because no rank used the parameter.

        A residual added to it would be lost. The gradient of a parameter that this rank did not use is zero.
        """
        return self._ddp_may_drop and not (bool(gradient[:256].any()) or bool(gradient.any()))
