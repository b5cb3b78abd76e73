"""Chunks that lie in device memory: sketched and quantized there, so that codes and not floats cross to the host.

``passes`` makes their sketches, ``coding`` their codes, ``transfer`` brings these to the host in the background. What
cannot be done on the device is done on the host, with the same result: a save must not fail for want of a kernel.
"""

from __future__ import annotations

import torch

from dsq_ckpt.core.notices import warn
from dsq_ckpt.kernels.dispatch import backend_for
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.chunk import Chunk

DEVICES = {"cuda"}
"""Types of devices that kernels run on; chunks elsewhere go to the host as they are."""
HOST_BELOW = 1 << 17
"""Chunks of fewer elements are copied to the host and quantized there, except in a search."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_usable: dict[torch.device, bool] = {}


def is_supported(chunk: Chunk) -> bool:
    """Return whether a chunk is quantized on its device.

    Differences to values, and elements weighed by sensitivity, are the published systems' and are made on the host, and
    so are codes that compensate each other's errors, one after the other.
    """
    tensor = chunk.tensor
    return (
        tensor.device.type in DEVICES and chunk.on_device and chunk.key.elements > 0
        and tensor.dtype in _FLOATS and tensor.layout is torch.strided
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)  # others may have no memory that a kernel could read
        and chunk.base_values is None and chunk.gradient is None and chunk.compensation is None
        and _is_usable(tensor.device)
    )


def may_hold_tensors() -> bool:
    """Return whether tensors of this process may be in device memory."""
    return "cuda" not in DEVICES or torch.cuda.is_initialized()


def _is_usable(device: torch.device) -> bool:
    """Return whether kernels run on a device; tried once, with a warning if they do not."""
    if device not in _usable:
        try:
            if torch.version.hip is not None:
                raise RuntimeError("kernels were not tried on AMD's GPUs")
            counts = torch.zeros(FULL.size, dtype=torch.int64, device=device)
            backend_for(device).sketch(torch.ones(1, device=device), FULL.lo, FULL.hi, 1.0, counts)
            _usable[device] = int(counts.sum()) == 1
        except Exception as error:  # no Triton, no compiler for it, a device it does not know
            _usable[device] = False
            warn(
                f"tensors on {device} are quantized on the host, which is slower: {type(error).__name__}: {error}"
            )
    return _usable[device]
