"""`dsq merge`: a chain of differences in few records."""

from __future__ import annotations

from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.engine import merging


def run(checkpoint: Path, target: Path, as_json: bool) -> None:
    """Merge, and print what was merged."""
    with output.meter("merging", hidden=as_json):
        done = merging.merge(checkpoint, target)
    if as_json:
        output.print_json({
            "path": str(done.path), "links_before": done.links_before, "links": done.links, "bytes": done.bytes,
        })
        return
    output.console().print(
        f"{done.path}: {done.links_before} differences merged into {done.links}, {output.size(done.bytes)} written",
        soft_wrap=True,
    )
