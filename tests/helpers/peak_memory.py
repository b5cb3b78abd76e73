"""How much memory tensors take that operations make, wherever they lie."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors that are made in it, at most at one time; views count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the results of an operation, until nobody has them."""
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in given:
                self._add(leaf.untyped_storage().nbytes())
                weakref.finalize(leaf, self._add, -leaf.untyped_storage().nbytes())
        return result

    def _add(self, size: int) -> None:
        self._now += size
        self.peak = max(self.peak, self._now)
