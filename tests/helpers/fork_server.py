"""The servers of `forks`, and what their forks become."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import platform
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import popen_spawn_posix
from multiprocessing import util as processes
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.helpers import forks

_MODULES = (
    "torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict", "torch.utils.serialization.config", "torch._dynamo", "encodings.idna",
    "dsq_ckpt.api", "dsq_ckpt.dcp", "dsq_ckpt.lowdiff", "dsq_ckpt.lowdiff.log_server",
    "dsq_ckpt.lowdiff.replica_server",
)
_exec = processes.spawnv_passfds
_MADV_COLLAPSE = 25
_inherited: list[weakref.finalize[..., Any]] = []
"""What is done at the end of a process for objects of the server, such as two hundred libraries of operators."""


def serve(path: Path) -> dict[str, Any]:
    """Fork for everyone who asks, and tell how forks end; return in the forks, with the request."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path.with_suffix(".new")))
    listener.listen(64)
    path.with_suffix(".new").rename(path)
    gc.freeze()
    _take_large_pages()
    owner = Path("/proc", path.parent.name.rpartition("-")[2])
    running: dict[int, tuple[int, socket.socket, bool]] = {}  # by the file of the process
    while running or (path.exists() and owner.exists()):
        askers = [connection for _, connection, tied in running.values() if tied]
        ready = select.select([listener, *running, *askers], [], [], 2)[0]
        for file, (fork, connection, tied) in list(running.items()):
            if file in ready or (tied and connection in ready):
                _report_exit(fork, file, connection, tied)
                connection.close()
                os.close(file)
                del running[file]
        if listener not in ready:
            continue
        connection = listener.accept()[0]
        data, files, *_ = socket.recv_fds(connection, 1 << 20, 20)
        if data:
            request = json.loads(data)
            tied = request.pop("tied")
            others = _open_other_namespaces(files[: len(forks.NAMESPACES)])
            if (fork := os.fork()) == 0:
                for end in (listener, *(asker for _, asker, _ in running.values())):
                    end.close()
                for file in running:
                    os.close(file)
                if others:
                    _enter_namespaces(others, files, connection, tied)
                with contextlib.suppress(ConnectionError):  # who asked may have been killed
                    connection.send(b"%d" % os.getpid())  # as it is called in its namespace
                connection.close()
                return {**request, "files": files[len(forks.NAMESPACES) :]}
            running[os.pidfd_open(fork)] = fork, connection, tied and not others
        else:
            connection.close()
        for file in files:
            os.close(file)
    shutil.rmtree(path.parent, ignore_errors=True)
    os._exit(0)


def _take_large_pages() -> None:
    """Move memory to pages of 2 MiB, where the kernel has them: a fork copies the table of pages, 60,000 of 4 KiB."""
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        edges, rights, _, _, file, *name = line.split()
        if rights == "rw-p" and file == "0" and name in ([], ["[heap]"]):
            start, stop = (int(edge, 16) for edge in edges.split("-"))
            advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_COLLAPSE)


def _report_exit(fork: int, file: int, connection: socket.socket, tied: bool) -> None:
    """Wait until a fork has ended, and tell who asked for it; one that is tied is killed once who asked is gone."""
    if tied and connection in select.select([file, connection], [], [])[0]:
        os.kill(fork, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    with contextlib.suppress(ConnectionError):
        connection.send(b"%d" % status)


def _open_other_namespaces(spaces: Sequence[int]) -> list[int]:
    """Return those of namespaces that are not this process's own."""
    pairs = zip(forks.NAMESPACES, spaces, strict=True)
    return [file for name, file in pairs if os.fstat(file).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino]


def _enter_namespaces(spaces: Sequence[int], files: Sequence[int], connection: socket.socket, tied: bool) -> None:
    """Enter namespaces, in a fork: a process namespace is that of a process's children. Return in that fork alone."""
    for file in spaces:  # `/proc` is another one in between
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
    if fork := os.fork():
        for file in files:
            os.close(file)
        _report_exit(fork, os.pidfd_open(fork), connection, tied)
        os._exit(0)


def run_command(
    arguments: list[str], environment: dict[str, str], directory: str, numbers: list[int], files: list[int]
) -> None:
    """Be the Python process that was asked for."""
    os.setsid()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1 + max(*numbers, *files)) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = platform._uname_cache = None  # type: ignore[attr-defined]
    os.chdir(directory)
    sys.executable = environment.get(forks.EXECUTABLE, sys.executable)
    popen_spawn_posix.Popen = _Spawned  # type: ignore[misc]
    processes.spawnv_passfds = _Spawned.start  # type: ignore[assignment]
    if arguments[0] == "-u":
        del arguments[0]
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous

        subprocess_handler.Popen = _rank
        # For names of events that nobody reads, it would look through all modules whenever it does something.
        dynamic_rendezvous.get_method_name = lambda: ""
        sys.argv = arguments[1:]
        run.main()
    elif arguments[0] == "-m":
        sys.path[0] = ""
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        code: str | bytes
        if arguments[0] == "-c":
            name, code, sys.path[0] = "<string>", arguments.pop(1), ""
        else:
            name, code = arguments[0], Path(arguments[0]).read_bytes()
            main.__file__, sys.path[0] = name, str(Path(name).resolve().parent)
        sys.argv = arguments
        exec(compile(code, name, "exec"), main.__dict__)


def run(work: Callable[[], None]) -> NoReturn:
    """Do the work of a fork, and end as Python does, but for freeing all that the server has imported.

    That takes a quarter of a second, as each page of it is copied; with the variable `forks.TEARDOWN` it is done.
    """
    status = 0
    try:
        work()
    except KeyboardInterrupt:  # the interpreter ends by the signal
        raise
    except SystemExit as error:
        if isinstance(error.code, int):
            status = error.code & 0xFF
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
        sys.excepthook(sys.last_type, error, error.__traceback__)
        status = 1
    if forks.TEARDOWN in os.environ:
        sys.exit(status)
    for finalizer in _inherited:
        finalizer.atexit = False
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(status)


def _rank(
    args: Sequence[str], env: Mapping[str, str], stdout: IO[str] | None, stderr: IO[str] | None, **options: object
) -> forks.Fork:
    """Start a rank of torchrun."""
    output, errors = (file.fileno() if file else number for file, number in ((stdout, 1), (stderr, 2)))
    return forks.start(args[1:], env, os.getcwd(), output, turn=int(env["RANK"]), errors=errors)


class _Spawned(popen_spawn_posix.Popen):
    """A process of `multiprocessing` that is started by the method `spawn`."""

    _started: dict[int, forks.Fork] = {}  # noqa: RUF012

    @classmethod
    def start(cls, path: bytes, arguments: Sequence[str], files: Sequence[int]) -> int:
        """Start it, where `multiprocessing` calls the interpreter; return its pid."""
        if "--multiprocessing-fork" not in arguments:  # the resource tracker, which is there in no time
            return _exec(path, arguments, files)
        words = list(arguments[arguments.index("-c") :])
        fork = forks.start(words, os.environ, os.getcwd(), 1, sorted(files), turn=int(os.environ.get("RANK", "0")))
        cls._started[fork.pid] = fork
        return fork.pid

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return its status; None while it runs and is not waited for."""
        if self.returncode is None:
            fork = self._started[self.pid]
            self.returncode = fork.poll() if flag == os.WNOHANG else fork.wait()
        return self.returncode


def main(path: Path, *more: str) -> None:
    """Import, compile, and serve; be what was asked for in the forks."""
    # A thread that wakes up takes no core from one that runs: gloo's own would, from one that holds the lock of their
    # connection, and asks for that lock until its time is up.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for module in (*_MODULES, *more):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    if deepspeed := sys.modules.get("deepspeed"):
        # Its own collectives are for inference, and compiled in 25 s where it takes the compiler for compatible.
        deepspeed.ops.__compatible_ops__ = {}
        # Every optimizer for CPUs asks, and each answer takes a process of a second.
        cpuinfo = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        cpuinfo.get_cpu_info()
    from dsq_ckpt.engine import warmup

    for group in warmup.ALL:
        warmup.compile_group(group)
    _inherited.extend(weakref.finalize._registry)  # type: ignore[attr-defined]
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, threads  # a fork would lack the others
    request = serve(path)
    run(lambda: run_command(**request))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
