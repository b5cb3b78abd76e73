"""Processes that `evaluation.lowdiff` trains in, without imports of their own: the server that forks them is a fork
itself, and so is each checkpointing process that they start.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from multiprocessing import util
from typing import Any
from unittest import mock

from tests.helpers import forks
from tests.helpers.processes import ROOT, make_environment

_RELAY = f"""
import os, sys
sys.path[0] = {str(ROOT)!r}
from tests.helpers import forks
sys.exit(forks.start(["-c", sys.argv[1]], os.environ, os.getcwd(), 1, [*map(int, sys.argv[2:])]).wait())
"""
_exec = util.spawnv_passfds


def start(path: bytes, arguments: Sequence[str], files: Sequence[int]) -> int:
    """Start Python where `multiprocessing` does: if it is the server, a child that has a fork be it; return the pid."""
    text = arguments[-1]
    if "forkserver" not in text or forks.VARIABLE not in os.environ:
        return _exec(path, arguments, files)
    text = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import prepare; prepare(); {text}"
    with mock.patch.dict(os.environ, make_environment({})):  # that of the servers of forks
        return _exec(path, [sys.executable, "-S", "-c", _RELAY, text, *map(str, files)], files)


def prepare() -> None:
    """Import what is needed, and let gradient logs of this process's forks start forks."""
    from evaluation.lowdiff import idle, process  # noqa: F401

    from dsq_ckpt.lowdiff import worker_client
    from tests.helpers.checkpointing_processes import Grown, Nursery

    started: list[int] = []
    children = idle.children
    popen = Nursery().popen

    def remembered(command: list[str], **options: Any) -> Any:
        child = popen(command, **options)
        if isinstance(child, Grown):
            started.append(child.pid)
        return child

    worker_client.subprocess.Popen = remembered  # type: ignore[misc, assignment]
    idle.children = lambda: [*children(), *started]  # a fork's parent is another process
    gc.freeze()
