"""Sketches of chunks in device memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.kernels.dispatch import backend_for
from dsq_ckpt.kernels.keys import FULL, KeyWindow
from dsq_ckpt.quantization.chunk import Chunk
from dsq_ckpt.quantization.dequantizer import scale_of

_TOGETHER = 64  # full sketches of 254 KiB that are copied to the host at once


def parent_on_device(chunk: Chunk) -> torch.Tensor:
    """Return the previous codes, uint8[n], on the device of the chunk; copied if they are elsewhere."""
    if chunk.device_codes is not None and chunk.device_codes.device == chunk.tensor.device:
        return chunk.device_codes
    assert chunk.parent is not None
    return torch.from_numpy(chunk.parent).to(chunk.tensor.device)


def full_sketches(chunks: Sequence[Chunk]) -> Iterator[Counts]:
    """Yield the counts of every chunk in the full window, unscaled, int64[FULL.size] each, in order."""
    for start in range(0, len(chunks), _TOGETHER):
        batch = chunks[start : start + _TOGETHER]
        rows = {
            device: torch.zeros((len(batch), FULL.size), dtype=torch.int64, device=device)
            for device in {chunk.tensor.device for chunk in batch}
        }
        backends = {device: backend_for(device) for device in rows}
        for index, chunk in enumerate(batch):
            device = chunk.tensor.device
            backends[device].sketch(chunk.coded_flat(), FULL.lo, FULL.hi, 1.0, rows[device][index])
        results = {device: counts.cpu().numpy() for device, counts in rows.items()}  # all are queued by now
        yield from (results[chunk.tensor.device][index] for index, chunk in enumerate(batch))


def add_joint(chunks: Sequence[Chunk], window: KeyWindow, counts: Counts) -> None:
    """Add chunks of one group to its joint counts, int64[rows, window.size]; without a parent, to the last row.

    Raises:
        torch.OutOfMemoryError: device memory is full; nothing was added.
    """
    total = np.zeros_like(counts)
    for device in {chunk.tensor.device for chunk in chunks}:
        backend, partial = backend_for(device), torch.zeros(counts.shape, dtype=torch.int64, device=device)
        for chunk in chunks:
            if chunk.tensor.device == device:
                parent = None if chunk.parent is None else parent_on_device(chunk)
                backend.joint_sketch(
                    chunk.coded_flat(), parent, counts.shape[0] - 1, window.lo, window.hi,
                    1.0 / scale_of(chunk.exponent), partial,
                )
        backend.check()
        total += partial.cpu().numpy()
    counts += total
