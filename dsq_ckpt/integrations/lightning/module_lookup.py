"""Lookup of the module that a plugin saves; Lightning passes a dict to a `CheckpointIO`, without module or Trainer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus


class ModuleLookup:
    """A lookup of a plugin's strategy among all objects of the process; the result is cached while its Trainer runs."""

    def __init__(self, plugin: CheckpointIO) -> None:
        self._plugin = weakref.ref(plugin)
        self._last_strategy: weakref.ref[Strategy] | None = None

    def find_module(self) -> LightningModule | None:
        """Return the module of the plugin's Trainer, of the running one if there are several, or None."""
        strategy = None if self._last_strategy is None else self._last_strategy()
        if strategy is None or not self._is_used_by(strategy) or not _is_running(strategy):
            strategies = list(self._iter_strategies())
            strategy = next(filter(_is_running, strategies), strategies[-1] if strategies else None)
            self._last_strategy = None if strategy is None else weakref.ref(strategy)
        return None if strategy is None else strategy.lightning_module

    def _iter_strategies(self) -> Iterator[Strategy]:
        # isinstance() reads __class__ of the objects, and some lazy modules then import a library.
        return (item for item in gc.get_objects() if issubclass(type(item), Strategy) and self._is_used_by(item))

    def _is_used_by(self, strategy: Strategy) -> bool:
        io_plugin, plugin = getattr(strategy, "_checkpoint_io", None), self._plugin()  # missing if `__init__` failed
        while io_plugin is not plugin and isinstance(io_plugin, _WrappingCheckpointIO):
            io_plugin = io_plugin.checkpoint_io
        return io_plugin is not None and io_plugin is plugin and strategy.lightning_module is not None


def _is_running(strategy: Strategy) -> bool:
    module = strategy.lightning_module
    trainer = None if module is None else module._trainer
    return trainer is not None and trainer.state.status == TrainerStatus.RUNNING
