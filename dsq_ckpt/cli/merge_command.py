"""`dsq merge`: merging of a chain of deltas into one checkpoint."""

from __future__ import annotations

from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.engine import merging


def run(checkpoint: Path, target: Path, keyframe: bool, as_json: bool) -> None:
    """Merge, and print what was merged."""
    with output.meter("merging", hidden=as_json):
        result = merging.merge(checkpoint, target, keyframe=keyframe)
    if as_json:
        output.print_json({
            "path": str(result.path), "links_before": result.links_before, "links": result.links, "bytes": result.bytes,
        })
        return
    output.console().print(
        f"{result.path}: {result.links_before} deltas merged into {result.links or 'a keyframe'}, "
        f"{output.size(result.bytes)} written",
        soft_wrap=True,
    )
