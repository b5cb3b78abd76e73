"""What a layer's inputs have in common, by which rounding errors of its weights cancel in its outputs.

Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained transformers", 2023. An error of
one weight changes the output by its input. Where other inputs go with that one, as inputs of a layer do, their weights
can make up for it: each is shifted before it is rounded, by the errors of those before it. Nothing is stored for that;
codes mean what they meant, and only their choice differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import F32
from dsq_ckpt.quantization.codebook import Fitted

DAMPING = 0.1
"""Share of the mean square of all inputs that each is taken to have besides its own: what few batches cannot tell."""


@dataclass(frozen=True)
class MatrixView:
    """A matrix in a tensor's memory: weights that multiply the same inputs.

    Attributes:
        offset: of its first element, from the tensor's.
        outputs, inputs: shape.
        strides: between outputs, and between inputs.
    """

    offset: int
    outputs: int
    inputs: int
    strides: tuple[int, int]

    @property
    def stop(self) -> int:
        """Offset past its last element."""
        return self.offset + (self.outputs - 1) * self.strides[0] + (self.inputs - 1) * self.strides[1] + 1

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of a flat tensor: [inputs, outputs]."""
        return flat.as_strided((self.inputs, self.outputs), self.strides[::-1], flat.storage_offset() + self.offset)


class Spread(NamedTuple):
    """How errors are spread among n inputs.

    Attributes:
        order: int64[n], in which their weights are rounded: those of the largest inputs first.
        factors: float32[n, n], zero below the diagonal: how much of an error each input later in that order takes.
    """

    order: torch.Tensor
    factors: F32

    @classmethod
    def of(cls, moments: torch.Tensor) -> Spread | None:
        """Return how errors are spread; None where inputs are all zero or not finite.

        Args:
            moments: float[n, n]: sums of products of inputs.
        """
        moments = moments.to("cpu", torch.float64)
        mean = moments.diagonal().mean()
        if not (mean > 0 and bool(moments.isfinite().all())):
            return None
        order = moments.diagonal().argsort(descending=True, stable=True)
        ordered = moments[order][:, order]
        ordered.diagonal().add_(DAMPING * mean)
        upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(ordered)), upper=True)
        return cls(order, (upper / upper.diagonal()[:, None]).float().contiguous().numpy())


@dataclass(frozen=True)
class Compensation:
    """How errors of a tensor's weights are spread.

    Attributes:
        parts: matrices that do not overlap, and for each of them blocks of consecutive inputs, together all. Errors are
            spread within a block only, which bounds memory and time.
    """

    parts: list[tuple[MatrixView, list[Spread]]]

    @property
    def elements(self) -> int:
        """Elements of all parts."""
        return sum(view.outputs * view.inputs for view, _ in self.parts)

    def shifted(self, flat: torch.Tensor, fitted: Fitted, inv_scale: float) -> torch.Tensor:
        """Return the values whose codes, each by itself, are those that compensate each other's errors.

        Args:
            flat: values, float[n], contiguous.
            fitted: without a previous code.
            inv_scale: as of ``kernels.quantize``.

        Returns:
            float32[n] on the CPU; a copy.
        """
        shifted = torch.empty(flat.shape).copy_(flat)
        levels = (fitted.codebook.levels / inv_scale).astype(np.float32)
        for view, blocks in self.parts:
            for rows, block in zip(view.of(shifted).split([len(one.order) for one in blocks]), blocks, strict=True):
                values = rows[block.order]
                kernels.compensate(
                    values.numpy(), block.factors, fitted.window.lo, fitted.window.hi, inv_scale, fitted.table[-1],
                    levels,
                )
                rows[block.order] = values
        return shifted

