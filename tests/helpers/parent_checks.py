"""Checks of parents, which saves start in the background."""

from __future__ import annotations

from dsq_ckpt.engine import parent_integrity


def finish_checks() -> None:
    """Wait for the checks of earlier saves: they might read files, or call functions, that a test changes now."""
    for check in parent_integrity._pending_checks:
        check.wait()
