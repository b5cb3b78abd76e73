"""Work in forks of a process, for tests and campaigns that kill processes or need many of them."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def forked(work: Callable[[], Any]) -> int:
    """Fork a child with its own process group, which calls a function and exits with 0, or with 1 after a traceback."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        with suppress(OSError):
            os.setpgid(child, child)
        return child
    status = 1
    try:
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        with suppress(OSError):
            os.setpgid(0, 0)
        warnings.simplefilter("ignore")
        logging.disable()
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ask(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a function in a fork of this process, as JSON holds it, and the status of `waitpid`.

    None if the function failed.
    """
    reader, writer = os.pipe()
    child = forked(lambda: os.write(writer, json.dumps(work()).encode()))
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if text else None, status
