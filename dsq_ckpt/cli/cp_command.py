"""`dsq cp`: copying of a checkpoint or a run."""

from __future__ import annotations

from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage import checkpoint_copy


def run(source: Path, target: Path, as_json: bool) -> None:
    """Copy, and print what was copied and what was left out."""
    with output.meter("copying", checkpoint_copy.compute_copy_size(source), hidden=as_json) as meter:
        result = checkpoint_copy.copy_checkpoints(source, target, meter.advance)
    if as_json:
        output.print_json({
            "path": str(result.path), "checkpoints": result.checkpoints, "files": result.files, "bytes": result.bytes,
            "links": result.links, "left_out": [str(path) for path in result.left_out],
            "removed": [str(path) for path in result.removed],
        })
        return
    screen = output.console()
    screen.print(
        f"{result.path}: {result.checkpoints} checkpoint(s), {output.size(result.bytes)} in {result.files} file(s), "
        f"{result.links} {'reference' if is_remote(target) else 'hard link'}(s) to them", soft_wrap=True,
    )
    for entry, reason in result.left_out.items():
        screen.print(f"left out: {entry}: {reason}", soft_wrap=True)
    for entry in result.removed:
        screen.print(f"left out: {entry}: it was removed while the others were copied", soft_wrap=True)
