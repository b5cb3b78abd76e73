"""What a save is given, whoever drives it: parts of named tensors, and from these what is lossy and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.subclasses import checked
from dsq_ckpt.engine.session import Item, SecondMoment
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.analysis import Fractions, Layout
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import QUANTIZABLE, assign, kind_of, second_moment_of


@dataclass(frozen=True)
class Part:
    """A chunk of a tensor that this rank writes.

    Attributes:
        key: name, offsets and shape of the chunk.
        size: shape of the whole tensor.
        dtype: of the tensor.
        load: gives the chunk, on any device.
        beside: gives the same chunk of the tensor of another name, where that lies on this rank too.
    """

    key: ChunkKey
    size: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    beside: Callable[[str], torch.Tensor] | None = None


def layout_of(
    parts: Sequence[Part], config: DSQConfig, types: Mapping[str, str] | None, averaged: bool = False,
    fractions: Fractions | None = None, others: Mapping[ChunkKey, torch.dtype] | None = None,
) -> Layout:
    """What is lossy among a rank's parts, and how.

    Args:
        parts: that it writes.
        config: of the save.
        types: see `assign`.
        averaged: weights come with averaged gradients.
        fractions: what the chooser may prune and protect by sensitivity.
        others: chunks of the save that are not among the parts, by dtype.
    """
    tensors, groups, state = {}, {}, {}
    settings: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    residual = config.delta.against == "values"
    chunks = {**(others or {}), **{part.key: part.dtype for part in parts}}
    for part in parts:
        fqn = part.key.fqn
        shapes[fqn] = tuple(part.size)
        chosen = assign(fqn, part.size, part.dtype, config.quantize, types, not residual and _measured(part, chunks))
        if chosen.settings is not None:
            settings.add(chosen.settings)
        lossy = chosen.config is not None and chosen.config.method == "quantize"
        # What is coded of lossy state are differences, and these do not tell the size of gradients.
        if not (residual and lossy) and (kind := kind_of(fqn)) in ("exp_avg_sq", "momentum"):
            state[fqn] = kind
        if chosen.config is not None and lossy:
            tensors[fqn] = chosen.group
            groups[chosen.group] = chosen.config
    return Layout(tensors, groups, state, averaged, fractions or Fractions(), residual, frozenset(settings), shapes)


def _loaded(part: Part) -> torch.Tensor:
    return checked(part.key.fqn, part.load())


def items_of(
    parts: Sequence[Part], config: DSQConfig, types: Mapping[str, str] | None, layout: Layout | None = None
) -> list[Item]:
    """The parts with how each of them is stored.

    Args:
        parts: that this rank writes.
        config: of the save.
        types: see `assign`.
        layout: that ranks agreed on, once they did; None: the parts are all there is.
    """
    known = {part.key: part for part in parts}
    chunks = {part.key: part.dtype for part in parts}
    items = []
    for part in parts:
        measured = config.delta.against == "codes" and _measured(part, chunks)
        if layout is not None:
            measured = layout.tensors.get(part.key.fqn, "").endswith("/update")
        chosen = assign(part.key.fqn, part.size, part.dtype, config.quantize, types, measured)
        second = None
        if chosen.second_moment is not None:
            other = known.get(part.key._replace(fqn=chosen.second_moment))
            load = partial(_beside, part, chosen.second_moment) if other is None else other.load
            second = SecondMoment(chosen.second_moment, load)
        items.append(Item(
            part.key, part.dtype, chosen.kind, chosen.group, chosen.config, partial(_loaded, part),
            config.storage.on_device, second,
        ))
    return items


def _measured(part: Part, chunks: Mapping[ChunkKey, torch.dtype]) -> bool:
    """Whether a part is of first moments, and the same chunk of the second ones is there and holds numbers."""
    second = second_moment_of(part.key.fqn)
    return second is not None and chunks.get(part.key._replace(fqn=second)) in QUANTIZABLE


def _beside(part: Part, name: str) -> torch.Tensor:
    if part.beside is None:
        raise SaveFailed(f"'{part.key.fqn}' is measured by '{name}', of which this rank has no chunk like {part.key}")
    return part.beside(name)
