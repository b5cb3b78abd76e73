"""Tensors that are quantized already: what an asynchronous save hands to DCP instead of full-precision copies."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dsq_ckpt.session import Coded

Payload = Coded | torch.Tensor


class StagedTensor(torch.Tensor):
    """A tensor of logical shape and dtype whose local chunks are codes, or copies where they are exact.

    It has no storage. DCP's planner asks it for its write items and hands its payloads to the storage writer, by the
    protocol that DTensor uses too (`torch.distributed.checkpoint._checkpointable`).
    """

    items: list[WriteItem]
    payloads: list[Payload]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, items: list[WriteItem], payloads: list[Payload]
    ) -> StagedTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        wrapper.items = items
        wrapper.payloads = payloads
        return wrapper

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        return self.items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [item.tensor_data.chunk for item in self.items if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Payload:
        for item, payload in zip(self.items, self.payloads, strict=True):
            if item.index.offset == index.offset:
                return payload
        raise ValueError(f"no staged chunk of '{index.fqn}' at {index.offset}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StagedTensor, (self.shape, self.dtype, self.items, self.payloads)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StagedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, chunks={len(self.items)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"a staged tensor only travels to storage; {func} is not defined on it")
