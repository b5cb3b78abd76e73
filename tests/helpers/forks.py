"""Python processes by fork instead of exec: as real as any, without the seconds that importing torch takes.

A server imports and compiles what all of them need, and forks whenever it is asked to. A fork has a session of its own,
and the environment, directory and output that it is given; it runs a script, `-m module` or `-c text`, as Python would.
`torchrun` in a fork starts its ranks in the same way, from two servers in turn: sets are ordered otherwise in each.
A fork is in the namespaces of who asks for it, which the server need not be in: hosts in `tests/multinode` are made so.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import io
import json
import os
import platform
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "DSQ_TEST_FORKS"
"""The directory of the servers' sockets; they end when it is gone, or the process that `session` made it for."""
_MODULES = (
    "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "dsq_ckpt.api",
    "dsq_ckpt.dcp", "dsq_ckpt.lowdiff", "dsq_ckpt.lowdiff.log_server", "dsq_ckpt.lowdiff.replica_server",
)
_USED_LATE = (  # prefixes of variables that nothing reads when it is imported
    "AWS_", "CUDA_VISIBLE_DEVICES", "GLOO_", "NCCL_SOCKET_IFNAME", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST",
    "PYTEST_XDIST_WORKER", "PYTHON=", "SHLVL", "STALL_AT_STEP", "TMPDIR", "_=",
)
_NAMESPACES = ("user", "net", "uts", "pid", "mnt")
_SECONDS = 600  # that a server may take to begin
_exec = subprocess.Popen


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Let there be servers meanwhile, for this process and those that it starts."""
    ours = f"-{os.getpid()}"
    with tempfile.TemporaryDirectory(ours, "dsq-forks-", ignore_cleanup_errors=True) as directory:
        os.environ[VARIABLE] = directory
        yield
        del os.environ[VARIABLE]


class Fork:
    """What `subprocess.Popen` is to who starts a process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its status, once it ended."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(64))
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self._connection.close()
        return self.returncode


def start(
    arguments: Sequence[str], environment: Mapping[str, str], directory: str | Path, output: int,
    pass_fds: Sequence[int] = (), turn: int = 0,
) -> Fork:
    """Start a Python process.

    Args:
        arguments: of the interpreter: a script, `-m module` or `-c text`, and its arguments.
        environment: its environment variables.
        directory: where it works.
        output: the file that its stdout and stderr are.
        pass_fds: other files that it has, by the same numbers.
        turn: it is forked from one server if this is even, else from another.
    """
    connection = _connect(environment, turn)
    request = {
        "arguments": list(arguments), "environment": dict(environment), "directory": str(directory),
        "numbers": [1, 2, *pass_fds],
    }
    with contextlib.ExitStack() as stack:
        spaces = [stack.enter_context(open(f"/proc/self/ns/{name}")).fileno() for name in _NAMESPACES]
        socket.send_fds(connection, [json.dumps(request).encode()], [*spaces, output, output, *pass_fds])
    return Fork(connection)


def interpreter(path: Path, environment: Mapping[str, str]) -> Path:
    """Write a program that starts forks as Python starts processes, for what takes the path of an interpreter.

    Args:
        path: of the program.
        environment: that it will have; the servers are started now, not by who may be in other namespaces.
    """
    for turn in range(2):
        _connect(environment, turn).close()
    path.write_text(
        f"#!{sys.executable} -S\nimport os, sys\nsys.path[0] = {str(Path(__file__).parents[2])!r}\n"
        "from tests.helpers import forks\n"
        "sys.exit(forks.start(sys.argv[1:], os.environ, os.getcwd(), 1).wait())\n"
    )
    path.chmod(0o755)
    return path


def popen(command: Sequence[str], **options: Any) -> Any:
    """Start a process as `subprocess.Popen` does; a fork, if it is a checkpointing process of a gradient log."""
    if list(command[1:3]) != ["-m", "dsq_ckpt.lowdiff.process"] or VARIABLE not in os.environ:
        return _exec(command, **options)
    return start(command[1:], options["env"], os.getcwd(), options["stderr"], options["pass_fds"])


def _connect(environment: Mapping[str, str], turn: int) -> socket.socket:
    """Connect to the server whose environment that is, which is started if it is not there."""
    base = {
        name: value for name, value in environment.items()
        if not f"{name}=".startswith(_USED_LATE) and not _of_a_rank(name)
    }
    base["PYTHONHASHSEED"] = str(1 + turn % 2)
    base["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow, which DeepSpeed finds by way of MLflow
    directory = Path(environment[VARIABLE])
    path = directory / hashlib.sha256(json.dumps(sorted(base.items())).encode()).hexdigest()[:16]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it listens
        if not path.exists():
            with path.with_suffix(".log").open("w") as log:
                server = _exec(
                    [sys.executable, "-m", "tests.helpers.forks", str(path)], env=base, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )
            deadline = time.monotonic() + _SECONDS
            while not path.exists():
                assert server.poll() is None and time.monotonic() < deadline, path.with_suffix(".log").read_text()
                time.sleep(0.02)
    connection.connect(str(path))
    return connection


def _of_a_rank(name: str) -> bool:
    """Whether torchrun sets a variable for its ranks."""
    words = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "ROLE_NAME")
    return any(word in name for word in words)


def _serve(path: Path) -> dict[str, object]:
    """Fork for everyone who asks; return in the forks, with the request."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path.with_suffix(".new")))
    listener.listen(64)
    listener.settimeout(2)
    path.with_suffix(".new").rename(path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait for the forks tell who asked
    gc.freeze()
    owner = Path("/proc", path.parent.name.rpartition("-")[2])
    while path.exists() and owner.exists():
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            continue
        data, files, *_ = socket.recv_fds(connection, 1 << 20, 20)
        if data and os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _enter(files[: len(_NAMESPACES)])
            if (fork := os.fork()) == 0:
                with contextlib.suppress(BrokenPipeError):  # who asked may have been killed
                    connection.send(b"%d" % os.getpid())  # as it is called in its namespace
                connection.close()
                return {**json.loads(data), "files": files[len(_NAMESPACES) :]}
            for file in files:
                os.close(file)
            status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                connection.send(b"%d" % status)
            os._exit(0)
        connection.close()
        for file in files:
            os.close(file)
    shutil.rmtree(path.parent, ignore_errors=True)
    os._exit(0)


def _enter(spaces: Sequence[int]) -> None:
    """Enter the namespaces that are not this process's own; a process namespace is that of its children."""
    pairs = zip(_NAMESPACES, spaces, strict=True)
    others = [file for name, file in pairs if os.fstat(file).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino]
    for file in others:  # `/proc` is another one in between
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")


def _become(
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
    if arguments[0] == "-u":
        del arguments[0]
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = _rank
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


def _rank(args: Sequence[str], env: Mapping[str, str], **options: object) -> Fork:
    """Start a rank of torchrun."""
    return start(args[1:], env, os.getcwd(), 1, turn=int(env["RANK"]))


if __name__ == "__main__":
    for module in (*_MODULES, *(["deepspeed", "dsq_ckpt.deepspeed"] if "DS_ACCELERATOR" in os.environ else [])):
        importlib.import_module(module)
    from dsq_ckpt.engine import warmup

    for group in warmup.ALL:
        warmup.compile_group(group)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, threads  # a fork would lack the others
    _become(**_serve(Path(sys.argv[1])))  # type: ignore[arg-type]
