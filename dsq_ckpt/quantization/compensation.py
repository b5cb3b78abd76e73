"""Compensation of rounding errors of weights by other weights, based on correlations of a layer's inputs.

Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained transformers", 2023. An error of
one weight changes the output in proportion to its input. If other inputs are correlated with that input, as is usual in
a layer, their weights can compensate the error: each weight is shifted by the errors of the weights before it, and then
rounded. Nothing is stored for this. The meaning of codes is the same, only their choice differs. Protected values are
stored after the shift.
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

_DAMPING = 0.1  # fraction of the mean square of all inputs that is added to the mean square of each
_SIDE_BY_SIDE = 256  # outputs processed together
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class MatrixView:
    """A matrix in the memory of a tensor: weights that multiply the same inputs.

    Attributes:
        offset: offset of its first element in the tensor.
        outputs, inputs: shape of the matrix.
        strides: distances between outputs and between inputs.
    """

    offset: int
    outputs: int
    inputs: int
    strides: tuple[int, int]

    @property
    def stop(self) -> int:
        """Offset past the last element of the matrix."""
        return self.offset + (self.outputs - 1) * self.strides[0] + (self.inputs - 1) * self.strides[1] + 1

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix as a view of a flat tensor, [inputs, outputs]."""
        return flat.as_strided((self.inputs, self.outputs), self.strides[::-1], flat.storage_offset() + self.offset)


class ErrorSpread(NamedTuple):
    """Distribution of rounding errors among n inputs.

    Attributes:
        order: int64[n], order in which the weights are rounded: weights of the largest inputs first.
        factors: float32[n, n], zero below the diagonal: share of an error that each input later in `order` takes.
    """

    order: torch.Tensor
    factors: F32

    @classmethod
    def from_products(cls, products: torch.Tensor, rows: int) -> ErrorSpread | None:
        """Compute the distribution of errors; None if inputs are all zero or not finite.

        Few rows are a small sample: errors that cancel for these rows would not cancel for others. So damping grows
        with the number of inputs per row.

        Args:
            products: float[n, n], sums of products of inputs over rows.
            rows: number of rows in the sums.
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
    """Compensation of the rounding errors of a tensor's weights.

    Attributes:
        parts: disjoint matrices, each with blocks of consecutive inputs that cover all its inputs. Errors are spread
            within a block only, which bounds memory and time.
    """

    parts: list[tuple[MatrixView, list[ErrorSpread]]]

    @property
    def elements(self) -> int:
        """Number of elements of all parts."""
        return sum(view.outputs * view.inputs for view, _ in self.parts)

    def compensate(
        self, flat: torch.Tensor, fitted: GroupFit, scale: float, map_parts: Callable[..., Iterable[Any]] = map
    ) -> torch.Tensor:
        """Return shifted values: the code of each, chosen by itself, then compensates the errors of the others.

        Args:
            flat: values, float[n], contiguous.
            fitted: fit of the group, without previous codes.
            scale: scale of the values of the tensor, in units of the codebook.
            map_parts: function like `map`, for outputs that may be processed in parallel.

        Returns:
            float32[n] on the CPU, a copy.
        """
        shifted = torch.empty(flat.shape, dtype=torch.float32, device="cpu").copy_(flat)
        levels = (fitted.codebook.levels * scale).clip(-_LARGEST, _LARGEST).astype(np.float32)
        window, table = fitted.window, fitted.table[-1]
        for view, blocks in self.parts:
            for rows, block in zip(view.view(shifted).split([len(one.order) for one in blocks]), blocks, strict=True):
                values = rows[block.order]

                def work(columns: F32, factors: F32 = block.factors) -> None:
                    kernels.compensate(columns, factors, window.lo, window.hi, 1.0 / scale, table, levels)

                for _ in map_parts(work, np.array_split(values.numpy(), -(-view.outputs // _SIDE_BY_SIDE), axis=1)):
                    pass
                rows[block.order] = values
        return shifted

