"""`dsq merge`: a chain of deltas in few records, or in a keyframe."""

from __future__ import annotations

from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.engine import merging


def run(checkpoint: Path, target: Path, keyframe: bool, as_json: bool) -> None:
    """Merge, and print what was merged."""
    with output.meter("merging", hidden=as_json):
        done = merging.merge(checkpoint, target, keyframe=keyframe)
    if as_json:
        output.print_json({
            "path": str(done.path), "links_before": done.links_before, "links": done.links, "bytes": done.bytes,
        })
        return
    output.console().print(
        f"{done.path}: {done.links_before} deltas merged into {done.links or 'a keyframe'}, "
        f"{output.size(done.bytes)} written",
        soft_wrap=True,
    )
