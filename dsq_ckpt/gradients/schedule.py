"""A schedule that captures gradients only shortly before a checkpoint."""

from __future__ import annotations


class Schedule:
    """A schedule of the `window` steps before each checkpoint.

    Args:
        every: steps from one checkpoint to the next. An extra checkpoint in between may or may not shift the later
            ones; both cases are covered until saves are `every` steps apart again. None for the distance of the
            last two saves; every step is due until there are two.
        window: number of steps, at least 1.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(self, every: int | None, window: int) -> None:
        if window < 1 or (every is not None and every < 1):
            raise ValueError(f"every {every} and window {window} must be at least 1")
        self.every = every
        self.window = window
        self._step = self._saved = self._anchor = 0
        self._learned: int | None = None
        self._saves = 0

    def is_due(self) -> bool:
        """Return whether the next step (or the step under way) is within the window, or a save is late."""
        if self.every is None:
            return self._learned is None or self._learned - (self._step - self._saved) <= self.window
        on_grid = (self._anchor - self._step) % self.every  # 0: now, unless it has been made
        if on_grid == 0 and self._saved == self._step:
            on_grid = self.every
        return min(on_grid, self.every - (self._step - self._saved)) <= self.window

    def count_step(self) -> None:
        """Count an optimizer step."""
        self._step += 1

    def record_save(self) -> None:
        """Record a checkpoint of the state after the last step; a second one of the same state has no effect."""
        distance = self._step - self._saved
        if self._saves and not distance:
            return
        if self._saves:
            self._learned = distance
        if distance == self.every:
            self._anchor = self._step
        self._saved = self._step
        self._saves += 1
