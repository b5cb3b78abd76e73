"""Gradients that are averaged in 16 bits: torch's own communication hooks, and a witness of what they leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dsq_ckpt.lowdiff.buckets import Bucket, Group, Hooked, ready
from dsq_ckpt.lowdiff.contract import GradientInfo
from dsq_ckpt.lowdiff.probe import Places, Seen

_HOOKS = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}


class _Rounded(Hooked):
    """Nothing is fed back: torch's hooks keep no residual."""

    dtype: ClassVar[torch.dtype]

    def __init__(self) -> None:
        super().__init__(self.name)
        self._places: dict[tuple[int, ...], Places] = {}

    def _begin(self) -> None:
        super()._begin()
        self._places.clear()

    def _synchronize(self, bucket: Bucket, group: Group | None) -> Future[Tensor]:
        if group is None or bucket.source is None:
            rounded = bucket.flat.to(self.dtype)
            if group is not None:  # as torch's hooks do it
                dist.all_reduce(rounded.div_(group.size()), group=group)
            bucket.flat.copy_(rounded)
            return ready(self._look(bucket))

        def look(done: Future[Tensor]) -> Tensor:
            done.value()
            return self._look(bucket)

        return _HOOKS[self.dtype](group, bucket.source).then(look)

    def _look(self, bucket: Bucket) -> Tensor:
        if (places := self._places.get(bucket.key)) is None:
            places = self._places[bucket.key] = Places.of(bucket)
        # A bucket of the other 16-bit type rounds once more when the average is written into it.
        dtype = bucket.flat.dtype if bucket.flat.element_size() == 2 else self.dtype
        for part, witness in zip(bucket.parts, places.witnesses(bucket), strict=True):
            self._left[part.parameter] = partial(_trace, dtype, witness)
        return bucket.flat


class Fp16(_Rounded):
    """Averages in float16. Magnitudes past 65504 become infinite; `GradScaler` is there for that."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


class Bf16(_Rounded):
    """Averages in bfloat16."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


def _trace(dtype: torch.dtype, witness: Callable[[], Seen | None]) -> GradientInfo:
    return GradientInfo(None, dtype, None, witness())
