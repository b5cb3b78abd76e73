"""Training on several hosts, which are namespaces of this machine: a host that goes away, storage that is not shared.

Each host runs the launch script with one rank; `workers/stalls.py` says what the ranks do.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from operator import itemgetter
from pathlib import Path

import pytest
import torch

import dsq_ckpt
from tests.helpers.commands import dsq_json
from tests.multinode.cluster import INTERFACE, ROOT, Host, NoNamespaces, cluster

pytestmark = [pytest.mark.slow(40), pytest.mark.timeout(360)]

LAUNCHER = ROOT / "scripts" / "launch_multinode.sh"
WORKER = ROOT / "tests" / "multinode" / "workers" / "stalls.py"
TIMEOUT = 15.0
"""Seconds after which a collective fails."""
SLACK = 30.0
"""Seconds more for torchrun to end, on a busy machine."""


class Job:
    """What a test knows of a cluster: its hosts, and where they log, by the same path each on its own storage."""

    def __init__(self, directory: Path, hosts: list[Host]) -> None:
        self.directory, self.hosts = directory, hosts
        self.local, self.shared = directory / "local", directory / "shared"
        self._launches = 0

    def launch(
        self, hosts: list[Host], out: Path, *options: str, stalls: Host | None = None
    ) -> list[subprocess.Popen[str]]:
        """Start an agent on each host; they meet on the second host of the cluster. Host `stalls` does in a save."""
        self._launches += 1
        options += ("--nproc-per-node", "1", "--interface", INTERFACE, "--rdzv-conf", "last_call_timeout=2")
        options += ("--rdzv-endpoint", f"{self.hosts[1].name}:29400", "--rdzv-id", f"launch-{self._launches}")
        training = ["--out", out, "--log-dir", self.local, "--timeout", TIMEOUT, "--steps", 6, "--save-every", 2]
        training += ["--layers", 2, "--width", 48, "--megabytes", 0.5]
        return [
            host.start(
                [str(LAUNCHER), *options, str(WORKER), *map(str, training)], self.log(host), TMPDIR=str(self.local),
                STALL_AT_STEP="4" if host is stalls else "",
            )
            for host in hosts
        ]

    def log(self, host: Host) -> Path:
        return self.directory / f"{host.name}.log"

    def events(self, host: Host, kind: str) -> list[dict]:
        """What the rank on a host logged, over all launches; its rank may have changed."""
        lines = [line for file in host.storage.glob("rank-*.jsonl") for line in file.read_text().splitlines()]
        return sorted((event for event in map(json.loads, lines) if event["event"] == kind), key=itemgetter("time"))

    def wait(self, agents: list[subprocess.Popen[str]], seconds: float) -> list[int]:
        """The exit status of each agent.

        Raises:
            AssertionError: one of them did not end.
        """
        deadline = time.monotonic() + seconds
        try:
            return [agent.wait(max(deadline - time.monotonic(), 0.1)) for agent in agents]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"an agent still runs after {seconds} s:\n{self.output()}") from None

    def until(self, happened, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def output(self) -> str:
        return "\n".join(f"{host.name}:\n{self.log(host).read_text()[-4000:]}" for host in self.hosts)


@pytest.fixture
def job(tmp_path, request):
    """As many hosts as the test says, or a skip where they cannot be made."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    local.mkdir()
    shared.mkdir()
    names = [f"node-{letter}" for letter in "abc"[: request.param]]
    try:
        with cluster(tmp_path, names, local) as hosts:
            yield Job(tmp_path, hosts)
    except NoNamespaces as reason:
        pytest.skip(f"no namespaces here: {reason}")


@pytest.mark.parametrize(
    ("job", "lost", "elastic"), [(2, 0, False), (3, 2, True)], indirect=["job"],
    ids=["first-of-2-relaunched", "last-of-3-elastic"],
)
def test_a_host_is_lost_during_a_save(job, lost, elastic):
    """The ranks left fail in time; with a host less, started by hand or by torchrun, they go on from before that."""
    gone = job.hosts[lost]
    left = [host for host in job.hosts if host is not gone]
    options = ("--nnodes", "2:3", "--max-restarts", "10") if elastic else ("--nnodes", "2")
    agents = job.launch(job.hosts, job.shared, *options, stalls=gone)
    complete, target = job.shared / "step-000002", job.shared / "step-000004"

    def in_the_middle() -> bool:
        """The others wrote their files, and the one that is to go has not finished its own."""
        own = [file for file in target.glob("*.refinement") if not (complete / file.name).exists()]  # not linked
        return (gone.storage / "stalled").exists() and len(own) == len(left)

    job.until(in_the_middle, 120)
    begun = time.time()
    gone.cut_off()
    shutil.copytree(complete, job.directory / "copy")  # a later save drops the refinement of the original
    agents = [agent for host, agent in zip(job.hosts, agents, strict=True) if host is not gone]

    job.until(lambda: all(job.events(host, "failed") for host in left), TIMEOUT + SLACK)
    for host in left:
        (failure,) = job.events(host, "failed")[:1]
        assert failure["step"] == 4 and failure["error"].startswith("SaveFailed: rank "), failure
        assert "its host is gone" in failure["error"]
        assert failure["time"] - begun < TIMEOUT + 5
    if not elastic:
        assert all(status not in (0, None) for status in job.wait(agents, SLACK)), job.output()
        assert list(target.iterdir()) and not (target / "manifest.json").exists()
        assert dsq_ckpt.latest(job.shared) == str(complete)
        agents = job.launch(left, job.shared, "--nnodes", "1")
    assert job.wait(agents, 120) == [0] * len(left), job.output()

    alone: dict = {}
    dsq_ckpt.load(alone, job.directory / "copy", no_dist=True)
    for host in left:
        start = job.events(host, "start")[-1]
        assert (start["resumed_from"], start["world"], start["step"]) == (str(complete), len(left), 2)
        restored = torch.load(next(host.storage.glob("weights-*.pt")), weights_only=True)
        assert bits(restored["model"]) == bits(alone["model"])
        assert bits(restored["optimizer"]["state"]) == bits(alone["optimizer"]["state"])
        losses: dict[int, list[float]] = {}
        for event in job.events(host, "step"):
            losses.setdefault(event["step"], []).append(event["loss"])
        before, after = losses[3][0], losses[3][-1]  # of the same batch, by one rank less
        assert len(losses[3]) >= 2 and after == pytest.approx(before, rel=1e-3) and after < losses[2][0]
        assert losses[6][-1] < losses[4][-1] < losses[3][-1]
        assert [event["step"] for event in job.events(host, "save")][-2:] == [4, 6]
    assert dsq_ckpt.latest(job.shared) == str(job.shared / "step-000006")
    verified = dsq_json("verify", job.shared)
    assert verified["ok"] and len(verified["checkpoints"]) == 3 and verified["incomplete"] == []


def bits(tree: dict, prefix: str = "") -> dict[str, tuple]:
    """Names, types, shapes and bytes of the tensors in a state dict."""
    entries: dict[str, tuple] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            entries |= bits(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            entries[f"{prefix}{key}"] = (value.dtype, value.shape, value.contiguous().numpy().tobytes())
    assert entries or not tree
    return entries


@pytest.mark.parametrize("job", [2], indirect=True)
def test_a_directory_that_is_not_shared_is_refused(job):
    """The same path is other storage on each host: all ranks say so, and nothing looks like a checkpoint."""
    run = job.local / "run"
    assert all(status != 0 for status in job.wait(job.launch(job.hosts, run, "--nnodes", "2"), 120))
    for rank, host in enumerate(job.hosts):
        (failure,) = job.events(host, "failed")
        assert failure["error"].startswith("SaveFailed: rank 0: ") and failure["step"] == 2, failure
        (missing,) = (job.hosts[1].storage / "run" / "step-000002").glob("*.dsq")
        for part in (f"lacks in '{run / 'step-000002'}'", f"{missing.name} (written by rank 1 on host node-b)",
                     "not shared by all hosts", "was not committed"):
            assert part in failure["error"]
        assert missing.name.endswith("-00001.dsq")
        assert failure["rank"] == rank and failure["error"] in job.log(host).read_text()
        assert dsq_ckpt.latest(host.storage / "run") is None
    assert not list((job.hosts[0].storage / "run").rglob("*"))  # the host that commits removes what it can reach
