"""Scalars of each checkpoint for experiment loggers, by the argument `on_save` of functions that save.

    writer = SummaryWriter("run/events")
    dsq_ckpt.save(state, "run/step-000500", on_save=dsq_ckpt.report.scalars.tensorboard(writer))
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from dsq_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from dsq_ckpt.engine.result import OnSave, SaveResult


class ScalarWriter(Protocol):
    """An object with the interface of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> object: ...


def step_of(result: SaveResult) -> int:
    """Return the last number in the name of a checkpoint: 500 of `step-000500` and of `global_step500`.

    A background save is committed some steps after it began, so the step of the commit would be wrong.

    Raises:
        ConfigError: the name has no number.
    """
    numbers = re.findall(r"\d+", result.path.name)
    if not numbers:
        raise ConfigError(f"'{result.path.name}' has no number to take for the step: pass step=, a function")
    return int(numbers[-1])


def named(result: SaveResult, prefix: str = "checkpoint") -> dict[str, float]:
    """Return `SaveResult.scalars`, each name after `prefix` and a slash."""
    return {f"{prefix}/{name}": value for name, value in result.scalars().items()}


def tensorboard(
    writer: ScalarWriter, *, prefix: str = "checkpoint", step: Callable[[SaveResult], int] = step_of
) -> OnSave:
    """Return a function for `on_save` that adds the scalars of each checkpoint to TensorBoard.

    Args:
        writer: TensorBoard writer, whose `add_scalar` is called from the thread that commits.
        prefix: prefix of the tags, such as `checkpoint/ratio`.
        step: function that returns the step of a checkpoint.

    Example:
        >>> class Writer:
        ...     def add_scalar(self, tag, scalar_value, global_step=None):
        ...         if tag == "checkpoint/keyframe":
        ...             print(tag, scalar_value, global_step)
        >>> on_save = dsq_ckpt.report.scalars.tensorboard(Writer())
        >>> result = dsq_ckpt.save({"w": torch.randn(256, 256)}, "run/step-000500", on_save=on_save)
        checkpoint/keyframe 1.0 500
    """
    def on_save(result: SaveResult) -> None:
        number = step(result)
        for tag, value in named(result, prefix).items():
            writer.add_scalar(tag, value, number)

    return on_save
