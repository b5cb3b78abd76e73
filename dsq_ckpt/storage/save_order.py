"""Order in which the checkpoints of a run were saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsq_ckpt.storage.manifest import Manifest


def sort_by_save_order(checkpoints: Sequence[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    """Return checkpoints of a run in the order of their saves; see `iter_checkpoints`."""
    created: dict[str, float] = {}
    for _, manifest in checkpoints:
        created[manifest.save_id] = max(manifest.created, created.get(manifest.save_id, manifest.created))
    before = {manifest.save_id: manifest.get_older_save_ids() & created.keys() for _, manifest in checkpoints}
    order = {save_id: (time, 0) for save_id, time in created.items()}
    try:
        for save_id in TopologicalSorter(before).static_order():
            latest = max((order[older] for older in before[save_id]), default=(-math.inf, 0))
            order[save_id] = max(order[save_id], (latest[0], latest[1] + 1))
    except CycleError:  # not possible by saves
        pass
    return sorted(checkpoints, key=lambda pair: (order[pair[1].save_id], pair[0].name))
