"""Train and die: `killed.py EVENT PATTERN DIRECTORY ...`, in a child for each three of them, by SIGKILL.

A child is killed at the first event of Python's audit log of that name, whose first argument, a path, has the pattern.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from dsq_ckpt.integrations.lightning import DSQCheckpointIO
from tests.integrations.lightning.common import Model, saving, seed, trainer


def train(event: str, pattern: str, directory: Path) -> None:
    def watch(happened: str, arguments: tuple[Any, ...]) -> None:
        if happened == event and re.search(pattern, str(arguments[0])):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    seed(1)
    trainer(DSQCheckpointIO("exact"), epochs=3, callbacks=[saving(directory, save_last=True)]).fit(
        Model(), ckpt_path="last"
    )


def main() -> None:
    for event, pattern, directory in zip(*(iter(sys.argv[1:]),) * 3, strict=True):
        child = os.fork()
        if child == 0:
            try:
                train(event, pattern, Path(directory))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, pattern


main()
