"""`dsq warmup`: compilation of all kernels in advance."""

from __future__ import annotations

import time
from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.engine import warmup
from dsq_ckpt.kernels import jit


def run(as_json: bool) -> None:
    """Compile all kernels, and print their number and the cache directories."""
    began = time.monotonic()
    with output.meter("compiling kernels", hidden=as_json):
        failed = [error for group in warmup.ALL for error in warmup.compile_group(group)]
    if failed:
        raise output.fail(f"{len(failed)} kernel(s) could not be compiled: {failed[0]!r}")
    took, directories = time.monotonic() - began, jit.cache_directories()
    compiled = jit.count_compilations()
    size = sum(file.stat().st_size for directory in directories for file in Path(directory).glob("*.nb[ci]"))
    if as_json:
        output.print_json({
            "compiled": compiled, "seconds": round(took, 3), "bytes": size,
            "directories": [str(directory) for directory in directories],
        })
        return
    screen = output.console()
    screen.print(f"{compiled} kernels compiled in {output.seconds(took)}" if compiled else "all kernels are compiled")
    for directory in directories:
        screen.print(f"kept in {directory}", soft_wrap=True)
    if not directories:
        screen.print("nothing is kept: no directory for caches can be written; set NUMBA_CACHE_DIR", soft_wrap=True)
