"""What a layer's inputs have in common, by which rounding errors of its weights cancel in its outputs.

Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained transformers", 2023. An error of
one weight changes the output by its input. Where other inputs go with that one, as inputs of a layer do, their weights
can make up for the error: each is shifted before it is rounded, by the errors of those before it. Nothing is stored for
that; codes mean what they meant, and only their choice differs. Protected values are stored as they were shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import F32
from dsq_ckpt.quantization.codebook import GroupFit

_DAMPING = 0.1  # share of the mean square of all inputs that each has besides its own: more than is known of any
_SIDE_BY_SIDE = 256  # outputs
_LARGEST = float(np.finfo(np.float32).max)


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

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of a flat tensor: [inputs, outputs]."""
        return flat.as_strided((self.inputs, self.outputs), self.strides[::-1], flat.storage_offset() + self.offset)


class ErrorSpread(NamedTuple):
    """How errors are spread among n inputs.

    Attributes:
        order: int64[n], in which their weights are rounded: those of the largest inputs first.
        factors: float32[n, n], zero below the diagonal: how much of an error each input later in that order takes.
    """

    order: torch.Tensor
    factors: F32

    @classmethod
    def from_products(cls, products: torch.Tensor, rows: int) -> ErrorSpread | None:
        """Return how errors are spread; None where inputs are all zero or not finite.

        Few rows tell little: errors that cancel for these would not for others. So the share of its mean square that
        each input has for itself grows with the number of inputs per row.

        Args:
            products: float[n, n]: sums of products of inputs.
            rows: of inputs that were summed.
        """
        products = products.to("cpu", torch.float64)
        mean = products.diagonal().mean()
        if not (mean > 0 and bool(products.isfinite().all())):
            return None
        order = products.diagonal().argsort(descending=True, stable=True)
        ordered = products[order][:, order]
        ordered.diagonal().add_((_DAMPING + len(order) / rows) * mean)
        upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(ordered)), upper=True)
        return cls(order, (upper / upper.diagonal()[:, None]).to(torch.float32).contiguous().numpy())


@dataclass(frozen=True)
class Compensation:
    """How errors of a tensor's weights are spread.

    Attributes:
        parts: matrices that do not overlap, and for each of them blocks of consecutive inputs, together all. Errors are
            spread within a block only, which bounds memory and time.
    """

    parts: list[tuple[MatrixView, list[ErrorSpread]]]

    @property
    def elements(self) -> int:
        """Elements of all parts."""
        return sum(view.outputs * view.inputs for view, _ in self.parts)

    def compensate(
        self, flat: torch.Tensor, fitted: GroupFit, scale: float, do: Callable[..., Iterable[Any]] = map
    ) -> torch.Tensor:
        """Return the values whose codes, each by itself, are those that compensate each other's errors.

        Args:
            flat: values, float[n], contiguous.
            fitted: without a previous code.
            scale: of the tensor's values, in units of the codebook.
            do: as `map`, for outputs that may be worked on side by side.

        Returns:
            float32[n] on the CPU; a copy.
        """
        shifted = torch.empty(flat.shape, dtype=torch.float32, device="cpu").copy_(flat)
        levels = (fitted.codebook.levels * scale).clip(-_LARGEST, _LARGEST).astype(np.float32)
        window, table = fitted.window, fitted.table[-1]
        for view, blocks in self.parts:
            for rows, block in zip(view.view(shifted).split([len(one.order) for one in blocks]), blocks, strict=True):
                values = rows[block.order]

                def work(some: F32, factors: F32 = block.factors) -> None:
                    kernels.compensate(some, factors, window.lo, window.hi, 1.0 / scale, table, levels)

                for _ in do(work, np.array_split(values.numpy(), -(-view.outputs // _SIDE_BY_SIDE), axis=1)):
                    pass
                rows[block.order] = values
        return shifted

