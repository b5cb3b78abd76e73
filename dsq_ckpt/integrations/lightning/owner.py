"""The module that a plugin saves: Lightning gives a `CheckpointIO` a dict, and no reference to module or Trainer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus


class Owner:
    """The strategy that holds a plugin, looked for among the objects of the process, and kept as long as it runs."""

    def __init__(self, plugin: CheckpointIO) -> None:
        self._plugin = weakref.ref(plugin)
        self._last: weakref.ref[Strategy] | None = None

    def module(self) -> LightningModule | None:
        """Return the module of the Trainer that the plugin serves, of the one that runs if there are several."""
        strategy = None if self._last is None else self._last()
        if strategy is None or not self._is_held_by(strategy) or not _runs(strategy):
            found = list(self._strategies())
            strategy = next(filter(_runs, found), found[-1] if found else None)
            self._last = None if strategy is None else weakref.ref(strategy)
        return None if strategy is None else strategy.lightning_module

    def _strategies(self) -> Iterator[Strategy]:
        # By type(): isinstance() asks the objects, of which some load a library to answer.
        return (one for one in gc.get_objects() if issubclass(type(one), Strategy) and self._is_held_by(one))

    def _is_held_by(self, strategy: Strategy) -> bool:
        held, plugin = getattr(strategy, "_checkpoint_io", None), self._plugin()  # one that failed has none
        while held is not plugin and isinstance(held, _WrappingCheckpointIO):
            held = held.checkpoint_io
        return held is not None and held is plugin and strategy.lightning_module is not None


def _runs(strategy: Strategy) -> bool:
    module = strategy.lightning_module
    trainer = None if module is None else module._trainer
    return trainer is not None and trainer.state.status == TrainerStatus.RUNNING
