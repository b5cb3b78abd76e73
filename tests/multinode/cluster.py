"""Hosts of a small cluster on one machine: Linux namespaces, joined by a bridge.

Each host has a network of its own with one address, a hostname, its own processes, its own `/etc/hosts`, and its own
storage at a path that is the same on all of them; every other path is shared. Bridge and links lie in a network
namespace too, so that nothing of the machine's own network is touched, and clusters do not see each other. Nothing
needs to be cleaned up: the namespaces have no names and go with their first processes, which end when their standard
input is closed, also if the test process is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers import forks
from tests.helpers.processes import ROOT

INTERFACE = "eth0"
_TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname", "bash")
_HOLD = ["bash", "-c", "echo ready; exec cat"]


class NoNamespaces(Exception):
    """This machine does not let us make namespaces; the message says why."""


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")


def _holder(command: list[str]) -> subprocess.Popen[str]:
    """A process that is in new namespaces once this returns, and ends with its standard input."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise NoNamespaces(f"{' '.join(command)}: {process.communicate()[1].strip()}")
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


class Host:
    """One host, made by `cluster`.

    Attributes:
        name: its hostname, which the other hosts can resolve.
        storage: what the cluster's `local` directory is on this host, as seen from outside.
    """

    def __init__(self, name: str, address: str, storage: Path, switch: list[str], port: str) -> None:
        self.name, self.address, self.storage = name, address, storage
        self._switch, self._port = switch, port
        self._agents: list[subprocess.Popen[str]] = []
        # Killing `unshare` kills its child, and with that first process all others of the host.
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._init = _holder([*switch, "unshare", *spaces, *_HOLD])

    def connect(self, local: Path, names: Path) -> None:
        """Plug it into the switch, and give it its name and its storage."""
        peer = ["type", "veth", "peer", "name", INTERFACE, "netns", str(self._init.pid)]
        _call([*self._switch, "ip", "link", "add", self._port, *peer])
        _call([*self._switch, "ip", "link", "set", self._port, "master", "bridge", "up"])
        for command in (
            ["hostname", self.name],
            ["mount", "--bind", str(self.storage), str(local)],
            ["mount", "--bind", str(names), "/etc/hosts"],
            ["ip", "link", "set", "lo", "up"],
            ["ip", "address", "add", f"{self.address}/24", "dev", INTERFACE],
            ["ip", "link", "set", INTERFACE, "up"],
        ):
            _call([*self._inside(), *command])

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[str]:
        """Run a command on this host; its output is appended to `log`."""
        base = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "SLURM_", "RDZV_"))}
        base |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
        base["PYTHON"] = str(forks.interpreter(log.with_suffix(".python"), base))
        with log.open("a") as stream:
            agent = subprocess.Popen(
                [*self._inside(), *command], stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                env=base, cwd=ROOT, text=True, start_new_session=True,
            )
        self._agents.append(agent)
        return agent

    def cut_off(self) -> None:
        """Pull its cable, then its power plug: peers get no word of it, not even that connections were closed."""
        _call([*self._switch, "ip", "link", "set", self._port, "down"])
        self.kill()

    def kill(self) -> None:
        """End it and all its processes."""
        _end(self._init)
        for agent in self._agents:
            agent.wait(120)

    def _inside(self) -> list[str]:
        pid = self._init.pid
        children = f"--pid=/proc/{pid}/ns/pid_for_children"
        return ["nsenter", f"--target={pid}", *_user(), "--net", "--uts", "--mount", children]


@contextlib.contextmanager
def cluster(directory: Path, names: Sequence[str], local: Path) -> Iterator[list[Host]]:
    """Hosts that reach each other, until the block ends.

    Args:
        directory: for what the hosts need, their storage included.
        names: hostnames, in the order of their addresses.
        local: an empty directory; on each host it is storage of its own.

    Raises:
        NoNamespaces: this machine cannot, or does not let us.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if not sys.platform.startswith("linux") or missing:
        raise NoNamespaces(f"needs Linux with {', '.join(_TOOLS)}; missing: {', '.join(missing) or 'Linux'}")
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
    table = directory / "etc-hosts"
    table.write_text("".join(f"{ip}\t{name}\n" for name, ip in {"localhost": "127.0.0.1", **addresses}.items()))
    with contextlib.ExitStack() as stack:
        user = ["--user", "--map-root-user"] if os.geteuid() else []
        middle = _holder(["unshare", *user, "--net", *_HOLD])
        stack.callback(_end, middle)
        switch = ["nsenter", f"--target={middle.pid}", *_user(), "--net"]
        _call([*switch, "ip", "link", "add", "bridge", "type", "bridge"])
        _call([*switch, "ip", "link", "set", "bridge", "up"])
        hosts = []
        for number, (name, address) in enumerate(addresses.items()):
            storage = directory / name
            storage.mkdir()
            host = Host(name, address, storage, switch, f"port{number}")
            stack.callback(host.kill)
            host.connect(local, table)
            hosts.append(host)
        yield hosts


def _user() -> list[str]:
    return ["--user", "--preserve-credentials"] if os.geteuid() else []
