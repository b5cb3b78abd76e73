"""Train and die: `killed.py DIRECTORY EVENT PART COUNT` ends by SIGKILL at an event of Python's audit log.

The event is one whose first argument, a path, has PART in its name, for the COUNT-th time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dsq_ckpt.integrations.lightning import DSQCheckpointIO
from tests.integrations.lightning.common import Model, saving, seed, trainer


def main() -> None:
    directory, event, part, left = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

    def watch(happened: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if happened == event and part in str(arguments[0]):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    seed(1)
    trainer(DSQCheckpointIO("exact"), epochs=3, callbacks=[saving(directory, save_last=True)]).fit(
        Model(), ckpt_path="last"
    )


main()
