"""Kernels on CPU tensors, passed as NumPy views to the kernels for arrays.

bfloat16 and float16 are first converted to fp32, exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import Array
from dsq_ckpt.kernels import changed_codes as changes
from dsq_ckpt.kernels.backend import Refinement
from dsq_ckpt.kernels.keys import FULL

_HALVES = (torch.bfloat16, torch.float16)
"""Dtypes that are converted to fp32."""


class HostBackend:
    """Implementation of `backend.Backend` on CPU tensors.

    Args:
        name: name of the backend, "cpu" for this package's own.
        operations: module with the functions of `cpu`, for NumPy arrays.
    """

    def __init__(self, name: str, operations: Any) -> None:
        self.name = name
        self._operations = operations

    def check(self) -> None:
        """Do nothing: operations raise at once."""

    def sketch(self, x: Tensor, lo: int, hi: int, inv_scale: float, counts: Tensor) -> None:
        """Implement `cpu.sketch`."""
        self._operations.sketch(_fp32_array(x), lo, hi, inv_scale, _array(counts))

    def joint_sketch(
        self, x: Tensor, parent: Tensor | None, context: int, lo: int, hi: int, inv_scale: float, counts: Tensor
    ) -> None:
        """Implement `cpu.joint_sketch`."""
        self._operations.joint_sketch(
            _fp32_array(x), _optional_array(parent), context, lo, hi, inv_scale, _array(counts)
        )

    def quantize(
        self, x: Tensor, parent: Tensor | None, context: int, lo: int, hi: int, inv_scale: float, table: Tensor,
        codes: Tensor, refinement: Refinement | None = None, protected_code: int = -1,
    ) -> None:
        """Implement `cpu.quantize` and `cpu.refine`. Protected codes are not counted here."""
        values = _fp32_array(x)
        self._operations.quantize(
            values, _optional_array(parent), context, lo, hi, inv_scale, _array(table), _array(codes)
        )
        if refinement is not None:
            low, inv_width, bits, log_domain, out = refinement
            self._operations.refine(
                values, _array(codes), inv_scale, _array(low), _array(inv_width), bits, log_domain, _array(out)
            )

    def gather_protected(
        self, x: Tensor, codes: Tensor, protected_code: int, tally: Tensor | None = None, bf16: bool = False,
        capacity: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Implement `cpu.gather_protected`. All elements are returned, whatever the capacity."""
        bits = self._operations.gather_protected(_fp32_array(x), _array(codes), protected_code)
        if bf16:
            halves = self._operations.to_bf16(bits)
            bits = np.where((halves & 0x7FFF) == 0x7F80, halves - 1, halves).astype(np.uint16)
        return torch.from_numpy(bits), torch.tensor(len(bits), device="cpu")

    def refine(
        self, x: Tensor, codes: Tensor, inv_scale: float, low: Tensor, inv_width: Tensor, bits: int, log_domain: bool,
        out: Tensor,
    ) -> None:
        """Implement `cpu.refine`."""
        self._operations.refine(
            _fp32_array(x), _array(codes), inv_scale, _array(low), _array(inv_width), bits, log_domain, _array(out)
        )

    def dequantize(
        self, codes: Tensor, levels: Tensor, scale: float, protected_code: int, protected: Tensor, out: Tensor
    ) -> Tensor:
        """Implement `cpu.dequantize`."""
        values = _fp32_output(out)
        used = self._operations.dequantize(
            _array(codes), _array(levels), scale, protected_code, _array(protected), _array(values)
        )
        return _copy_to_output(values, out, used)

    def dequantize_refined(
        self, codes: Tensor, refinement: Tensor, bits: int, low: Tensor, width: Tensor, sign: Tensor, levels: Tensor,
        scale: float, protected_code: int, protected: Tensor, log_domain: bool, out: Tensor,
    ) -> Tensor:
        """Implement `cpu.dequantize_refined`."""
        values = _fp32_output(out)
        used = self._operations.dequantize_refined(
            _array(codes), _array(refinement), bits, _array(low), _array(width), _array(sign), _array(levels), scale,
            protected_code, _array(protected), log_domain, _array(values),
        )
        return _copy_to_output(values, out, used)

    def pack(self, symbols: Tensor, bits: int) -> Tensor:
        """Implement `cpu.pack`."""
        return torch.from_numpy(self._operations.pack(_array(symbols), bits))

    def unpack(self, packed: Tensor, bits: int, out: Tensor) -> None:
        """Implement `cpu.unpack`."""
        self._operations.unpack(_array(packed), bits, _array(out))

    def find_changes(
        self, codes: Tensor, parent: Tensor, capacity: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `kernels.changed_codes.find_changes`. All elements are returned, whatever the capacity."""
        positions, changed = changes.find_changes(_array(codes), _array(parent))
        return torch.from_numpy(positions), torch.from_numpy(changed), torch.tensor(len(changed), device="cpu")

    def apply_changes(self, parent: Tensor, positions: Tensor, changed: Tensor, out: Tensor) -> None:
        """Implement `kernels.changed_codes.apply_changes`."""
        changes.apply_changes(_array(parent), _array(positions), _array(changed), _array(out))

    def blend(self, average: Tensor, new: Tensor, weight: float) -> None:
        """Set `average = weight * new + (1 - weight) * average`, in place."""
        if average.dtype != torch.float32 or new.dtype not in (torch.float32, *_HALVES) or average.shape != new.shape:
            raise ValueError(
                f"expected a float32 average and new values of its shape, got {average.dtype}{list(average.shape)} and "
                f"{new.dtype}{list(new.shape)}"
            )
        average.mul_(1.0 - weight).add_(new.float(), alpha=weight)

    def sketch_sensitivity(
        self, parameter: Tensor, average: Tensor, counts: Tensor, new: Tensor | None = None, weight: float = 0.0
    ) -> None:
        """Add the sketch of `importance` over the full window."""
        if new is not None:
            self.blend(average, new, weight)
        importance = kernels.compute_importance(_fp32_array(parameter), _array(average))
        self._operations.sketch(importance, FULL.lo, FULL.hi, 1.0, _array(counts))

    def compute_importance(self, weight: Tensor, average: Tensor) -> Tensor:
        """Implement `kernels.compute_importance`."""
        return torch.from_numpy(kernels.compute_importance(_fp32_array(weight), _array(average)))

    def classify(self, importance: Tensor, prune_below: float, protect_from: float) -> Tensor:
        """Implement `kernels.classify`."""
        return torch.from_numpy(kernels.classify(_array(importance), prune_below, protect_from))


def cpu_backend() -> HostBackend:
    """Return the backend that the CPU uses."""
    return HostBackend("cpu", kernels)


def _array(tensor: Tensor) -> Array:
    if tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
        raise ValueError(f"expected a CPU tensor that NumPy can read, got {tensor.dtype} on {tensor.device}")
    array: Array = tensor.detach().numpy()
    return array


def _optional_array(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else _array(tensor)


def _fp32_array(tensor: Tensor) -> Array:
    if tensor.dtype == torch.float16:
        return _array(tensor).astype(np.float32)  # torch loses the sign of some NaN
    return _array(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)


def _fp32_output(out: Tensor) -> Tensor:
    """Return the fp32 tensor to decode into: `out` or, for other dtypes, a tensor that is then rounded to `out`."""
    return torch.empty(out.shape, dtype=torch.float32, device="cpu") if out.dtype in _HALVES else out


def _copy_to_output(values: Tensor, out: Tensor, used: int) -> Tensor:
    if values is not out:
        out.copy_(values)
    return torch.tensor(used, device="cpu")
