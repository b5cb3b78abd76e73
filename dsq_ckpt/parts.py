"""What a save is given, whoever drives it: parts of named tensors, and from these what is lossy and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from dsq_ckpt.analysis import Fractions, Layout
from dsq_ckpt.chunk import ChunkKey
from dsq_ckpt.config import DSQConfig
from dsq_ckpt.groups import assign, kind_of
from dsq_ckpt.session import Item
from dsq_ckpt.subclasses import checked


@dataclass(frozen=True)
class Part:
    """A chunk of a tensor that this rank writes.

    Attributes:
        key: name, offsets and shape of the chunk.
        size: shape of the whole tensor.
        dtype: of the tensor.
        load: gives the chunk, on any device.
    """

    key: ChunkKey
    size: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]


def layout_of(
    parts: Iterable[Part], config: DSQConfig, types: Mapping[str, str] | None, averaged: bool = False,
    fractions: Fractions | None = None,
) -> Layout:
    """What is lossy among a rank's parts, and how.

    Args:
        parts: that it writes.
        config: of the save.
        types: see `assign`.
        averaged: weights come with averaged gradients.
        fractions: what the chooser may prune and protect by sensitivity.
    """
    tensors, groups, state = {}, {}, {}
    settings: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    residual = config.delta.against == "values"
    for part in parts:
        fqn = part.key.fqn
        shapes[fqn] = tuple(part.size)
        chosen = assign(fqn, part.size, part.dtype, config.quantize, types)
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


def items_of(parts: Iterable[Part], config: DSQConfig, types: Mapping[str, str] | None) -> list[Item]:
    """The parts with how each of them is stored."""
    items = []
    for part in parts:
        chosen = assign(part.key.fqn, part.size, part.dtype, config.quantize, types)
        items.append(Item(
            part.key, part.dtype, chosen.kind, chosen.group, chosen.config, partial(_loaded, part),
            config.storage.on_device,
        ))
    return items
