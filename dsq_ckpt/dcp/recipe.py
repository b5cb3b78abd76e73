"""A writer's settings for tensors, applied to DCP's items: what is lossy, and how it is quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.dcp.items import name_of, objects_of, parts_of
from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.engine.parts import items_of, layout_of
from dsq_ckpt.engine.quantizing import Quantized, quantize_items
from dsq_ckpt.engine.session import Agreement, Item
from dsq_ckpt.quantization.analysis import Fractions, Layout
from dsq_ckpt.quantization.choice import Chooser, as_configured


@dataclass(frozen=True)
class Recipe:
    """How the tensors of a save are stored.

    Attributes:
        config: of the save.
        types: layer types by name; see `assign`.
        chooser: chooses the configuration when the sketches are known.
        gradients: averaged gradients of local shards, by parameter name, float32 on the CPU.
        fractions: what the chooser may prune and protect by sensitivity.
    """

    config: DSQConfig
    types: Mapping[str, str] | None = None
    chooser: Chooser = as_configured
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fractions: Fractions = field(default_factory=Fractions)

    def without_training(self) -> Recipe:
        """Return the recipe without what only the training thread may use; of a save that is quantized already."""
        return replace(self, chooser=as_configured, gradients={})

    def with_own_gradients(self) -> Recipe:
        """Return the recipe with gradients that training does not go on to change."""
        return replace(self, gradients={name: average.clone() for name, average in self.gradients.items()})

    def layout(self, write_items: list[WriteItem], others: Iterable[WriteItem] = ()) -> Layout:
        """Return what is lossy among items, and how; `others` are in the same save."""
        chunks = {part.key: part.dtype for part in parts_of(others)}
        parts = parts_of(write_items)
        return layout_of(parts, self.config, self.types, bool(self.gradients), self.fractions, chunks)

    def items(
        self, write_items: list[WriteItem], planner: SavePlanner, layout: Layout | None = None
    ) -> tuple[list[Item], Iterator[tuple[str, bytes]]]:
        """Return the tensors among DCP's items, and names and bytes of the objects.

        Args:
            write_items: DCP's items.
            planner: gives their data.
            layout: that ranks agreed on, once they did.
        """
        items = items_of(parts_of(write_items, planner), self.config, self.types, layout)
        return items, objects_of(write_items, planner)

    def beside(self, write_items: list[WriteItem], planner: SavePlanner, agreement: Agreement) -> list[Item]:
        """Return the tensors of this rank's state dict that another rank writes, as far as a planner of DCP tells."""
        if agreement.ranks == 1 or not isinstance(planner, DefaultSavePlanner) or _apart(planner.state_dict):
            return []
        whole = DefaultSavePlanner()  # the hooks of a planner are called no oftener than DCP does it
        whole.set_up_planner(planner.state_dict)
        mine = set(map(name_of, write_items))
        others = [item for item in whole.create_local_plan().items if name_of(item) not in mine]
        return self.items(others, whole, agreement.layout)[0]

    def quantized(
        self, items: list[Item], replicas: list[Item], agreement: Agreement, comm: Communicator, workers: Workers
    ) -> Quantized:
        """Merge sketches with the other ranks, choose, then quantize lazily; collective over `comm`."""
        return quantize_items(items, replicas, agreement, self.config, self.chooser, self.gradients, comm, workers)


def _apart(state: Any) -> bool:
    """Return whether no two tensors can share memory, so that the whole state need not be planned to find those."""
    seen: set[int] = set()
    left = [state]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            try:
                place = getattr(value, "_local_tensor", value).untyped_storage().data_ptr()
            except Exception:  # a subclass or layout without a storage of its own
                return False
            if place and place in seen:
                return False
            seen.add(place)
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return True
