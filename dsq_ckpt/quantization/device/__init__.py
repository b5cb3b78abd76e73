"""Sketching and quantization of chunks in device memory, so that codes instead of floats are copied to the host.

`passes` computes sketches, `coding` computes codes, `transfer` copies codes to the host in the background. Work
that a device cannot do is done on the host with the same result: a save must not fail for lack of a kernel.
"""

from __future__ import annotations

import torch

from dsq_ckpt.core.notices import warn
from dsq_ckpt.kernels.dispatch import backend_for
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.chunk import Chunk

DEVICES = {"cuda"}
"""Types of devices that kernels run on; chunks on other devices are copied to the host unquantized."""
HOST_BELOW = 1 << 17
"""Number of elements below which a chunk is quantized on the host, except in a search."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_usable: dict[torch.device, bool] = {}


def is_supported(chunk: Chunk) -> bool:
    """Return whether a chunk is quantized on its device.

    Three kinds are quantized on the host: differences to values, elements weighed by sensitivity (both only used by the
    published systems), and codes that compensate each other's errors, which are chosen sequentially.
    """
    tensor = chunk.tensor
    return (
        tensor.device.type in DEVICES and chunk.on_device and chunk.key.elements > 0
        and tensor.dtype in _FLOATS and tensor.layout is torch.strided
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)  # subclasses may have no memory that a kernel can read
        and chunk.base_values is None and chunk.gradient is None and chunk.compensation is None
        and _is_usable(tensor.device)
    )


def may_hold_tensors() -> bool:
    """Return whether tensors of this process may be in device memory."""
    return "cuda" not in DEVICES or torch.cuda.is_initialized()


def _is_usable(device: torch.device) -> bool:
    """Return whether kernels run on a device. It is tried once, with a warning on failure."""
    if device not in _usable:
        try:
            if torch.version.hip is not None:
                raise RuntimeError("kernels were not tried on AMD's GPUs")
            counts = torch.zeros(FULL.size, dtype=torch.int64, device=device)
            backend_for(device).sketch(torch.ones(1, device=device), FULL.lo, FULL.hi, 1.0, counts)
            _usable[device] = int(counts.sum()) == 1
        except Exception as error:  # no Triton, no compiler, or an unsupported device
            _usable[device] = False
            warn(
                f"tensors on {device} are quantized on the host, which is slower: {type(error).__name__}: {error}"
            )
    return _usable[device]
