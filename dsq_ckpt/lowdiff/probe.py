"""Probes: a few elements of a gradient right after its synchronization, for compressors with dense results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsq_ckpt.lowdiff.buckets import Bucket, BucketSlice, on_this_stream

_ELEMENTS = 16
"""Elements per parameter, in addition to the largest element of the bucket."""

Probe = tuple[Tensor, Tensor]
"""Indices and values; see `GradientInfo.probe`."""


@dataclass(frozen=True)
class ProbeIndices:
    """Evenly spaced indices of every parameter, for buckets of one layout.

    Attributes:
        flat: int64 indices into the bucket.
        bounds: range of `flat` for each slice.
    """

    flat: Tensor
    bounds: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, bucket: Bucket) -> ProbeIndices:
        """Return the indices for buckets of this layout."""
        chosen = [evenly(slice_.elements, _ELEMENTS) + slice_.start for slice_ in bucket.slices]
        return cls(torch.cat(chosen).to(bucket.flat.device), bounds_of([len(places) for places in chosen]))

    def probes(self, bucket: Bucket) -> list[Callable[[], Probe | None]]:
        """Read elements of a bucket now; return a function for each slice that builds its probe."""
        if not bucket.flat.numel():
            return [lambda: None for _ in bucket.slices]
        values, largest = bucket.flat.index_select(0, self.flat), _largest(bucket.flat)
        top = (largest, bucket.flat.index_select(0, largest))
        return [
            partial(_probe, slice_, (self.flat[start:stop], values[start:stop]), top)
            for slice_, (start, stop) in zip(bucket.slices, self.bounds, strict=True)
        ]


def _largest(flat: Tensor) -> Tensor:
    """Return the index of the largest magnitude, or of a NaN, int64[1]; NumPy takes a fifth of torch's time."""
    if flat.device.type != "cpu" or flat.dtype != torch.float32:
        return flat.abs().argmax().view(1)
    values = flat.numpy()
    low, high = int(values.argmin()), int(values.argmax())
    return torch.tensor([high if values[high] >= -values[low] else low])


def _probe(slice_: BucketSlice, some: Probe, top: Probe) -> Probe | None:
    if not slice_.elements:
        return None
    pairs = [top, some] if slice_.start <= int(top[0]) < slice_.stop else [some]
    places, values = (torch.cat([on_this_stream(tensor) for tensor in both]) for both in zip(*pairs, strict=True))
    return slice_.row_major(places - slice_.start), values


def evenly(elements: int, most: int) -> Tensor:
    """Return at most `most` evenly spaced int64 indices into `elements` elements."""
    return torch.arange(0, elements, max(1, -(-elements // most)))


def bounds_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the range of each item in the concatenation of all items."""
    bounds, start = [], 0
    for length in lengths:
        bounds.append((start, start + length))
        start += length
    return bounds
