"""Error feedback: what compression left out of a gradient is added to the next one.

Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", Interspeech 2014; for sparse gradients Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018. Without it, elements that are always small would never
be trained.

Residuals are float32 whatever the gradient's dtype: in bfloat16 a residual that is 256 times a gradient would swallow
it. Gradients of float64 are rounded to float32. A residual has the unit of the gradients it was left by, so a loss
scale that changes between steps (`GradScaler` with float16) is not made up for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.buckets import Hooked, Part, in_memory, memory_strides


def forget_nonfinite(residual: Tensor, largest: Tensor) -> None:
    """Hold back no infinity and no NaN, of which a gradient has many when a loss scale was too large: they would come
    back in every later gradient.

    Args:
        residual: what is held back.
        largest: the largest of what it was taken from; they were sent, and tell that there is no more where they are
            finite.
    """
    if residual.is_cuda or not bool(largest.isfinite().all()):  # on a GPU asking would make training wait
        residual.nan_to_num_(0.0, 0.0, 0.0)


class Feedback(Hooked):
    """Keeps a residual for each parameter, on its device and in its memory format."""

    def __init__(self, spec: str, feedback: bool) -> None:
        super().__init__(spec)
        self.feedback = feedback
        self._residuals: dict[nn.Parameter, Tensor] = {}

    def _begin(self) -> None:
        super()._begin()
        self._residuals.clear()

    def state(self) -> dict[str, Tensor]:
        """See `Compressor.state`; residuals that no step has made yet are made now."""
        if not self._names:
            raise ConfigError(f"compressor '{self.spec}' has no residuals before attach() was called with a model")
        if not self.feedback:
            return {}
        return {name: self._residual(p, memory_strides(p)) for p, name in self._names.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Compressor.load_state`."""
        own = self.state()
        self._check_names(own, state)
        for name, residual in own.items():
            residual.copy_(state[name])

    def _residual(self, parameter: nn.Parameter, strides: tuple[int, ...]) -> Tensor:
        """The residual, laid out as the gradient is; zeros if there was none."""
        kept = self._residuals.get(parameter)
        if kept is not None and kept.stride() == strides:
            return kept
        fresh = torch.empty_strided(parameter.shape, strides, dtype=torch.float32, device=parameter.device)
        self._residuals[parameter] = fresh.zero_() if kept is None else fresh.copy_(kept)
        return fresh

    def _flat_residual(self, part: Part) -> Tensor:
        """The residual of a parameter in memory order, float32[elements]; shares it."""
        return in_memory(self._residual(part.parameter, part.strides))

    def _dropped(self, gradient: Tensor) -> bool:
        """Whether DDP may drop what is synchronized for a gradient, because no rank used the parameter.

        What is sent of a residual then would be lost. DDP gives zeros for a parameter that this rank did not use.
        """
        return self._skips and not (bool(gradient[:256].any()) or bool(gradient.any()))
