"""NaN in tensors that no sketch sees, since they are not quantized: buffers, norms and biases, exact ones.

Infinite values count for nothing here: masks and best losses so far hold them for good reason. Nor do numbers without a
dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

from dsq_ckpt.quantization.groups import QUANTIZABLE


def hold_nan(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether it holds NaN; False for dtypes that are never quantized.

    One tensor is held at a time. Those on a GPU are waited for once together.
    """
    found: list[bool] = []
    largest: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        found.append(False)
        with suppress(Exception):  # a subclass that has no maximum is saved all the same
            if tensor.ndim and tensor.numel() and tensor.dtype in QUANTIZABLE:
                own = tensor.detach().amax()  # NaN, if there is one; a sum would be a copy of 16-bit numbers
                largest.setdefault(own.device, []).append((number, own.double()))
    for mine in largest.values():
        for (number, _), value in zip(mine, torch.stack([own for _, own in mine]).tolist(), strict=True):
            found[number] = value != value
    return found
