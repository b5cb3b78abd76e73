"""Chunks that lie in device memory: sketched and quantized there, so that codes and not floats cross to the host.

``passes`` makes their sketches, ``coding`` their codes, ``transfer`` brings these to the host in the background.
"""

from __future__ import annotations

import torch

from dsq_ckpt.chunk import Chunk

DEVICES = {"cuda"}
"""Types of devices that kernels run on; chunks elsewhere go to the host as they are."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def serves(chunk: Chunk) -> bool:
    """Whether a chunk is worked on where it lies.

    Differences to values, and elements weighed by sensitivity, are the published systems' and are made on the host.
    """
    on_device = chunk.tensor.device.type in DEVICES and chunk.tensor.dtype in _FLOATS
    return on_device and chunk.onto is None and chunk.gradient is None and chunk.key.elements > 0
