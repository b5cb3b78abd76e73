"""Compressors that average gradients in 16 bits by torch's communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dsq_ckpt.lowdiff.base_compressor import GradientInfo
from dsq_ckpt.lowdiff.buckets import Bucket, Group, HookedCompressor, completed_future
from dsq_ckpt.lowdiff.probe import GradientProbe, ProbeIndices

_HOOKS = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}


class _Rounded(HookedCompressor):
    """A compressor that rounds to 16 bits without error feedback, since torch's hooks keep no residual."""

    dtype: ClassVar[torch.dtype]

    def __init__(self) -> None:
        super().__init__(self.name)
        self._probe_indices: dict[tuple[int, ...], ProbeIndices] = {}

    def _reset(self) -> None:
        super()._reset()
        self._probe_indices.clear()

    def _synchronize(self, bucket: Bucket, group: Group | None) -> Future[Tensor]:
        if group is None or bucket.grad_bucket is None:
            rounded = bucket.flat.to(self.dtype)
            if group is not None:  # like torch's hooks
                dist.all_reduce(rounded.div_(group.size()), group=group)
            bucket.flat.copy_(rounded)
            return completed_future(self._record_infos(bucket))

        def record(future: Future[Tensor]) -> Tensor:
            future.value()  # raises the collective's error
            return self._record_infos(bucket)

        return _HOOKS[self.dtype](group, bucket.grad_bucket).then(record)

    def _record_infos(self, bucket: Bucket) -> Tensor:
        """Record the description of each gradient; return the bucket's tensor."""
        if (indices := self._probe_indices.get(bucket.key)) is None:
            indices = self._probe_indices[bucket.key] = ProbeIndices.from_bucket(bucket)
        # A bucket of the other 16-bit dtype rounds again when the average is written into it.
        dtype = bucket.flat.dtype if bucket.flat.element_size() == 2 else self.dtype
        for slice_, probe in zip(bucket.slices, indices.read_probes(bucket), strict=True):
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


def _gradient_info(dtype: torch.dtype, build_probe: Callable[[], GradientProbe | None]) -> GradientInfo:
    return GradientInfo(None, dtype, None, build_probe())
