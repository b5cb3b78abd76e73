"""A few elements of a gradient right after its synchronization, for compressors that leave it dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsq_ckpt.lowdiff.buckets import Bucket, Part, on_this_stream

_ELEMENTS = 16
"""Of a parameter, beside the largest of its bucket."""

Seen = tuple[Tensor, Tensor]
"""What `GradientInfo.witness` is."""


@dataclass(frozen=True)
class Places:
    """Where to look in buckets of one kind: evenly spaced in every parameter.

    Attributes:
        flat: int64, into the bucket.
        bounds: which of them belong to each part.
    """

    flat: Tensor
    bounds: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, bucket: Bucket) -> Places:
        """Places for buckets that are laid out as this one."""
        chosen = [evenly(part.elements, _ELEMENTS) + part.start for part in bucket.parts]
        return cls(torch.cat(chosen).to(bucket.flat.device), bounds_of([len(places) for places in chosen]))

    def witnesses(self, bucket: Bucket) -> list[Callable[[], Seen | None]]:
        """Look at a bucket now; what it gives makes the witness of each part when it is called."""
        if not bucket.flat.numel():
            return [lambda: None for _ in bucket.parts]
        values, largest = bucket.flat.index_select(0, self.flat), _largest(bucket.flat)
        top = (largest, bucket.flat.index_select(0, largest))
        return [
            partial(_witness, part, (self.flat[start:stop], values[start:stop]), top)
            for part, (start, stop) in zip(bucket.parts, self.bounds, strict=True)
        ]


def _largest(flat: Tensor) -> Tensor:
    """Place of the largest magnitude, or of a NaN, int64[1]; NumPy needs no copy and a fifth of torch's time."""
    if flat.device.type != "cpu" or flat.dtype != torch.float32:
        return flat.abs().argmax().view(1)
    values = flat.numpy()
    low, high = int(values.argmin()), int(values.argmax())
    return torch.tensor([high if values[high] >= -values[low] else low])


def _witness(part: Part, some: Seen, top: Seen) -> Seen | None:
    if not part.elements:
        return None
    pairs = [top, some] if part.start <= int(top[0]) < part.stop else [some]
    places, values = (torch.cat([on_this_stream(tensor) for tensor in both]) for both in zip(*pairs, strict=True))
    return part.row_major(places - part.start), values


def evenly(elements: int, most: int) -> Tensor:
    """At most `most` indices of that many elements, evenly spaced, int64."""
    return torch.arange(0, elements, max(1, -(-elements // most)))


def bounds_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where each one lies in the concatenation of all."""
    bounds, start = [], 0
    for length in lengths:
        bounds.append((start, start + length))
        start += length
    return bounds
