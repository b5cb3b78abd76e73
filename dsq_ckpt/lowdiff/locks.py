"""File locks of a run. Each checkpointing process holds one while it lives, and a job holds one while it begins a log.

A checkpointing process may still write after its training process died. The locks keep other processes from reading or
continuing its log meanwhile.

A lock file has its own path as content. A copy of a run by hard links has links to the lock files of the run, which
look as if a process wrote into the copy; the path tells where it does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.errors import DSQError, SaveFailed
from dsq_ckpt.lowdiff.segments import LOG

_WARN_AFTER = 5.0
_START_LOCK = "starting"
_MAX_PATH = 1 << 13  # bytes
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def lock_path(run: Path, session: str, rank: int) -> Path:
    """Return the path of the lock file of a rank."""
    return run / LOG / f"{session}-{rank:05d}.lock"


class Lock:
    """An exclusive file lock, held until `release` or the end of the process.

    Args:
        path: path of the lock file.
        pause: function that is called repeatedly while another process holds the lock; None to wait in the system call.
    """

    def __init__(self, path: Path, pause: Callable[[], None] | None = None) -> None:
        self._path = path
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if pause is None else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(self._descriptor)
                assert pause is not None
                pause()
                continue
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            if _is_current(self._descriptor, path):  # `_is_released` may have removed the file in between
                with suppress(OSError):  # without its path, a copy is taken for the run
                    os.ftruncate(self._descriptor, 0)
                    os.pwrite(self._descriptor, os.fsencode(path.absolute()), 0)
                return
            os.close(self._descriptor)

    def release(self) -> None:
        """Remove the lock file and release the lock."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def wait_for_writers(
    run: Path, timeout: float, session: str | None = None, error_type: type[DSQError] = SaveFailed,
    started: float | None = None,
) -> None:
    """Wait until no checkpointing process writes into a run. Warn if this takes some seconds, or half of `timeout`.

    Args:
        run: directory of the run.
        timeout: seconds to wait.
        session: session whose processes are ignored.
        error_type: class of the error.
        started: start of the timeout by `time.monotonic()`; None for now.

    Raises:
        SaveFailed (or `error_type`): a process still writes after `timeout` seconds.
    """
    wait = _LockWait(run, timeout, error_type, started)
    for path in sorted((run / LOG).glob("*.lock")) if (run / LOG).is_dir() else ():
        while not (session is not None and path.name.startswith(f"{session}-")) and not _is_released(path, error_type):
            wait.pause(path.name)


@contextmanager
def exclusive_start(run: Path, timeout: float) -> Iterator[None]:
    """Hold the start lock of a run, so that one job at a time begins a log. Later jobs then see its first snapshot.

    Warn if waiting takes some seconds, or half of `timeout`.

    Raises:
        SaveFailed: another job still holds the lock after `timeout` seconds, or the lock file cannot be opened.
    """
    wait, path = _LockWait(run, timeout, SaveFailed), run / LOG / _START_LOCK
    try:
        lock = Lock(path, lambda: wait.pause(path.name))
    except OSError as error:
        raise SaveFailed(
            f"'{path}' cannot be locked: {error}; make it writable for this user, or remove it if no job starts there"
        ) from error
    try:
        yield
    finally:
        lock.release()


class _LockWait:
    """A wait for the process that holds a lock of a run; see `wait_for_writers`."""

    def __init__(self, run: Path, timeout: float, error_type: type[DSQError], started: float | None = None) -> None:
        self._run, self._timeout, self._error_type = run, timeout, error_type
        self._started, self._warned = time.monotonic() if started is None else started, timeout == 0.0

    def pause(self, name: str) -> None:
        """Sleep briefly. Warn, or raise an error, if the lock file `name` has been held for too long."""
        waited = time.monotonic() - self._started
        if waited > min(_WARN_AFTER, self._timeout / 2) and not self._warned:
            self._warned = True
            warn_safely(
                f"waiting, for {self._timeout:.0f} s at most, for the checkpointing process that writes into "
                f"'{self._run}' and holds '{name}'; if it is of a log in this process, close() that log first"
                f"{self._describe_links(name)}"
            )
        if waited > self._timeout:
            raise self._error_type(
                f"a checkpointing process still writes into '{self._run}' after {self._timeout:.0f} s, it holds "
                f"'{name}': another job logs there, a log of this process was not closed, or its disk is slow; wait "
                f"for it, close it, or end it{self._describe_links(name)}"
            )
        run_pending_handlers()
        time.sleep(0.02)

    def _describe_links(self, name: str) -> str:
        with suppress(OSError):
            if (self._run / LOG / name).stat().st_nlink > 1:
                return (
                    f". '{name}' has several hard links: if '{self._run}' is a copy by `cp -al` of a run whose log "
                    "goes on, copy it without hard links, by `cp -a`"
                )
        return ""


def _is_released(path: Path, error_type: type[DSQError]) -> bool:
    """Return whether no process holds a lock file, which is then removed, or one that writes into another run."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise error_type(
            f"whether '{path}' is locked by a checkpointing process cannot be found out: {error}; make it writable for "
            "this user, or remove it if no job writes there"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_current(descriptor, path):
            return False  # another process removed the file, and there may be a new one
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return _is_of_other_run(descriptor, path)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
    return True


def _is_of_other_run(descriptor: int, path: Path) -> bool:
    """Return whether a lock file that is held is a link to that of another run directory, which is still there.

    Its holder writes to paths in that directory alone. Complete files, which both have as links, never change.
    """
    with suppress(OSError, ValueError):
        if os.fstat(descriptor).st_nlink > 1:
            # Links in the path are not resolved: the holder follows them anew for each file.
            own = Path(os.fsdecode(os.pread(descriptor, _MAX_PATH, 0)))
            return own.is_absolute() and _is_current(descriptor, own) and not os.path.samefile(own.parent, path.parent)
    return False


def _is_current(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
