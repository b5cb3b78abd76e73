"""Staged state dicts of asynchronous saves: codes in place of tensors if the planner is known, else copies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.dcp.call_stack import AsyncCall
from dsq_ckpt.dcp.copies import rebuild_state_dict
from dsq_ckpt.dcp.items import get_chunk_key, get_item_name
from dsq_ckpt.engine.chunks import QuantizedChunk
from dsq_ckpt.engine.consistency import RankSettings
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import KnownCheckpoint, Outline, SaveHistory
from dsq_ckpt.engine.local_state import SaveItem
from dsq_ckpt.engine.quantizing import QuantizedState
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.plan import QuantizationPlan


class SynchronousStager:
    """An `AsyncStager` that stages on the training thread; training may continue when `stage` returns."""

    _synchronize_after_execute = False
    _staged: StagedCodes | StagedCopy | None
    _last_save_id: str | None

    @property
    def save_id(self) -> str | None:
        """Id of the save that was started last, as far as this process knows it."""
        return self._last_save_id if self._staged is None else self._staged.save_id

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has finished when it returns."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(frozen=True)
class ExactCopy:
    """A chunk that is not quantized, with its settings; not a tensor, so that a planner that changes tensors fails."""

    tensor: torch.Tensor
    config: TensorConfig | None


Payload = QuantizedChunk | ExactCopy


class LocalPlanData(NamedTuple):
    """The data of a rank for the coordinator, sent with its local plan.

    Attributes:
        settings: path and configuration of the rank.
        content: layout of its tensors, or staged chunks and names of objects; None: the layout of the cached plan.
        digest: digest of its plan and layout; None: the planner does not cache plans.
        cached_save_id: id of the save that sent the final plan in the planner's cache; None: no plan of this package.
        exponents_digest: digest of the exponents of its last save; None: it keeps none.
    """

    settings: RankSettings
    content: Layout | frozenset[ChunkKey | str] | None
    digest: str | None = None
    cached_save_id: str | None = None
    exponents_digest: str | None = None


@dataclass(frozen=True)
class StagedCodes:
    """A save whose chunks were quantized on the training thread.

    Attributes:
        context: context of the save.
        plan: quantization plan.
        items: chunks and names of objects of this rank.
        is_self_contained, related: see `QuantizedState`.
    """

    context: SaveContext
    plan: QuantizationPlan
    items: frozenset[ChunkKey | str]
    is_self_contained: bool
    related: bool | None

    @property
    def save_id(self) -> str:
        """Id of the save."""
        return self.context.save_id


@dataclass(frozen=True)
class StagedCopy:
    """A save whose state dict was only copied; all other steps run in the background.

    Attributes:
        save_id: id of the save, if this rank coordinates.
        history: earlier checkpoints that the save may continue.
        outline: outline of the history, for another process.
        failure: why the state dict was not copied; raised in a step that DCP propagates to the other ranks.
        process: id of the training process.
    """

    save_id: str
    history: SaveHistory
    outline: Outline
    failure: str | None
    process: int = field(default_factory=os.getpid)

    @classmethod
    def create(
        cls, call: AsyncCall | None, save_id: str, history: SaveHistory, path: Path, failure: str | None
    ) -> StagedCopy:
        """Return the staged save to `path` that is started by a call; None: an unknown call."""
        staged = cls(save_id, history, history.outline(), failure)
        if call is None or call.processes:  # else the save itself adds the checkpoint
            history.add_pending(KnownCheckpoint(save_id, path.absolute()))
        return staged

    def start(self) -> None:
        """Start the save in the background.

        Raises:
            SaveFailed: the state dict was not copied.
        """
        if self.failure is not None:
            raise SaveFailed(f"the state dict cannot be copied for a save in the background: {self.failure}")
        if self.process != os.getpid():
            self.history.adopt(self.outline)


class StagedTensor(torch.Tensor):
    """A tensor of logical shape and dtype whose local chunks are codes, or copies if they are exact.

    It has no storage. DCP's planner gets its write items and passes its payloads to the storage writer, by the same
    protocol as for DTensor (`torch.distributed.checkpoint._checkpointable`).
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


def make_staged_state_dict(
    state_dict: dict[str, Any], items: list[WriteItem], payloads: dict[ChunkKey, Payload]
) -> dict[str, Any]:
    """Return the state dict with every tensor replaced by its staged chunks and every object copied."""
    by_name: dict[str, list[WriteItem]] = {}
    for item in items:
        if item.tensor_data is not None:
            by_name.setdefault(item.index.fqn, []).append(item)

    def codes(fqn: str, value: torch.Tensor) -> StagedTensor:
        own_codes = by_name.get(fqn, [])  # none if another rank writes it; its entry in the state dict must remain
        return StagedTensor(value.size(), value.dtype, own_codes, [payloads[get_chunk_key(item)] for item in own_codes])

    return rebuild_state_dict(state_dict, lambda flat: {fqn: codes(fqn, value) for fqn, value in flat.items()})


def collect_staged_payloads(
    items: list[SaveItem], staged: StagedCodes, objects: Iterable[tuple[str, bytes]], save_id: str
) -> QuantizedState:
    """Return the staged payloads of items, with the objects of this rank.

    Raises:
        SaveFailed: an item is not a staged payload, or was staged for another save.
    """
    if staged.context.save_id != save_id:
        raise SaveFailed("two asynchronous saves share this writer; use a new DSQStorageWriter for each")
    chunks: list[QuantizedChunk] = []
    exact: list[SaveItem] = []
    tied: dict[ChunkKey, ChunkKey] = {}
    keys: dict[int, ChunkKey] = {}
    alive: list[Any] = []
    for item in items:
        payload: Any = item.load()
        alive.append(payload)  # else its id() could be reused
        if (first := keys.setdefault(id(payload), item.key)) != item.key:
            tied[item.key] = first
        elif isinstance(payload, QuantizedChunk):
            chunks.append(payload)
        elif isinstance(payload, ExactCopy):
            exact.append(replace(item, load=partial(_get_tensor, payload), config=payload.config))
        else:
            raise SaveFailed(
                f"'{item.key.fqn}' is not what this writer staged for an asynchronous save, but "
                f"{type(payload).__name__}; use a new DSQStorageWriter for each save"
            )
    own_items = {item.key: item for item in items}
    return QuantizedState(
        iter(chunks), exact, staged.plan, own_items, tied, objects, is_staged=True,
        is_self_contained=staged.is_self_contained, related=staged.related,
    )


def _get_tensor(payload: ExactCopy) -> torch.Tensor:
    return payload.tensor


def check_all_staged(staged_ranks: int, ranks: int) -> None:
    """Raise if only `staged_ranks` of all ranks called the same function (a staged save, or a synchronous one)."""
    if staged_ranks != ranks:
        raise SaveFailed("some ranks called dcp.async_save and others dcp.save: all must call the same")


def check_staged_items(staged: Sequence[frozenset[ChunkKey | str]], plans: Sequence[SavePlan]) -> None:
    """Raise unless every staged chunk and object is planned exactly once, on the rank that staged it.

    Raises:
        SaveFailed: one is not; the message names it.
    """
    planned: dict[ChunkKey | str, int] = {}
    for rank, (rank_names, plan) in enumerate(zip(staged, plans, strict=True)):
        for name in map(get_item_name, plan.items):
            if name not in rank_names:
                problem = f"was planned for rank {rank}, which did not stage it"
                raise SaveFailed(f"{_format_item(name)} {problem}; {_WRONG_PLANNER}")
            if planned.setdefault(name, rank) != rank:
                problem = f"was planned for ranks {planned[name]} and {rank}"
                raise SaveFailed(f"{_format_item(name)} {problem}; {_WRONG_PLANNER}")
        if len(plan.items) != len(set(map(get_item_name, plan.items))):
            names = [get_item_name(item) for item in plan.items]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise SaveFailed(f"{_format_item(duplicate)} was planned twice for rank {rank}; {_WRONG_PLANNER}")
    for rank, rank_names in enumerate(staged):
        for name in sorted(rank_names - planned.keys(), key=str):
            raise SaveFailed(f"{_format_item(name)}, staged by rank {rank}, is in no rank's plan; {_WRONG_PLANNER}")


_WRONG_PLANNER = (
    "the planner of the save is not the one that tensors were staged for, or changed its mind; nothing was committed. "
    "Pass the planner to dcp.async_save itself, or save synchronously"
)


def _format_item(name: ChunkKey | str) -> str:
    return f"object '{name}'" if isinstance(name, str) else f"'{name.fqn}' at {name.offsets}"
