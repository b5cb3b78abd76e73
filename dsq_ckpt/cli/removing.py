"""`dsq rm`: checkpoints that go, and the files of theirs that stay for others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.storage import removal


def run(checkpoints: Sequence[Path], dry_run: bool, as_json: bool) -> None:
    """Remove checkpoints, in this order, and print a line or an object of JSON for each."""
    with output.meter("removing", hidden=as_json):
        done = [removal.remove(checkpoint, dry_run) for checkpoint in checkpoints]
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
