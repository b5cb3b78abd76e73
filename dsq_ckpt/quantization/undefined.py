"""NaN in tensors that no sketch sees, since they are not quantized: buffers, norms and biases, exact ones.

Infinite values count for nothing here: masks and best losses so far hold them for good reason. Nor do single numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsq_ckpt.quantization.groups import QUANTIZABLE


def hold_nan(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether it holds NaN; False for single elements, and dtypes that are never quantized.

    A sum that is NaN gives rise to a second look, since infinite values of both signs have one too. Tensors on a GPU
    are waited for once together.
    """
    found = [False] * len(tensors)
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel() > 1 and tensor.dtype in QUANTIZABLE:
            total = tensor.detach().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
            sums.setdefault(total.device, []).append((number, total.double()))
    for own in sums.values():
        for (number, _), total in zip(own, torch.stack([total for _, total in own]).tolist(), strict=True):
            found[number] = total != total and bool(tensors[number].isnan().any())
    return found
