"""What child processes are doing, as Linux tells it: for systems that do not say when their work is done."""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOKS, PAUSE = 4, 0.05
"""So often in a row, so many seconds apart, nothing has to be under way."""
_STATE, _PARENT, _USER, _SYSTEM = 0, 1, 11, 12  # fields of /proc/PID/stat after the name
_TICKS = os.sysconf("SC_CLK_TCK")


def children() -> list[int]:
    """Return the ids of the processes that this process started."""
    processes = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (fields := _fields(path / "stat")) and int(fields[_PARENT]) == os.getpid():
            processes.append(int(path.name))
    return processes


def processor_seconds() -> float:
    """Return seconds of processor time that all child processes took so far."""
    return sum(_ticks(child) for child in children()) / _TICKS


def wait_until_idle(timeout: float = 60.0) -> None:
    """Return when no child process computes, or waits for a disk.

    Raises:
        TimeoutError: They go on.
    """
    deadline = time.monotonic() + timeout
    quiet, before = 0, -1.0
    while quiet < LOOKS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"child processes are still busy after {timeout:.0f} s")
        ticks = sum(_ticks(child) for child in children())
        quiet = quiet + 1 if ticks == before and not any(map(_at_work, children())) else 0
        before = ticks
        time.sleep(PAUSE)


def _at_work(process: int) -> bool:
    """Return whether a thread of a process runs, or waits for a disk."""
    threads = Path(f"/proc/{process}/task").glob("*/stat")
    return any((fields := _fields(thread)) and fields[_STATE] in ("R", "D") for thread in threads)


def _ticks(process: int) -> int:
    fields = _fields(Path(f"/proc/{process}/stat"))
    return int(fields[_USER]) + int(fields[_SYSTEM]) if fields else 0


def _fields(path: Path) -> list[str]:
    """Return the fields of a stat file after the name, which may contain any bytes; none if the process has ended."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
