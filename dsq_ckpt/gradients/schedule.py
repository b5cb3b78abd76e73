"""When gradients are worth their copies: shortly before a checkpoint."""

from __future__ import annotations


class Schedule:
    """When to capture: only in the ``window`` steps before a checkpoint.

    Args:
        every: steps from one checkpoint to the next.  An extra checkpoint in between may or may not move those that
            follow, so then both are prepared for, until saves are ``every`` steps apart again.  None: the distance of
            the last two saves; until there are two, always.
        window: steps, at least 1.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(self, every: int | None, window: int) -> None:
        if window < 1 or (every is not None and every < 1):
            raise ValueError(f"every {every} and window {window} must be at least 1")
        self.every = every
        self.window = window
        self._step = self._saved = self._anchor = 0
        self._learned: int | None = None
        self._saves = 0

    def due(self) -> bool:
        """Whether the step that comes next (or is under way) is within the window; also once a save is late."""
        if self.every is None:
            return self._learned is None or self._learned - (self._step - self._saved) <= self.window
        on_grid = (self._anchor - self._step) % self.every  # 0: now, unless it has been made
        if on_grid == 0 and self._saved == self._step:
            on_grid = self.every
        return min(on_grid, self.every - (self._step - self._saved)) <= self.window

    def stepped(self) -> None:
        """One more optimizer step was taken."""
        self._step += 1

    def saved(self) -> None:
        """A checkpoint was made of the state after the last step; a second one of the same state changes nothing."""
        distance = self._step - self._saved
        if self._saves and not distance:
            return
        if self._saves:
            self._learned = distance
        if distance == self.every:
            self._anchor = self._step
        self._saved = self._step
        self._saves += 1
