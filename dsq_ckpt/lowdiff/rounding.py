"""Gradients averaged in 16 bits by torch's own communication hooks, with probes of the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dsq_ckpt.lowdiff.buckets import Bucket, Group, HookedCompressor, ready
from dsq_ckpt.lowdiff.contract import GradientInfo
from dsq_ckpt.lowdiff.probe import Probe, ProbeIndices

_HOOKS = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}


class _Rounded(HookedCompressor):
    """A compressor that rounds to 16 bits without error feedback: torch's hooks keep no residual."""

    dtype: ClassVar[torch.dtype]

    def __init__(self) -> None:
        super().__init__(self.name)
        self._probe_indices: dict[tuple[int, ...], ProbeIndices] = {}

    def _begin(self) -> None:
        super()._begin()
        self._probe_indices.clear()

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
        if (places := self._probe_indices.get(bucket.key)) is None:
            places = self._probe_indices[bucket.key] = ProbeIndices.of(bucket)
        # A bucket of the other 16-bit type rounds once more when the average is written into it.
        dtype = bucket.flat.dtype if bucket.flat.element_size() == 2 else self.dtype
        for slice_, probe in zip(bucket.slices, places.probes(bucket), strict=True):
            self._info_factories[slice_.parameter] = partial(_gradient_info, dtype, probe)
        return bucket.flat


class Fp16(_Rounded):
    """A compressor that averages in float16. Magnitudes above 65504 become infinite; use `GradScaler`."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


class Bf16(_Rounded):
    """A compressor that averages in bfloat16."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


def _gradient_info(dtype: torch.dtype, probe: Callable[[], Probe | None]) -> GradientInfo:
    return GradientInfo(None, dtype, None, probe())
