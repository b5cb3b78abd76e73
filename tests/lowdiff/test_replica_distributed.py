"""Replicas whose training processes, and checkpointing processes, die: real processes, one rank and two."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers import processes
from tests.helpers.checkpointing_processes import alive
from tests.lowdiff.loops import Loop, digest
from tests.lowdiff.uninterrupted import CASE
from tests.lowdiff.workers.replica import check_same, replica_of, until

WORKERS = Path(__file__).parent / "workers"
pytestmark = pytest.mark.usefixtures("one_thread")


def worker(name: str, *arguments: object) -> str:
    status, output = processes.run([str(WORKERS / f"{name}.py"), *map(str, arguments)], forked=True)
    print(output)
    assert status == 0, output[-8000:]
    return output


def test_two_ranks():
    """Whatever DDP does, the replicas of both ranks together are what each of them has; see the worker."""
    output = worker("replica_ranks")
    assert output.count("[ok]") == 17


@pytest.mark.slow
def test_processes_die():
    """One of two just before the end of an iteration, all that train, or all there are, at random moments: three times
    in a row, and never a torn state.
    """
    worker("replica_lives", "--trials", 4, "--seed", random.randrange(1 << 30))


ENDS = {"raise": 1, "kill": -signal.SIGKILL, "exit": 3}


@pytest.mark.slow
@pytest.mark.parametrize("ways", [["raise", "kill"], ["exit", "raise"], ["kill", "kill"]])
def test_however_training_ends(tmp_path, ways):
    """The next training process has the state after the last whole step, from memory; so does the one after it, and
    nothing is left when training is done.
    """
    table = Loop(CASE)
    done, pids = 0, []
    for number, way in enumerate(ways):
        steps = 5 + number
        arguments = map(str, [WORKERS / "replica_trains.py", tmp_path / "run", way, steps])
        status, output = processes.run([*arguments], forked=True)
        told = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip()}
        assert status == ENDS[way], output
        if number:
            assert told["recovered"] == [str(done), "True", digest(table.state())]
        pids.append(int(told["process"][0]))
        for step in range(done, done + steps):
            table.step(step)
        done += steps
    assert alive(pids[-1])
    again = Loop(CASE, seed=1)
    recovery = again.recover(tmp_path / "run")
    assert (recovery.step, recovery.from_memory, recovery.exact) == (done, True, True)
    check_same(again, table)
    with replica_of(again, tmp_path / "run", resume=recovery) as replica:
        assert not any(map(alive, pids))
        pids.append(replica._require_client().pid)
        again.step(done)
        replica.step()
    until(lambda: not any(map(alive, pids)))
    assert not list(tmp_path.rglob("*.lock")) and not list(tmp_path.rglob("*.tmp"))
    last = Loop(CASE, seed=2)
    recovery = last.recover(tmp_path / "run")
    assert (recovery.step, recovery.from_memory, recovery.closed) == (done + 1, False, True)
    check_same(last, again)


SCRIPT = """
import sys
sys.path.insert(0, {directory!r})
import torch
from beside import Beside
from dsq_ckpt.lowdiff import Replica
class Own(torch.optim.SGD):
    pass
model = torch.nn.Linear(3, 3)
try:
    Replica({run!r}, model, Own(model.parameters(), lr=0.1))
except Exception as error:
    print(type(error).__name__, error)
optimizer = Beside(model.parameters(), lr=0.1)
with Replica({run!r}, model, optimizer) as replica:
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    replica.step()
print("done")
"""


def test_optimizers_of_scripts(tmp_path):
    """One of the script itself cannot be made again; one of a module beside it can, wherever that was found."""
    beside = tmp_path / "somewhere"
    beside.mkdir()
    (beside / "beside.py").write_text("import torch\n\n\nclass Beside(torch.optim.SGD):\n    pass\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(directory=str(beside), run=str(tmp_path / "run")))
    status, output = processes.run([str(script)], forked=True)
    assert status == 0, output
    first, *_, last = output.splitlines()
    assert first.startswith("ConfigError a replica of Own cannot be made") and "GradientLog" in first
    assert last == "done" and (tmp_path / "run" / "step-000000001").is_dir()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned")
def test_other_numbers_of_threads(tmp_path):
    """Training has more threads than its replica, and tensors of any layout: the same bits, also if it is fused."""
    script = """
import sys, torch
from pathlib import Path
from torch import nn
from tests.lowdiff.loops import Case, Loop, seeded
from tests.helpers.checkpointing_processes import Nursery
from tests.lowdiff.workers.replica import check_same, replica_of
Nursery()
torch.set_num_threads(4)
def wide():
    model = nn.Sequential(nn.Linear(12, 40 * 81), nn.Unflatten(1, (40, 9, 9)), nn.Conv2d(40, 77, 3), nn.Flatten(),
                          nn.Linear(77 * 49, 12))
    return model.to(memory_format=torch.channels_last)
for fused in (False, True):
    case = Case(lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=fused),
                model=lambda s: seeded(s, wide), clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1))
    loop, run = Loop(case), Path(sys.argv[1], str(fused))
    with replica_of(loop, run, cores=[0]) as replica:
        for number in range(5):
            loop.step(number)
            replica.step()
    again = Loop(case, seed=1)
    assert again.recover(run).step == 5
    check_same(again, loop)
"""
    status, output = processes.run(["-c", script, str(tmp_path / "run")], forked=True)
    assert status == 0, output[-4000:]
