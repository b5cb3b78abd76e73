"""Top-k sparsification with error feedback, synchronized by one all-gather per bucket.

Every rank sends the largest elements of gradient + residual of each parameter and keeps the rest as the new residual
(Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Lin, Han, Mao, Wang and Dally,
"Deep gradient compression", ICLR 2018). The synchronized gradient is the mean of the sent values, summed in the order
of the ranks and never by atomics, so that the models of all ranks are bit-identical.
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
from dsq_ckpt.lowdiff.buckets import Bucket, BucketSlice, Group, all_gather, on_this_stream, ready
from dsq_ckpt.lowdiff.contract import GradientInfo
from dsq_ckpt.lowdiff.feedback import FeedbackCompressor, forget_nonfinite
from dsq_ckpt.lowdiff.probe import Probe, bounds_of, evenly

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

    def _begin(self) -> None:
        super()._begin()
        self._plans.clear()

    def _check(self, names: dict[nn.Parameter, str]) -> None:
        super()._check(names)
        large = [name for p, name in names.items() if p.numel() >= 2**31]
        if large:
            raise ConfigError(
                f"compressor '{self.spec}' has indices of 31 bits, too few for the elements of {', '.join(large)}"
            )

    def _synchronize(self, bucket: Bucket, group: Group | None) -> Future[Tensor]:
        world = 1 if group is None else group.size()
        if (plan := self._plans.get(bucket.key)) is None:
            plan = self._plans[bucket.key] = _Plan.of(bucket, self.ratio, world)
        # Row 0 holds indices, row 1 the bits of the values: one tensor, one collective.
        payload = torch.empty((2, plan.size), dtype=torch.int32, device=bucket.flat.device)
        values = payload[1].view(torch.float32)
        for slice_, (start, stop) in zip(bucket.slices, plan.bounds, strict=True):
            self._pick(slice_, bucket.of(slice_), payload[0, start:stop], values[start:stop])
        if group is None or not plan.size:
            self._merge(bucket, plan, payload[None])
            return ready(bucket.flat)
        gathered = payload.new_empty((world, 2, plan.size))

        def merge(done: Future[object]) -> Tensor:
            done.value()  # raises what the collective raised
            self._merge(bucket, plan, gathered)
            return bucket.flat

        return all_gather(gathered.view(-1), payload.view(-1), group).get_future().then(merge)

    def _pick(self, slice_: BucketSlice, gradient: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write the sent elements into `indices`, int32[k], and `values`, float32[k]; keep the rest as residual."""
        if not len(indices):
            return
        if not self.feedback:
            whole = gradient.float()
            chosen = largest(whole, len(indices))
            torch.index_select(whole, 0, chosen, out=values)
        else:
            whole = self._flat_residual(slice_).add_(gradient)
            chosen = largest(whole, len(indices))
            if self._dropped(gradient):
                values.zero_()
            else:
                torch.index_select(whole, 0, chosen, out=values)
                whole.index_fill_(0, chosen, 0.0)
                forget_nonfinite(whole, values)
        indices.copy_(chosen)

    def _merge(self, bucket: Bucket, plan: _Plan, gathered: Tensor) -> None:
        """Overwrite the bucket with the mean of all ranks' payloads, int32[world, 2, size]."""
        flat, world = bucket.flat, len(gathered)
        total = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
        total.zero_()
        indices, values = gathered[:, 0].long(), gathered[:, 1].view(torch.float32)
        places = indices + plan.starts
        for mine, sent in zip(places, values, strict=True):
            # The indices of one rank are unique: each element is read and written once.
            total.index_copy_(0, mine, total.index_select(0, mine).add_(sent))
        if world > 1:
            total.div_(world)
        if total is not flat:
            flat.copy_(total)
        seen = flat.index_select(0, places.view(-1)[plan.seen])
        inside = indices.view(-1)[plan.seen]
        for number, slice_ in enumerate(bucket.slices):
            start, stop = plan.bounds[number]
            if self._ddp_may_drop and not values[:, start:stop].any():
                continue  # perhaps no rank used the parameter; then DDP leaves p.grad unchanged
            first, last = plan.seen_bounds[number]
            self._info_factories[slice_.parameter] = partial(
                _gradient_info, slice_, indices[:, start:stop], (inside[first:last], seen[first:last])
            )


@dataclass(frozen=True)
class _Plan:
    """The layout of the payload for buckets of one layout.

    Attributes:
        size: number of elements that a rank sends.
        bounds: range of the payload for each slice.
        starts: int64[size], start in the bucket of each element's slice.
        seen: int64 indices of the probes among the elements of all ranks.
        seen_bounds: range of `seen` for each slice.
    """

    size: int
    bounds: Sequence[tuple[int, int]]
    starts: Tensor
    seen: Tensor
    seen_bounds: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, bucket: Bucket, ratio: float, world: int) -> _Plan:
        """Return the plan for buckets of this layout."""
        counts = [min(slice_.elements, max(1, round(ratio * slice_.elements))) for slice_ in bucket.slices]
        size, bounds, device = sum(counts), bounds_of(counts), bucket.flat.device
        offsets = torch.tensor([slice_.start for slice_ in bucket.slices])
        chosen = []
        for start, stop in bounds:  # entries of all ranks: one may have sent nothing but zeros
            entry = evenly(world * (stop - start), _PROBES)
            k = max(1, stop - start)
            chosen.append(entry // k * size + start + entry % k)
        return cls(
            size, bounds, offsets.repeat_interleave(torch.tensor(counts)).to(device), torch.cat(chosen).to(device),
            bounds_of([len(entries) for entries in chosen]),
        )


def _gradient_info(slice_: BucketSlice, indices: Tensor, seen: Probe) -> GradientInfo:
    places, values = (on_this_stream(tensor) for tensor in seen)
    support = slice_.row_major(on_this_stream(indices).reshape(-1))
    return GradientInfo(support, None, None, (slice_.row_major(places), values) if len(places) else None)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes exactly; ties are broken arbitrarily. NaN exceeds infinity.

    On a CPU `torch.topk` moves every element, though few can be among the largest. A sample gives a threshold that
    somewhat more than k elements reach, and `torch.topk` selects among these. If fewer reach it, `torch.topk` selects
    among all elements.

    Args:
        x: float32[n].
        k: in 1..n.

    Returns:
        int64[k] in any order, deterministic.
    """
    n = x.numel()
    if k == n:
        return torch.arange(n, device=x.device)
    magnitudes = x.abs().view(torch.int32)  # bits are ordered as magnitudes are, NaN last, and integers compare faster
    if x.device.type == "cpu" and n >= 4 * _SAMPLE and 4 * k <= n:
        sample = magnitudes[:: n // _SAMPLE]
        expected = k * len(sample) / n
        rank = min(len(sample), math.ceil(expected + 3 * math.sqrt(expected) + 2))
        threshold = torch.topk(sample, rank, sorted=False).values.min()
        candidates = torch.from_numpy(np.flatnonzero((magnitudes >= threshold).numpy()))
        if len(candidates) >= k:
            return candidates[torch.topk(magnitudes[candidates], k, sorted=False).indices]
    return torch.topk(magnitudes, k, sorted=False).indices
