"""Python processes by fork instead of exec: as real as any, without the seconds that importing torch takes.

A server (`fork_server`) imports and compiles what all of them need, and forks whenever it is asked to. A fork has a
session of its own, and the environment, directory and output that it is given; it runs a script, `-m module` or
`-c text`, as Python would. What a fork starts by `torchrun` or `multiprocessing` is started in the same way, ranks from
two servers in turn: sets are ordered otherwise in each.
A fork is in the namespaces of who asks for it, which the server need not be in: hosts in `tests/multinode` are made so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

VARIABLE = "DSQ_TEST_FORKS"
"""The directory of the servers' sockets; they end when it is gone, or the process that `session` made it for."""
PRELOAD = "DSQ_TEST_PRELOAD"
"""Names of modules that the servers of such an environment import besides, where they are installed.

They are forks of those without it.
"""
TEARDOWN = "DSQ_TEST_TEARDOWN"
"""A fork with this variable frees all that it has, as an interpreter does at its end; for tests of such ends."""
EXECUTABLE = "DSQ_TEST_EXECUTABLE"
"""What `sys.executable` is in a fork with this variable: an `interpreter`, so that what it starts are forks, too."""
_USED_LATE = (  # prefixes of variables that nothing reads when it is imported, or that are others in every process
    "AWS_", "COLUMNS=", "CUDA_VISIBLE_DEVICES", "FSSPEC_", "GFORTRAN_", "GLOO_", "HYD", "LINES=",
    "LOCAL_ADDR=", "LOG_DIR=", "MAX_RESTARTS=", "MPI", "NNODES=", "NPROC_PER_NODE=",
    "NCCL_SOCKET_IFNAME", "OLDPWD", "OMPI_", "PMI", "PRTE_", "PWD", "PYTEST_", "PYTHON=",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "RAY_", "RDZV_", "SHLVL", "SPT_NOENV", "STALL_AT_STEP", "TMPDIR", "_=",
    "_MLFLOW_TELEMETRY_SESSION_ID", "TORCHINDUCTOR_CACHE_DIR", TEARDOWN,
    EXECUTABLE,
)
_USED_BY_PRELOADED = ("CXX=", "DS_ACCELERATOR=")
NAMESPACES = ("user", "net", "uts", "pid", "mnt")
_SECONDS = 600  # that a server may take to begin
_exec = subprocess.Popen


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Let there be servers meanwhile, for this process and those that it starts."""
    suffix = f"-{os.getpid()}"
    with tempfile.TemporaryDirectory(suffix, "dsq-forks-", ignore_cleanup_errors=True) as directory:
        os.environ[VARIABLE] = directory
        yield
        del os.environ[VARIABLE]


class Fork:
    """What `subprocess.Popen` is to who starts a process."""

    def __init__(self, server: socket.socket) -> None:
        self._connection = server
        self.pid = int(server.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its status, once it ended; several threads may wait."""
        if self.returncode is None:
            if not connection.wait([self._connection], timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._connection.recv(64, socket.MSG_PEEK))
        return self.returncode


def start(
    arguments: Sequence[str], environment: Mapping[str, str], directory: str | Path, output: int,
    pass_fds: Sequence[int] = (), turn: int = 0, tied: bool = False, errors: int | None = None,
) -> Fork:
    """Start a Python process.

    Args:
        arguments: of the interpreter: a script, `-m module` or `-c text`, and its arguments.
        environment: its environment variables.
        directory: where it works.
        output: the file that its stdout and stderr are.
        pass_fds: other files that it has, by the same numbers.
        turn: it is forked from one server if this is even, else from another.
        tied: it is killed once the process that started it is gone.
        errors: the file that its stderr is, if another one.
    """
    server = _connect(environment, turn)
    request = {
        "arguments": list(arguments), "environment": dict(environment), "directory": str(directory),
        "numbers": [1, 2, *pass_fds], "tied": tied,
    }
    errors = output if errors is None else errors
    with contextlib.ExitStack() as stack:
        spaces = [stack.enter_context(open(f"/proc/self/ns/{name}")).fileno() for name in NAMESPACES]
        socket.send_fds(server, [json.dumps(request).encode()], [*spaces, output, errors, *pass_fds])
    return Fork(server)


def interpreter(path: Path, environment: Mapping[str, str] | None = None) -> Path:
    """Write a program that starts forks as Python starts processes, for what takes the path of an interpreter.

    Args:
        path: of the program.
        environment: that it will have; the servers are started now, not by who may be in other namespaces. None: it
            is not known, and they are started when they are needed.
    """
    for turn in range(0 if environment is None else 2):
        _connect(environment, turn).close()
    path.write_text(
        f"#!{sys.executable} -S\nimport os, sys\nsys.path[0] = {str(Path(__file__).parents[2])!r}\n"
        "from tests.helpers import forks\n"
        "rank = os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK') or 0\n"
        "files = [int(os.environ[name]) for name in ('PMI_FD',) if name in os.environ]  # by which MPICH is told\n"
        "sys.exit(forks.start(sys.argv[1:], os.environ, os.getcwd(), 1, files, int(rank), tied=True).wait())\n"
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
    late = _USED_LATE if PRELOAD in environment else (*_USED_LATE, *_USED_BY_PRELOADED)
    base = {
        name: value for name, value in environment.items()
        if not f"{name}=".startswith(late) and not _is_rank_variable(name)
    }
    if "PYTHONPATH" in base:  # logs in a fork put the root before it, where it is already
        base["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(base["PYTHONPATH"].split(os.pathsep)))
    base["PYTHONHASHSEED"] = str(1 + turn % 2)
    base["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow, which DeepSpeed finds by way of MLflow
    directory = Path(environment[VARIABLE])
    path = directory / hashlib.sha256(json.dumps(sorted(base.items())).encode()).hexdigest()[:16]
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it listens
        if not path.exists():
            with path.with_suffix(".log").open("w") as log:
                server = _server(path, base, log.fileno(), turn)
            deadline = time.monotonic() + _SECONDS
            while not path.exists():
                assert server.poll() is None and time.monotonic() < deadline, path.with_suffix(".log").read_text()
                time.sleep(0.02)
    channel.connect(str(path))
    return channel


def _server(path: Path, base: Mapping[str, str], log: int, turn: int) -> subprocess.Popen[bytes] | Fork:
    """Start a server: a fork of the one that imports less, if it is to import more than that."""
    arguments = ["-m", "tests.helpers.fork_server", str(path)]
    if PRELOAD in base:
        rest = {name: value for name, value in base.items() if name != PRELOAD}
        return start([*arguments, *base[PRELOAD].split()], rest, os.getcwd(), log, turn=turn)
    return _exec(
        [sys.executable, *arguments], env=base, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log,
        stderr=log,
    )


def _is_rank_variable(name: str) -> bool:
    """Whether torchrun, or DeepSpeed's launcher, sets a variable for its ranks."""
    words = (
        "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "ROLE_NAME", "CROSS_SIZE",
        "LOCAL_SIZE",
    )
    return any(word in name for word in words)
