"""State dicts that asynchronous saves leave to DCP: codes in place of tensors if the planner is known, else copies."""

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
from dsq_ckpt.dcp.calls import AsyncCall
from dsq_ckpt.dcp.copies import rebuilt
from dsq_ckpt.dcp.items import key_of, name_of
from dsq_ckpt.engine.chunks import QuantizedChunk
from dsq_ckpt.engine.consistency import RankSettings
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import KnownCheckpoint, Outline, SaveHistory
from dsq_ckpt.engine.local import SaveItem
from dsq_ckpt.engine.quantizing import QuantizedState
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.plan import QuantizationPlan


class ReadyWhenStaged:
    """An `AsyncStager`, which runs on the training thread of an asynchronous save; training may go on after `stage`."""

    _synchronize_after_execute = False
    _staged: StagedCodes | StagedCopy | None
    _used: str | None

    @property
    def save_id(self) -> str | None:
        """Id of the save that was begun last, as far as this process knows it."""
        return self._used if self._staged is None else self._staged.save_id

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns when training may go on."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(frozen=True)
class ExactCopy:
    """A chunk that is not quantized, with its settings; not a tensor, so that a planner that changes tensors fails."""

    tensor: torch.Tensor
    config: TensorConfig | None


Payload = QuantizedChunk | ExactCopy


class Offer(NamedTuple):
    """The message of a rank to the coordinator, with its plan.

    Attributes:
        settings: path and configuration that it was given.
        content: layout of its tensors, or chunks and names of objects that were staged; None: the layout is that of the
            cached plan.
        state: digest of its plan and layout, where the planner caches plans.
        held: id of the save that gave this rank the final plan that its planner has cached; None: it has none of ours.
    """

    settings: RankSettings
    content: Layout | frozenset[ChunkKey | str] | None
    state: str | None = None
    held: str | None = None


@dataclass(frozen=True)
class StagedCodes:
    """A save whose chunks were quantized on the training thread.

    Attributes:
        context: context of the save.
        plan: how the state is stored.
        staged: chunks and names of objects of this rank.
        alone: whether it may need no file of a parent; see `QuantizedState`.
        related: whether its weights depend on the checkpoint before; see `QuantizedState`.
    """

    context: SaveContext
    plan: QuantizationPlan
    staged: frozenset[ChunkKey | str]
    alone: bool
    related: bool | None

    @property
    def save_id(self) -> str:
        """Id of the save."""
        return self.context.save_id


@dataclass(frozen=True)
class StagedCopy:
    """A save whose state dict was copied, and no more; the rest is done in the background.

    Attributes:
        save_id: id of the save, if this rank coordinates.
        history: checkpoints that the save may come after.
        known: these checkpoints, for another process.
        failure: why the state dict was not copied; raised where DCP tells the other ranks.
        process: id of the training process.
    """

    save_id: str
    history: SaveHistory
    known: Outline
    failure: str | None
    process: int = field(default_factory=os.getpid)

    @classmethod
    def begun(
        cls, call: AsyncCall | None, save_id: str, history: SaveHistory, path: Path, failure: str | None
    ) -> StagedCopy:
        """Return the save to `path` that a call begins; None: the call is not known."""
        made = cls(save_id, history, history.outline(), failure)
        if call is None or call.processes:  # this process learns in no other way what was saved
            history.add_pending(KnownCheckpoint(save_id, path.absolute()))
        return made

    def begin(self) -> None:
        """Begin the background save.

        Raises:
            SaveFailed: the state dict was not copied.
        """
        if self.failure is not None:
            raise SaveFailed(f"the state dict cannot be copied for a save in the background: {self.failure}")
        if self.process != os.getpid():
            self.history.adopt(self.known)


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


def staged_state_dict(
    state_dict: dict[str, Any], items: list[WriteItem], payloads: dict[ChunkKey, Payload]
) -> dict[str, Any]:
    """Return the state dict with every tensor replaced by its staged chunks and every object copied."""
    by_name: dict[str, list[WriteItem]] = {}
    for item in items:
        if item.tensor_data is not None:
            by_name.setdefault(item.index.fqn, []).append(item)

    def codes(fqn: str, value: torch.Tensor) -> StagedTensor:
        mine = by_name.get(fqn, [])  # none where another rank writes it: its place must remain
        return StagedTensor(value.size(), value.dtype, mine, [payloads[key_of(item)] for item in mine])

    return rebuilt(state_dict, lambda flat: {fqn: codes(fqn, value) for fqn, value in flat.items()})


def staged_payloads(
    items: list[SaveItem], staged: StagedCodes, objects: Iterable[tuple[str, bytes]], save_id: str
) -> QuantizedState:
    """Return the items as they were staged for a save, with the objects of this rank.

    Raises:
        SaveFailed: an item is not as it was staged, or was staged for another save.
    """
    if staged.context.save_id != save_id:
        raise SaveFailed("two asynchronous saves share this writer; use a new DSQStorageWriter for each")
    chunks: list[QuantizedChunk] = []
    exact: list[SaveItem] = []
    tied: dict[ChunkKey, ChunkKey] = {}
    seen: dict[int, ChunkKey] = {}
    alive: list[Any] = []
    for item in items:
        payload: Any = item.load()
        alive.append(payload)  # else its identity may be given to the next
        if (first := seen.setdefault(id(payload), item.key)) != item.key:
            tied[item.key] = first
        elif isinstance(payload, QuantizedChunk):
            chunks.append(payload)
        elif isinstance(payload, ExactCopy):
            exact.append(replace(item, load=partial(_tensor, payload), config=payload.config))
        else:
            raise SaveFailed(
                f"'{item.key.fqn}' is not what this writer staged for an asynchronous save, but "
                f"{type(payload).__name__}; use a new DSQStorageWriter for each save"
            )
    own = {item.key: item for item in items}
    return QuantizedState(
        iter(chunks), exact, staged.plan, own, tied, objects, staged=True, alone=staged.alone,
        related=staged.related,
    )


def _tensor(payload: ExactCopy) -> torch.Tensor:
    return payload.tensor


def refuse_mixed(alike: int, ranks: int) -> None:
    """Refuse a save that some ranks staged and others did not."""
    if alike != ranks:
        raise SaveFailed("some ranks called dcp.async_save and others dcp.save: all must call the same")


def check_arrival(staged: Sequence[frozenset[ChunkKey | str]], plans: Sequence[SavePlan]) -> None:
    """Check that every staged chunk and object is planned exactly once, on the rank that staged it.

    Raises:
        SaveFailed: it does not; the first tensor or object is named.
    """
    arrived: dict[ChunkKey | str, int] = {}
    for rank, (mine, plan) in enumerate(zip(staged, plans, strict=True)):
        for name in map(name_of, plan.items):
            if name not in mine:
                raise SaveFailed(f"{_named(name)} was planned for rank {rank}, which did not stage it; {_CHANGED}")
            if arrived.setdefault(name, rank) != rank:
                raise SaveFailed(f"{_named(name)} was planned for ranks {arrived[name]} and {rank}; {_CHANGED}")
        if len(plan.items) != len(set(map(name_of, plan.items))):
            names = [name_of(item) for item in plan.items]
            twice = next(name for name in names if names.count(name) > 1)
            raise SaveFailed(f"{_named(twice)} was planned twice for rank {rank}; {_CHANGED}")
    for rank, mine in enumerate(staged):
        for name in sorted(mine - arrived.keys(), key=str):
            raise SaveFailed(f"{_named(name)}, staged by rank {rank}, is in no rank's plan; {_CHANGED}")


_CHANGED = (
    "the planner of the save is not the one that tensors were staged for, or changed its mind; nothing was committed. "
    "Pass the planner to dcp.async_save itself, or save synchronously"
)


def _named(name: ChunkKey | str) -> str:
    return f"object '{name}'" if isinstance(name, str) else f"'{name.fqn}' at {name.offsets}"
