"""`dsq rm`: checkpoints that go, and the files of theirs that stay for others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage import removal
from dsq_ckpt.storage.runs import canonical


def run(checkpoints: Sequence[Path], dry_run: bool, as_json: bool) -> None:
    """Remove checkpoints, in this order, and print a line or an object of JSON for each.

    Raises:
        DSQError: one of them cannot be removed, or is named twice; then none is.
    """
    with output.meter("removing", hidden=as_json):
        _refuse_twice(checkpoints)
        done = [removal.remove(checkpoint, dry_run=True) for checkpoint in checkpoints]
        if not dry_run:
            done = [removal.remove(checkpoint) for checkpoint in checkpoints]
    if as_json:
        output.print_json([{
            "path": str(one.path), "dry_run": dry_run, "bytes": one.bytes, "files": [str(file) for file in one.files],
            "kept": [str(file) for file in one.kept],
        } for one in done])
        return
    verb = "would remove" if dry_run else "removed"
    for one in done:
        kept = f"; {len(one.kept)} file(s) stay, which others need" if one.kept else ""
        output.console().print(
            f"{verb} {one.path}: {len(one.files)} file(s), {output.size(one.bytes)}{kept}", soft_wrap=True
        )


def _refuse_twice(checkpoints: Sequence[Path]) -> None:
    """Refuse a checkpoint that is named twice."""
    seen: set[Path] = set()
    for checkpoint in map(canonical, checkpoints):
        if checkpoint in seen:
            raise ConfigError(f"'{checkpoint}' is named twice; name each checkpoint once")
        seen.add(checkpoint)
