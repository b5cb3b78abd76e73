"""`scripts/launch_multinode.sh` and `scripts/launch_slurm.sbatch`; the latter with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import forks
from tests.helpers.processes import ROOT

LAUNCHER = ROOT / "scripts" / "launch_multinode.sh"
SBATCH = ROOT / "scripts" / "launch_slurm.sbatch"
TELLS = ROOT / "tests" / "multinode" / "workers" / "tells.py"
GIVEN = {"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV_ENDPOINT": "node-1:29400", "RDZV_ID": "job"}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def environment(**given: str) -> dict[str, str]:
    """This process's, without what would tell the launcher anything but `given`."""
    names = (*GIVEN, "MAX_RESTARTS", "INTERFACE", "LOCAL_ADDR", "RDZV_CONF", "LOG_DIR")
    base = {name: value for name, value in os.environ.items() if name not in names and not name.startswith("SLURM_")}
    return base | {"PYTHON": sys.executable} | given


def launcher(*arguments: object, **given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LAUNCHER), *map(str, arguments)], env=environment(**given), capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("script", [LAUNCHER, SBATCH], ids=lambda path: path.name)
def test_launcher_scripts_parse(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def test_help():
    told = launcher("--help")
    assert told.returncode == 0 and told.stderr == ""
    for name in (*GIVEN, "MAX_RESTARTS", "INTERFACE", "LOCAL_ADDR", "RDZV_CONF", "LOG_DIR", "PYTHON"):
        assert f"[{name}]" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "given", "says"),
    [
        ([TELLS], {"NNODES": ""}, "the number of nodes is missing: give --nnodes, or set NNODES"),
        ([TELLS], {"NPROC_PER_NODE": ""}, "give --nproc-per-node, or set NPROC_PER_NODE"),
        ([TELLS], {"RDZV_ENDPOINT": ""}, "no place to meet: give --rdzv-endpoint HOST:PORT, or set RDZV_ENDPOINT"),
        ([TELLS], {"RDZV_ID": ""}, "the job has no name: give --rdzv-id, or set RDZV_ID"),
        ([], {}, "no training script"),
        (["absent.py"], {}, "there is no training script 'absent.py'"),
        (["--nnodes", "two", TELLS], {}, "--nnodes is 'two', expected a number or MIN:MAX"),
        (["--nnodes=4:2", TELLS], {}, "the smaller number comes first"),
        (["--nproc-per-node", "0", TELLS], {}, "--nproc-per-node is '0'"),
        (["--max-restarts", "-1", TELLS], {}, "--max-restarts is '-1', expected a number"),
        (["--rdzv-endpoint", "node-1", TELLS], {}, "--rdzv-endpoint is 'node-1', expected HOST:PORT"),
        (["--interface", "nic7", TELLS], {}, "no network interface 'nic7' here; there are: "),
        (["--node", "2", TELLS], {}, "unknown option --node"),
        (["--nnodes"], {}, "--nnodes needs a value"),
        ([TELLS], {"PYTHON": "no-such-python"}, "there is no interpreter 'no-such-python': set PYTHON"),
    ],
)
def test_an_error_is_said_in_one_line(arguments, given, says):
    if "nic7" in arguments and not Path("/proc/net/dev").exists():
        pytest.skip("interfaces are looked up on Linux")
    told = launcher(*arguments, **GIVEN | given)
    assert told.returncode == 2 and told.stdout == ""
    assert says in told.stderr and told.stderr.startswith("launch_multinode.sh: ") and told.stderr.count("\n") == 1


@pytest.mark.slow
def test_two_agents_meet(tmp_path):
    """One is told by options, the other by the environment; options of the script are left to it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = {"NNODES": "2", "NPROC_PER_NODE": "2", "RDZV_ENDPOINT": f"127.0.0.1:{port}", "RDZV_ID": "both",
             "MAX_RESTARTS": "1", "LOCAL_ADDR": "127.0.0.1", "LOG_DIR": str(tmp_path / "logs")}
    interface = ["--interface", "lo"] if Path("/proc/net/dev").exists() else []
    options = ["--nnodes", "2", "--nproc-per-node=1", "--rdzv-endpoint", given["RDZV_ENDPOINT"], "--rdzv-id", "both",
               "--max-restarts", "1", "--local-addr", "127.0.0.1", *interface]
    script = [str(TELLS), str(tmp_path), "--run", "a b", "--rdzv-id", "mine"]
    path = {"PYTHONPATH": str(ROOT)}
    python = {"PYTHON": str(forks.interpreter(tmp_path / "python", environment(**path))), **path}
    agents = [
        subprocess.Popen([str(LAUNCHER), *more, *script], env=environment(**known, **python), start_new_session=True)
        for more, known in ((options, {}), ([], given))
    ]
    try:
        assert [agent.wait(60) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert {rank["WORLD_SIZE"] for rank in told} == {"3"} and {rank["TORCHELASTIC_RUN_ID"] for rank in told} == {"both"}
    assert sorted(rank["GROUP_RANK"] for rank in told) in (["0", "0", "1"], ["0", "1", "1"])
    assert all(rank["argv"] == script[2:] and rank["TORCHELASTIC_MAX_RESTARTS"] == "1" for rank in told)
    if interface:
        names = sorted((rank["GLOO_SOCKET_IFNAME"] or "", rank["NCCL_SOCKET_IFNAME"] or "") for rank in told)
        assert names == [("", ""), ("", ""), ("lo", "lo")]
    assert list((tmp_path / "logs").rglob("stdout.log"))


@pytest.fixture
def slurm(tmp_path):
    """Stand-ins for srun and scontrol, which write down how they were called; and how to start the job."""
    (tmp_path / "bin").mkdir()
    stands = {
        "srun": 'echo "$@" > "$SEEN/srun"; env > "$SEEN/environment"; for last; do :; done\n'
                'while [[ -n $RUNS && ! -e $last ]]; do sleep 0.05; done; exit "$ENDS"',
        "scontrol": 'echo "$@" >> "$SEEN/scontrol"; [[ $1 != show ]] || printf "gpu-3\\ngpu-4\\n"',
    }
    for name, text in stands.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    started = []

    def start(runs: str, ends: str, *arguments: str) -> subprocess.Popen[bytes]:
        given = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SEEN": str(tmp_path), "RUNS": runs, "ENDS": ends,
                 "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu-[3-4]",
                 "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "5", "LAUNCHER": str(LAUNCHER)}
        with (tmp_path / "stderr").open("a") as stream:
            command = ["bash", str(SBATCH), *arguments]
            started.append(subprocess.Popen(command, env=environment(**given), stderr=stream, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def calls(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / name).read_text().splitlines()


def test_slurm_runs_an_agent_per_node(slurm, tmp_path):
    assert slurm("", "0", "train.py", "--out", "run").wait(120) == 0
    stop = tmp_path / ".stop-17"
    assert calls(tmp_path, "srun") == [
        f"--kill-on-bad-exit=1 --cpus-per-task=5 {LAUNCHER} train.py --out run --stop-file {stop}"
    ]
    assert calls(tmp_path, "scontrol") == ["show hostnames gpu-[3-4]"] and not stop.exists()
    seen = dict(line.split("=", 1) for line in calls(tmp_path, "environment") if "=" in line)
    assert (seen["NNODES"], seen["NPROC_PER_NODE"]) == ("2", "gpu")
    assert (seen["RDZV_ENDPOINT"], seen["RDZV_ID"]) == ("gpu-3:29400", "17-0")


def test_slurm_requeues_what_was_stopped(slurm, tmp_path):
    job = slurm("yes", "0", "train.py")
    deadline = time.monotonic() + 120
    while not (tmp_path / "environment").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.wait(120) == 0
    assert calls(tmp_path, "scontrol")[-1] == "requeue 17" and not (tmp_path / ".stop-17").exists()


def test_slurm_job_fails_as_its_ranks_do(slurm, tmp_path):
    assert slurm("", "3", "train.py").wait(120) == 3
    assert not any("requeue" in call for call in calls(tmp_path, "scontrol"))
    assert slurm("", "0").wait(120) == 2 and "usage: sbatch" in (tmp_path / "stderr").read_text()
