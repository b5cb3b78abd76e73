"""`dsq cp`: a copy of a checkpoint or of a run."""

from __future__ import annotations

from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage import checkpoint_copy


def run(source: Path, target: Path, as_json: bool) -> None:
    """Copy, and print what was copied and what was left out."""
    with output.meter("copying", checkpoint_copy.compute_copy_size(source), hidden=as_json) as meter:
        done = checkpoint_copy.copy_checkpoints(source, target, meter.advance)
    if as_json:
        paths = {"left_out": [str(one) for one in done.left_out], "removed": [str(one) for one in done.removed]}
        output.print_json({**done._asdict(), "path": str(done.path), **paths})
        return
    screen = output.console()
    screen.print(
        f"{done.path}: {done.checkpoints} checkpoint(s), {output.size(done.bytes)} in {done.files} file(s), "
        f"{done.links} {'reference' if is_remote(target) else 'hard link'}(s) to them", soft_wrap=True,
    )
    for entry, why in done.left_out.items():
        screen.print(f"left out: {entry}: {why}", soft_wrap=True)
    for entry in done.removed:
        screen.print(f"left out: {entry}: it was removed while the others were copied", soft_wrap=True)
