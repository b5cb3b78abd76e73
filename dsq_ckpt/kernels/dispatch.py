"""Choice of kernels by device: C or Numba on the CPU, Triton on a GPU.

Triton is not imported before a CUDA device is used.
"""

from __future__ import annotations

from importlib import import_module

import torch

from dsq_ckpt.kernels import host
from dsq_ckpt.kernels.backend import Backend


def backend_for(device: torch.device | str) -> Backend:
    """Return the kernels for tensors of a device.

    Raises:
        ModuleNotFoundError: Triton is missing for a CUDA device.
        ValueError: the device is neither CPU nor CUDA.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return host.cpu_backend()
    if device.type == "cuda":
        try:
            module = import_module("dsq_ckpt.triton_kernels.backend")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ModuleNotFoundError(
                f"tensors on {device} are quantized there by Triton, which is not installed: "
                "pip install triton, or move the tensors to the CPU",
                name="triton",
            ) from error
        backend: Backend = module.TritonBackend(device)
        return backend
    raise ValueError(f"there are no kernels for tensors on {device}, only for CPU and CUDA: move them to the CPU first")
