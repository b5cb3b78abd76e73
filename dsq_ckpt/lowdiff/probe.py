"""Probes: a few elements of a gradient right after its synchronization, for compressors with dense results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsq_ckpt.lowdiff.buckets import Bucket, BucketSlice, record_current_stream

_ELEMENTS = 16
"""Elements per parameter, in addition to the largest element of the bucket."""

GradientProbe = tuple[Tensor, Tensor]
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
    def from_bucket(cls, bucket: Bucket) -> ProbeIndices:
        """Return the indices for buckets of this layout."""
        chosen = [spaced_indices(slice_.elements, _ELEMENTS) + slice_.start for slice_ in bucket.slices]
        return cls(torch.cat(chosen).to(bucket.flat.device), concatenated_ranges([len(indices) for indices in chosen]))

    def read_probes(self, bucket: Bucket) -> list[Callable[[], GradientProbe | None]]:
        """Read the elements of a bucket; return a function for each slice that builds its probe later."""
        if not bucket.flat.numel():
            return [lambda: None for _ in bucket.slices]
        values, index = bucket.flat.index_select(0, self.flat), _argmax_magnitude(bucket.flat)
        largest = (index, bucket.flat.index_select(0, index))
        return [
            partial(_build_probe, slice_, (self.flat[start:stop], values[start:stop]), largest)
            for slice_, (start, stop) in zip(bucket.slices, self.bounds, strict=True)
        ]


def _argmax_magnitude(flat: Tensor) -> Tensor:
    """Return the index of the largest magnitude, or of a NaN, int64[1]."""
    if flat.device.type != "cpu" or flat.dtype != torch.float32:
        return flat.abs().argmax().view(1)
    # NumPy takes a fifth of torch's time.
    values = flat.numpy()
    low, high = int(values.argmin()), int(values.argmax())
    return torch.tensor([high if values[high] >= -values[low] else low])


def _build_probe(slice_: BucketSlice, spaced: GradientProbe, largest: GradientProbe) -> GradientProbe | None:
    """Return the probe of a slice: its spaced elements, and the bucket's largest element if it is in the slice."""
    if not slice_.elements:
        return None
    probes = [largest, spaced] if slice_.start <= int(largest[0]) < slice_.stop else [spaced]
    indices, values = (torch.cat([record_current_stream(x) for x in parts]) for parts in zip(*probes, strict=True))
    return slice_.to_row_major(indices - slice_.start), values


def spaced_indices(elements: int, max_count: int) -> Tensor:
    """Return at most `max_count` evenly spaced int64 indices into `elements` elements."""
    return torch.arange(0, elements, max(1, -(-elements // max_count)))


def concatenated_ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the range of each item in the concatenation of all items."""
    bounds, start = [], 0
    for length in lengths:
        bounds.append((start, start + length))
        start += length
    return bounds
