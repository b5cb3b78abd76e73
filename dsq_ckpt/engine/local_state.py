"""The state of one rank: named tensor chunks, and the settings by which each is stored."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any, Protocol

import torch

from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.core.aliases import alias_of
from dsq_ckpt.core.checksums import checksums, quote
from dsq_ckpt.core.nesting import Path as NestedPath
from dsq_ckpt.core.tensor_subclasses import check_storable
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.frozen_tensors import FrozenTensors
from dsq_ckpt.quantization.groups import (
    EXACT,
    QUANTIZABLE,
    Assignments,
    find_by_suffix,
    kind_of,
    second_moment_of,
)
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.update_rules import find_optimizer_objects, find_prenormalized, find_unknown_updates


@dataclass(frozen=True)
class LocalShard:
    """A chunk of a tensor on this rank.

    Attributes:
        key: name, offsets and shape of the chunk.
        size: shape of the whole tensor.
        dtype: dtype of the tensor.
        load: returns the chunk, on any device.
        load_chunk_of: returns the same chunk of the tensor of another name, if this rank has it.
        is_view: whether `load` returns memory of the state itself, so that its result may be cached.
    """

    key: ChunkKey
    size: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    load_chunk_of: Callable[[str], torch.Tensor] | None = None
    is_view: bool = False


class Attachment(Protocol):
    """A writer of a file of another format, stored beside the data files."""

    def __call__(self, stream: IO[bytes], save_id: str) -> None:
        """Write to a stream; `save_id` is the id of the save."""


@dataclass
class LocalState:
    """The state of one rank, for a save that is not planned by DCP.

    Attributes:
        shards: chunks that this rank writes; no other rank may write the same chunk.
        replicas: local chunks that another rank writes; a search evaluates them too.
        objects: serialized objects that are not tensors, by name.
        nesting: path in the nested state dict by name of tensor or object; a `Nesting` also has what paths cannot
            express, such as empty dicts.
        attachments: files of another format, by name.
        gradients: averaged gradients of local weights, by chunk or by name of the parameter.
        settings: values of optimizers that are not tensors, such as settings, by name in a state dict, wherever they
            are stored.
    """

    shards: Sequence[LocalShard]
    replicas: Sequence[LocalShard] = ()
    objects: Mapping[str, bytes] = field(default_factory=dict)
    nesting: Mapping[str, NestedPath] = field(default_factory=dict)
    attachments: Mapping[str, Attachment] = field(default_factory=dict)
    gradients: Mapping[str | ChunkKey, torch.Tensor] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SecondMoment:
    """The chunk of second moments whose square roots are the units of a first moment."""

    fqn: str
    load: Callable[[], torch.Tensor]


@dataclass
class SaveItem:
    """A chunk to save and its settings.

    Attributes:
        key: name, offsets and shape of the chunk.
        dtype: dtype of the tensor.
        kind: weights, exp_avg, exp_avg_sq, momentum or exact, as in the manifest.
        group: group of tensors that share a codebook.
        config: settings of the tensor; None: exact.
        load: returns the chunk.
        on_device: whether it may be quantized on its device.
        second_moment: second moment of a first moment that is quantized in units of Adam's update.
        by_rule: whether a rule of the configuration names its group, so that it is quantized whatever its values.
    """

    key: ChunkKey
    dtype: torch.dtype
    kind: str
    group: str
    config: TensorConfig | None
    load: Callable[[], torch.Tensor]
    on_device: bool = True
    second_moment: SecondMoment | None = None
    by_rule: bool = False

    @property
    def quantized(self) -> bool:
        return self.config is not None and self.config.method == "quantize"

    @property
    def rounded_dtype(self) -> torch.dtype | None:
        """bfloat16 if the tensor is rounded to it, else None."""
        return torch.bfloat16 if _is_rounded(self.config, self.dtype) else None


@dataclass(frozen=True)
class LocalItems:
    """The chunks and objects of one rank, ready to be quantized and written.

    Attributes:
        items: chunks that this rank writes, except those that are tied to another.
        replicas: local chunks that another rank writes.
        tied: the chunk that is stored, by chunk that shares its memory.
        gradients: averaged gradients of local weights, by chunk or by name of the parameter.
        objects: names and bytes of objects that this rank writes; iterated once.
    """

    items: list[SaveItem]
    replicas: list[SaveItem] = field(default_factory=list)
    tied: Mapping[ChunkKey, ChunkKey] = field(default_factory=dict)
    gradients: Mapping[str | ChunkKey, torch.Tensor] | Mapping[str, torch.Tensor] = field(default_factory=dict)
    objects: Iterable[tuple[str, bytes]] = ()

    def apply_layout(self, layout: Layout) -> LocalItems:
        """Return the items with the settings of the layout of all ranks.

        Of the weights that would be quantized or rounded to bf16, those that are frozen on all ranks that have them
        are exact, as are weights that a module of any rank rounds, and weights that are trained by L-BFGS or Rprop.
        First moments of an unknown update rule are rounded. First moments that are themselves the update are quantized
        by their own size.
        """
        return replace(
            self, items=[_apply_layout_to_item(item, layout) for item in self.items],
            replicas=[_apply_layout_to_item(item, layout) for item in self.replicas],
        )


    def compute_checksums(self, workers: Workers) -> dict[ChunkKey, Hashable]:
        """Return the checksum of each local chunk."""
        return checksums({item.key: item.load for item in (*self.items, *self.replicas)}, workers)

    def check_unchanged(self, before: Mapping[ChunkKey, Hashable], workers: Workers) -> None:
        """Raise if the state has changed since its checksums were computed.

        Raises:
            SaveFailed: `evaluate` or `check` changed it.
        """
        after = self.compute_checksums(workers)
        changed = sorted({key.fqn for key, version in before.items() if after[key] != version})
        if changed:
            raise SaveFailed(
                f"`evaluate` or `check` changed {quote(changed)}: they must leave model and optimizer as they are. The "
                "checkpoint was not written, and what changed was not put back: load an earlier checkpoint before "
                "training goes on"
            )

    def find_gradient(self, key: ChunkKey) -> torch.Tensor | None:
        """Return the averaged gradient of a chunk of weights, by the chunk or by the end of its name."""
        gradients: Mapping[Any, torch.Tensor] = self.gradients
        if key in gradients:
            return gradients[key]
        name = strip_wrappers(key.fqn)
        while name and name not in gradients:
            name = name.partition(".")[2]
        gradient = gradients.get(name)
        return gradient if gradient is not None and gradient.numel() == key.elements else None


def _is_rounded(config: TensorConfig | None, dtype: torch.dtype) -> bool:
    return config is not None and config.method == "bf16" and dtype.itemsize > 2


def _apply_layout_to_item(item: SaveItem, layout: Layout) -> SaveItem:
    if item.config is None:
        return item
    is_exact = item.key.fqn in layout.frozen or item.key.fqn in layout.rounded_weights
    if is_exact or (layout.weight_bound_state and item.kind == "weights" and not item.by_rule):
        return replace(item, kind=EXACT, group=EXACT, config=None)
    if not item.quantized:
        return item
    if item.key.fqn in layout.rounded_moments:
        rounded = None if item.dtype == torch.float64 else item.config.model_copy(update={"method": "bf16"})
        return replace(item, config=rounded, second_moment=None)
    group = layout.tensors.get(item.key.fqn, item.group)
    if item.second_moment is not None and group != item.group:
        return replace(item, group=group, config=layout.groups[group], second_moment=None)
    return item


def make_layout(
    shards: Sequence[LocalShard], options: SaveOptions, has_gradients: bool = False,
    others: Mapping[ChunkKey, torch.dtype] | None = None, objects: Mapping[str, Any] | None = None,
) -> Layout:
    """Return the layout of one rank: the lossy tensors among its chunks, and their settings.

    Args:
        shards: chunks that it writes.
        options: options of the save.
        has_gradients: whether weights come with averaged gradients.
        others: dtypes of the chunks of the save that are not among `shards`.
        objects: values that are not tensors, by name, including settings of optimizers; None: the value is unknown.
    """
    config, objects = options.config, objects or {}
    tensors, groups, state = {}, {}, {}
    settings: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    rests: dict[str, bool] = {}
    rounding: set[str] = set()
    known_updates: set[str] = set()
    ruled: set[str] = set()
    halved: set[str] = set()
    residual = config.delta.against == "values"
    assignments = Assignments.cached(config.quantize, options.layer_types)
    chunks = {**(others or {}), **{shard.key: shard.dtype for shard in shards}}
    for shard in shards:
        fqn = shard.key.fqn
        shapes[fqn] = tuple(shard.size)
        measured = not residual and _has_second_moment(shard, chunks)
        chosen = assignments.get(fqn, shard.size, shard.dtype, measured)
        if chosen.settings is not None:
            settings.add(chosen.settings)
        lossy = chosen.config is not None and chosen.config.method == "quantize"
        # Lossy state is coded as differences, which say nothing about the size of gradients.
        if not (residual and lossy) and (kind := kind_of(fqn, options.layer_types)) in ("exp_avg_sq", "momentum"):
            state[fqn] = kind
        if chosen.config is not None and lossy:
            tensors[fqn] = chosen.group
            groups[chosen.group] = chosen.config
            by_update = chosen.config.codebook.coordinates in ("update", "relative") and not chosen.by_rule
            if by_update:
                known_updates.add(fqn)
        is_halved = chosen.kind == "weights" and _is_rounded(chosen.config, shard.dtype)
        if is_halved:
            halved.add(fqn)
        if is_halved or (lossy and chosen.kind == "weights"):
            if chosen.by_rule:
                ruled.add(fqn)
                continue
            if (is_unchanged := find_by_suffix(fqn, options.frozen.unchanged)) is not None:
                rests[fqn] = is_unchanged
            if find_by_suffix(fqn, options.rounding):
                rounding.add(fqn)
    frozen = FrozenTensors(options.frozen.has_trained, rests)
    return Layout(
        tensors, groups, state, has_gradients, options.fractions, residual, frozenset(settings), shapes, frozen,
        frozenset() if residual else frozenset(known_updates), rule_weights=frozenset(ruled),
        unknown_updates=find_unknown_updates([*shapes, *objects]),
        prenormalized=find_prenormalized([*shapes, *objects]),
        rounded_weights=frozenset(rounding), objects=find_optimizer_objects(objects), bf16_weights=frozenset(halved),
    )


def make_items(shards: Sequence[LocalShard], options: SaveOptions, layout: Layout | None = None) -> list[SaveItem]:
    """Return the items of chunks, with their settings.

    Args:
        shards: chunks on this rank.
        options: options of the save.
        layout: layout of all ranks; None: this rank has all chunks of the save.
    """
    config = options.config
    loads = {shard.key: _CachedLoad(shard) for shard in shards}
    chunks = {shard.key: shard.dtype for shard in shards}
    assignments = Assignments.cached(config.quantize, options.layer_types)
    items = []
    for shard in shards:
        measured = config.delta.against == "codes" and _has_second_moment(shard, chunks)
        if layout is not None:
            measured = layout.tensors.get(shard.key.fqn, "").endswith("/update")
        chosen = assignments.get(shard.key.fqn, shard.size, shard.dtype, measured)
        second = None
        if chosen.second_moment is not None:
            second_load = loads.get(shard.key._replace(fqn=chosen.second_moment))
            load = partial(_load_second_moment, shard, chosen.second_moment) if second_load is None else second_load
            second = SecondMoment(chosen.second_moment, load)
        items.append(SaveItem(
            shard.key, shard.dtype, chosen.kind, chosen.group, chosen.config, loads[shard.key],
            config.storage.on_device, second, chosen.by_rule,
        ))
    return items


def _resolve(value: Any) -> Any:
    """Return a tensor without a lazy negation, for kernels to read; return any other staged value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.resolve_neg() if value.is_neg() else alias_of(value)


class _CachedLoad:
    """A loader of a checked chunk. A view of the state is loaded once and cached."""

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        self._found: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        if self._found is not None:
            return self._found
        tensor: torch.Tensor = _resolve(check_storable(self._shard.key.fqn, self._shard.load()))
        if self._shard.is_view:
            self._found = tensor
        return tensor


def _has_second_moment(shard: LocalShard, chunks: Mapping[ChunkKey, torch.dtype]) -> bool:
    """Return whether a chunk is of first moments, and the save has the same chunk of second moments as numbers."""
    second = second_moment_of(shard.key.fqn)
    return second is not None and chunks.get(shard.key._replace(fqn=second)) in QUANTIZABLE


def _load_second_moment(shard: LocalShard, name: str) -> torch.Tensor:
    if shard.load_chunk_of is None:
        raise SaveFailed(f"'{shard.key.fqn}' is measured by '{name}', of which this rank has no chunk like {shard.key}")
    tensor: torch.Tensor = _resolve(shard.load_chunk_of(name))
    return tensor
