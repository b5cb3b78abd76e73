"""Top-k sparsification with error feedback, synchronized by one all-gather per bucket.

Every rank sends the largest elements of gradient + residual of each parameter and keeps the rest as the new residual
(Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Lin, Han, Mao, Wang and Dally,
"Deep gradient compression", ICLR 2018). The synchronized gradient is the mean of what the ranks sent. It is added up in
the order of the ranks and never by atomics, so that all replicas are bit-identical.
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
from dsq_ckpt.lowdiff.buckets import Bucket, Group, Part, all_gather, on_this_stream, ready
from dsq_ckpt.lowdiff.contract import GradientInfo
from dsq_ckpt.lowdiff.feedback import Feedback, forget_nonfinite
from dsq_ckpt.lowdiff.probe import Seen, bounds_of, evenly

_WITNESSES = 64
_SAMPLE = 4096
"""Elements that tell where to look for the largest."""


class TopK(Feedback):
    """Sends max(1, round(ratio * elements)) elements of each parameter."""

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
        for part, (start, stop) in zip(bucket.parts, plan.bounds, strict=True):
            self._pick(part, bucket.of(part), payload[0, start:stop], values[start:stop])
        if group is None or not plan.size:
            self._merge(bucket, plan, payload[None])
            return ready(bucket.flat)
        gathered = payload.new_empty((world, 2, plan.size))

        def merge(done: Future[object]) -> Tensor:
            done.value()  # raises what the collective raised
            self._merge(bucket, plan, gathered)
            return bucket.flat

        return all_gather(gathered.view(-1), payload.view(-1), group).get_future().then(merge)

    def _pick(self, part: Part, gradient: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write what is sent of a gradient into int32[k] and float32[k]; the rest becomes the residual."""
        if not len(indices):
            return
        if not self.feedback:
            whole = gradient.float()
            chosen = largest(whole, len(indices))
            torch.index_select(whole, 0, chosen, out=values)
        else:
            whole = self._flat_residual(part).add_(gradient)
            chosen = largest(whole, len(indices))
            if self._dropped(gradient):
                values.zero_()
            else:
                torch.index_select(whole, 0, chosen, out=values)
                whole.index_fill_(0, chosen, 0.0)
                forget_nonfinite(whole, values)
        indices.copy_(chosen)

    def _merge(self, bucket: Bucket, plan: _Plan, gathered: Tensor) -> None:
        """Overwrite the bucket with the mean of what the ranks sent, int32[world, 2, size]."""
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
        for number, part in enumerate(bucket.parts):
            start, stop = plan.bounds[number]
            if self._skips and not values[:, start:stop].any():
                continue  # no rank used it, maybe: then DDP leaves in p.grad what was there
            first, last = plan.seen_bounds[number]
            self._left[part.parameter] = partial(
                _trace, part, indices[:, start:stop], (inside[first:last], seen[first:last])
            )


@dataclass(frozen=True)
class _Plan:
    """Where what lies in the payload of buckets of one kind.

    Attributes:
        size: elements that a rank sends.
        bounds: which of them belong to each part.
        starts: int64[size], where the part of each of them starts in the bucket.
        seen: int64, those of the elements that all ranks send which are witnesses.
        seen_bounds: which witnesses belong to each part.
    """

    size: int
    bounds: Sequence[tuple[int, int]]
    starts: Tensor
    seen: Tensor
    seen_bounds: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, bucket: Bucket, ratio: float, world: int) -> _Plan:
        """The plan for buckets that are laid out as this one."""
        counts = [min(part.elements, max(1, round(ratio * part.elements))) for part in bucket.parts]
        size, bounds, device = sum(counts), bounds_of(counts), bucket.flat.device
        offsets = torch.tensor([part.start for part in bucket.parts])
        chosen = []
        for start, stop in bounds:  # entries of all ranks: one may have sent nothing but zeros
            entry = evenly(world * (stop - start), _WITNESSES)
            k = max(1, stop - start)
            chosen.append(entry // k * size + start + entry % k)
        return cls(
            size, bounds, offsets.repeat_interleave(torch.tensor(counts)).to(device), torch.cat(chosen).to(device),
            bounds_of([len(entries) for entries in chosen]),
        )


def _trace(part: Part, indices: Tensor, seen: Seen) -> GradientInfo:
    places, values = (on_this_stream(tensor) for tensor in seen)
    support = part.row_major(on_this_stream(indices).reshape(-1))
    return GradientInfo(support, None, None, (part.row_major(places), values) if len(places) else None)


def largest(x: Tensor, k: int) -> Tensor:
    """Places of the k largest magnitudes, exactly; of equal ones any. NaN is larger than infinity.

    On a CPU `torch.topk` moves every element, though few can be among the largest. A sample gives a threshold that
    somewhat more than k elements reach, and `torch.topk` has to choose among those alone. Should fewer reach it, it is
    asked about all.

    Args:
        x: float32[n].
        k: in 1..n.

    Returns:
        int64[k], in any order; always the same for equal input.
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
