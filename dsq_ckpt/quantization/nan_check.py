"""NaN in tensors without a sketch, since they are not quantized: buffers, norms, biases and exact tensors.

Infinite values are legitimate there: masks and best losses so far hold them. Scalars are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

from dsq_ckpt.quantization.groups import QUANTIZABLE


def contain_nan(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether it holds NaN; False for dtypes that are never quantized.

    One tensor is held at a time. Each GPU is synchronized once.
    """
    flags: list[bool] = []
    largest: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        flags.append(False)
        with suppress(Exception):  # a subclass that has no maximum is saved all the same
            if tensor.ndim and tensor.numel() and tensor.dtype in QUANTIZABLE:
                maximum = tensor.detach().amax()  # NaN, if there is one; a sum would copy 16-bit numbers
                largest.setdefault(maximum.device, []).append((number, maximum.double()))
    for maxima in largest.values():
        for (number, _), value in zip(maxima, torch.stack([maximum for _, maximum in maxima]).tolist(), strict=True):
            flags[number] = value != value
    return flags
