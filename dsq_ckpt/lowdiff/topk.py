"""Top-k sparsification with error feedback, synchronized by one all-gather per bucket.

Every rank sends the largest elements of gradient + residual of each parameter, and keeps the rest as the new residual
(Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Lin, Han, Mao, Wang and Dally,
"Deep gradient compression", ICLR 2018). The synchronized gradient is the mean of the sent values, summed in the order
of the ranks and without atomics, so that the models of all ranks are bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.futures import Future

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.base_compressor import GradientInfo
from dsq_ckpt.lowdiff.buckets import (
    Bucket,
    BucketSlice,
    Group,
    completed_future,
    record_current_stream,
    start_all_gather,
)
from dsq_ckpt.lowdiff.feedback import FeedbackCompressor, clear_nonfinite
from dsq_ckpt.lowdiff.probe import GradientProbe, concatenated_ranges, spaced_indices

_PROBES = 64
_SAMPLE = 4096
"""Size of the sample that estimates the threshold of the largest elements."""


class TopK(FeedbackCompressor):
    """A compressor that sends max(1, round(ratio * elements)) elements of each parameter."""

    name: ClassVar[str] = "topk"

    def __init__(self, ratio: float = 0.01, feedback: bool = True) -> None:
        short = f"{ratio:g}"
        number = short if float(short) == ratio else repr(ratio)
        super().__init__(f"topk:{number}{'' if feedback else ',feedback=off'}", feedback)
        self.ratio = ratio
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def _reset(self) -> None:
        super()._reset()
        self._plans.clear()

    def _check_parameters(self, names: dict[nn.Parameter, str]) -> None:
        super()._check_parameters(names)
        large = [name for p, name in names.items() if p.numel() >= 2**31]
        if large:
            raise ConfigError(
                f"compressor '{self.spec}' has indices of 31 bits, too few for the elements of {', '.join(large)}"
            )

    def _synchronize(self, bucket: Bucket, group: Group | None) -> Future[Tensor]:
        world = 1 if group is None else group.size()
        if (plan := self._plans.get(bucket.key)) is None:
            plan = self._plans[bucket.key] = _Plan.from_bucket(bucket, self.ratio, world)
        # Row 0 holds indices and row 1 the bits of the values, so that one collective sends both.
        payload = torch.empty((2, plan.size), dtype=torch.int32, device=bucket.flat.device)
        values = payload[1].view(torch.float32)
        for slice_, (start, stop) in zip(bucket.slices, plan.bounds, strict=True):
            self._select_elements(slice_, bucket.gradient(slice_), payload[0, start:stop], values[start:stop])
        if group is None or not plan.size:
            self._merge_payloads(bucket, plan, payload[None])
            return completed_future(bucket.flat)
        gathered = payload.new_empty((world, 2, plan.size))

        def merge(future: Future[object]) -> Tensor:
            future.value()  # raises the collective's error
            self._merge_payloads(bucket, plan, gathered)
            return bucket.flat

        return start_all_gather(gathered.view(-1), payload.view(-1), group).get_future().then(merge)

    def _select_elements(self, slice_: BucketSlice, gradient: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write the largest elements into `indices`, int32[k], and `values`, float32[k]; keep the rest as residual."""
        if not len(indices):
            return
        if not self.feedback:
            single = gradient.float()
            chosen = largest_indices(single, len(indices))
            torch.index_select(single, 0, chosen, out=values)
        else:
            residual = self._flat_residual(slice_).add_(gradient)
            chosen = largest_indices(residual, len(indices))
            if self._is_dropped(gradient):
                values.zero_()
            else:
                torch.index_select(residual, 0, chosen, out=values)
                residual.index_fill_(0, chosen, 0.0)
                clear_nonfinite(residual, values)
        indices.copy_(chosen)

    def _merge_payloads(self, bucket: Bucket, plan: _Plan, gathered: Tensor) -> None:
        """Overwrite the bucket with the mean of all ranks' payloads, int32[world, 2, size]."""
        flat, world = bucket.flat, len(gathered)
        total = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
        total.zero_()
        indices, values = gathered[:, 0].long(), gathered[:, 1].view(torch.float32)
        in_bucket = indices + plan.starts
        for rank_indices, rank_values in zip(in_bucket, values, strict=True):
            # The indices of one rank are unique: each element is read and written once.
            total.index_copy_(0, rank_indices, total.index_select(0, rank_indices).add_(rank_values))
        if world > 1:
            total.div_(world)
        if total is not flat:
            flat.copy_(total)
        probe_values = flat.index_select(0, in_bucket.view(-1)[plan.probes])
        probe_indices = indices.view(-1)[plan.probes]
        for number, slice_ in enumerate(bucket.slices):
            start, stop = plan.bounds[number]
            if self._ddp_may_drop and not values[:, start:stop].any():
                continue  # no rank may have used the parameter, and DDP then leaves p.grad unchanged
            first, last = plan.probe_bounds[number]
            self._info_factories[slice_.parameter] = partial(
                _gradient_info, slice_, indices[:, start:stop], (probe_indices[first:last], probe_values[first:last])
            )


@dataclass(frozen=True)
class _Plan:
    """The layout of the payload for buckets of one layout.

    Attributes:
        size: number of elements that a rank sends.
        bounds: range of the payload for each slice.
        starts: int64[size], start in the bucket of each element's slice.
        probes: int64 indices of the probes among the elements of all ranks.
        probe_bounds: range of `probes` for each slice.
    """

    size: int
    bounds: Sequence[tuple[int, int]]
    starts: Tensor
    probes: Tensor
    probe_bounds: Sequence[tuple[int, int]]

    @classmethod
    def from_bucket(cls, bucket: Bucket, ratio: float, world: int) -> _Plan:
        """Return the plan for buckets of this layout."""
        counts = [min(slice_.elements, max(1, round(ratio * slice_.elements))) for slice_ in bucket.slices]
        size, bounds, device = sum(counts), concatenated_ranges(counts), bucket.flat.device
        offsets = torch.tensor([slice_.start for slice_ in bucket.slices])
        chosen = []
        for start, stop in bounds:  # of all ranks, since one rank may have sent only zeros
            entries = spaced_indices(world * (stop - start), _PROBES)
            k = max(1, stop - start)
            chosen.append(entries // k * size + start + entries % k)
        return cls(
            size, bounds, offsets.repeat_interleave(torch.tensor(counts)).to(device), torch.cat(chosen).to(device),
            concatenated_ranges([len(entries) for entries in chosen]),
        )


def _gradient_info(slice_: BucketSlice, indices: Tensor, probe: GradientProbe) -> GradientInfo:
    probe_indices, values = (record_current_stream(tensor) for tensor in probe)
    support = slice_.to_row_major(record_current_stream(indices).reshape(-1))
    row_major_probe = (slice_.to_row_major(probe_indices), values) if len(probe_indices) else None
    return GradientInfo(support, None, None, row_major_probe)


def largest_indices(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes exactly. Ties are broken arbitrarily; NaN exceeds infinity.

    On a CPU `torch.topk` moves every element, although few can be among the largest. A sample determines a threshold
    that slightly more than k elements reach, and `torch.topk` selects among them. If fewer elements reach it,
    `torch.topk` selects among all.

    Args:
        x: float32[n].
        k: in 1..n.

    Returns:
        int64[k] in any order, deterministic.
    """
    n = x.numel()
    if k == n:
        return torch.arange(n, device=x.device)
    magnitudes = x.abs().view(torch.int32)  # same order, with NaN last, and faster comparisons
    if x.device.type == "cpu" and n >= 4 * _SAMPLE and 4 * k <= n:
        sample = magnitudes[:: n // _SAMPLE]
        expected = k * len(sample) / n
        rank = min(len(sample), math.ceil(expected + 3 * math.sqrt(expected) + 2))
        threshold = torch.topk(sample, rank, sorted=False).values.min()
        candidates = torch.from_numpy(np.flatnonzero((magnitudes >= threshold).numpy()))
        if len(candidates) >= k:
            return candidates[torch.topk(magnitudes[candidates], k, sorted=False).indices]
    return torch.topk(magnitudes, k, sorted=False).indices
