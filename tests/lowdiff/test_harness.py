"""The systems that LowDiff is compared with do what they claim, in real processes that are really killed."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from evaluate_lowdiff import app
from evaluation.lowdiff import idle, wasted
from evaluation.lowdiff import targets as aims
from evaluation.lowdiff.base import Without, live_tensors
from evaluation.lowdiff.checkfreq import BOUND, Profile, Tuner, interval
from evaluation.lowdiff.gemini import copies
from evaluation.lowdiff.loop import Loop, Setting, Training
from evaluation.lowdiff.naive import NaiveDifferences
from evaluation.lowdiff.process import Cores, Job, Worker
from evaluation.lowdiff.systems import COMPARED
from evaluation.simulation import Failures
from torch import nn
from typer.testing import CliRunner

from tests.lowdiff.workers import harness

TINY = Setting("gpt-tiny")
STEPS = 30
EXACT = [name for name in COMPARED if name != "naive"]


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The server of the processes below, which the first of them starts, has its imports already."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(harness.util, "spawnv_passfds", harness.start)
        yield


@pytest.fixture(scope="module")
def course(_server: None) -> list[str]:
    """Checksums of the state after each step of the run without checkpoints."""
    return follow(TINY, 3 * STEPS)


def follow(setting: Setting, steps: int) -> list[str]:
    """Checksums of the state after each of so many steps without checkpoints."""
    with Worker(Job(setting, "none", Path())) as worker:
        worker.call("prepare")
        return worker.call("digests", steps)


def digest_after(step: int, course: list[str], setting: Setting) -> str:
    """Checksum of the state after a step, also past the end of the course: a process may be killed late."""
    return course[step] if step < len(course) else follow(setting, step)[step]


@pytest.mark.parametrize("system", EXACT)
def test_systems_recover_the_state_they_say(system: str, tmp_path: Path, course: list[str]) -> None:
    """Finished, and killed at a random moment of a later step; training then goes on as if nothing had been."""
    job = Job(TINY, system, tmp_path / "run", Cores.available())
    with Worker(job) as worker:
        assert worker.call("recover")[0] == 0
        worker.call("prepare")
        worker.call("train", STEPS)
        assert worker.call("digest") == course[STEPS]  # checkpointing does not change training
        sizes = worker.call("finish")
    assert sizes["written"] >= sizes["state"] or system == "gemini"
    with Worker(job) as worker:
        assert worker.call("recover", True)[0] == STEPS
        assert worker.call("digest") == course[STEPS]
        worker.call("prepare")
        worker.tell("train", 100 * STEPS)
        worker.wait_for(STEPS + 10)
        time.sleep(random.random() * 0.02)
        worker.kill()
    with Worker(job) as worker:
        step, _ = worker.call("recover")
        assert step >= STEPS + 8
        if step < len(course):
            assert worker.call("digest") == course[step]
        worker.call("prepare")
        worker.call("train", 3)
        worker.call("finish")


@pytest.mark.slow
@pytest.mark.parametrize(("system", "compressor"), [("lowdiff", "topk:0.1,feedback=off"), ("lowdiff+", "none")])
def test_ours_recover_through_the_same_loop(system: str, compressor: str, tmp_path: Path) -> None:
    """Killed in the middle of training, which then goes on; error feedback would begin anew after a replay."""
    setting = Setting("gpt-tiny", compressor=compressor)
    course = follow(setting, 40)
    job = Job(setting, system, tmp_path / "run", Cores.available())
    with Worker(job) as worker:
        assert worker.call("recover")[0] == 0
        worker.call("prepare")
        worker.tell("train", 1000)
        worker.wait_for(10)
        worker.kill()
        reached = worker.done
    with Worker(job) as worker:
        step, _ = worker.call("recover")
        assert reached - 1 <= step <= reached + 1
        assert worker.call("digest") == digest_after(step, course, setting)
        worker.call("prepare")
        worker.call("train", 5)
        assert worker.call("digest") == digest_after(step + 5, course, setting)
        assert worker.call("finish")["stored"] > 0


def test_naive_differences_add_up_to_what_they_state(tmp_path: Path) -> None:
    """Of the weights the base and the kept differences, bit for bit; of the moments everything but rounding."""
    ratio, steps = 0.1, 6
    model, optimizer = small_model(0)
    system = NaiveDifferences(tmp_path, ratio=ratio, full_every=100)
    system.prepare(model, optimizer)
    states = [copied(model, optimizer)]
    for step in range(1, steps + 1):
        train(model, optimizer)
        system.after_step(step)
        states.append(copied(model, optimizer))
    system.finish()
    other, other_optimizer = small_model(1)
    assert NaiveDifferences(tmp_path, ratio=ratio).recover(other, other_optimizer) == steps
    for name, tensor in live_tensors(other, other_optimizer).items():
        if not name.startswith("model."):
            torch.testing.assert_close(tensor, states[-1][name], rtol=1e-5, atol=1e-7)
            continue
        expected, lost = states[0][name].clone(), 0.0
        for before, after in pairwise(states):
            difference = (after[name] - before[name]).view(-1)
            indices = difference.abs().topk(math.ceil(ratio * difference.numel())).indices
            expected.view(-1)[indices] += difference[indices]
            difference[indices] = 0
            lost += difference.abs().max().item()
        assert torch.equal(tensor, expected)
        assert (tensor - states[-1][name]).abs().max().item() <= lost * (1 + 1e-5)


def test_naive_differences_survive_a_kill(tmp_path: Path) -> None:
    """Full checkpoints and differences are complete or absent; recovery never goes past a gap."""
    job = Job(TINY, "naive", tmp_path / "run", options={"full_every": 7})
    with Worker(job) as worker:
        worker.call("prepare")
        worker.tell("train", 1000)
        worker.wait_for(25)
        worker.kill()
        reached = worker.done
    with Worker(job) as worker:
        step, _ = worker.call("recover")
    assert reached - 2 <= step <= reached + 1
    differences = tmp_path / "run" / "differences"
    (differences / f"{step:09d}.raw").unlink(missing_ok=True)
    (tmp_path / "run" / f"{step:09d}.raw").unlink(missing_ok=True)
    with Worker(job) as worker:
        assert worker.call("recover")[0] == step - 1 or step % 7 == 0


def test_peer_holds_a_complete_copy_whenever_training_is_killed(tmp_path: Path, course: list[str]) -> None:
    """The link is so slow that nearly all of the time a copy is on its way: the one before it is used."""
    job = Job(TINY, "gemini", tmp_path / "run", options={"link": 20e6})
    seen = set()
    for turn in range(6):  # now and then a kill comes between two copies
        if turn >= 3 and -1 in seen:
            break
        with Worker(job) as worker:
            start, _ = worker.call("recover")
            worker.call("prepare")
            worker.tell("train", 1000)
            worker.wait_for(start + 3)
            time.sleep(random.random() * 0.05)
            worker.kill()
        held = copies(job.directory)
        seen |= set(held)
        with Worker(job) as worker:
            step, _ = worker.call("recover")
            assert step == max(held) > start
            assert worker.call("digest") == digest_after(step, course, TINY)
    assert -1 in seen, "no copy was ever cut short, so nothing was tested"
    with Worker(job) as worker:
        worker.call("recover")
        worker.call("prepare")
        worker.call("finish")
    with Worker(job) as worker:  # the peer is gone, and has left its copy on disk
        assert worker.call("recover")[0] == step


PROFILES = [
    Profile(iteration=0.1, update=0.01, snapshot=0.02, persist=0.05),
    Profile(iteration=0.1, update=0.01, snapshot=0.15, persist=0.05),
    Profile(iteration=0.1, update=0.02, snapshot=0.3, persist=0.9),
    Profile(iteration=0.02, update=0.002, snapshot=0.5, persist=5.0),
]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("bound", [0.035, 0.01])
def test_checkfreq_keeps_its_bound_with_no_longer_an_interval_than_needed(profile: Profile, bound: float) -> None:
    every = interval(profile, bound)
    assert overhead(profile, every) <= bound * (1 + 1e-9)
    if every > 1:
        busy = (profile.snapshot + profile.persist) / profile.iteration > every - 1
        assert busy or overhead(profile, every - 1) > bound


def test_checkfreq_lengthens_its_interval_where_iterations_take_longer_than_profiled() -> None:
    """Something else slows the snapshots down threefold: the bound holds again after a while, and then stays."""
    profile = PROFILES[1]
    slowed = Profile(profile.iteration, profile.update, 3 * profile.snapshot, 3 * profile.persist)
    tuner = Tuner(interval(profile), profile.iteration)
    begun = tuner.every
    for _ in range(20_000):
        tuner.observe(profile.iteration * (1 + overhead(slowed, tuner.every)))
    settled = tuner.every
    assert settled > begun and overhead(slowed, settled) <= BOUND < overhead(slowed, settled - 4)
    for _ in range(1000):
        tuner.observe(profile.iteration * (1 + overhead(slowed, tuner.every)))
    assert tuner.every == settled


def test_checkfreq_profiles_a_real_training(tmp_path: Path) -> None:
    with Worker(Job(TINY, "checkfreq", tmp_path / "run", options={"every": None})) as worker:
        worker.call("prepare")
        assert worker.call("about")["every"] is None
        worker.call("train", 60)
        assert worker.call("about")["every"] >= 1
        worker.call("finish")
    assert list((tmp_path / "run").iterdir())


def overhead(profile: Profile, every: int) -> float:
    """Of a job with this profile: the stall of a snapshot, and the wait for a write that is not done in time."""
    late = max(0.0, profile.snapshot + profile.persist - every * profile.iteration)
    return (profile.stall + late) / (every * profile.iteration)


def small_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def copied(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in live_tensors(model, optimizer).items()}


def constants_of(overhead: float) -> list[dict[str, Any]]:
    """Constants of jobs whose checkpoints all cost the same, but for LowDiff's."""
    common = {
        "iteration": 0.1, "overhead": 0.02, "stalled": 0.0, "stall": 0.02, "lag": 0.05, "load": 0.1, "replay": 0.0,
    }
    tuner = {
        "iteration": 0.1, "bandwidth": 1e9, "snapshot_bytes": 1e8, "load": 0.1, "replay": 0.01, "mtbf": 1.0,
        "stall": 0.01, "batch_fixed": 0.005, "batch_step": 0.002,
    }
    return [
        {"name": "torch.save", **common}, {"name": "checkfreq", **common, "policy": {"every": 6, "overhead": 0.003}},
        {"name": "naive", **common, "replay": 0.005}, {"name": "gemini", **common, "disk_load": 0.2},
        {"name": "lowdiff", **common, "overhead": overhead, "replay": 0.01, "tuner": tuner},
        {"name": "lowdiff+", **common, "disk_load": 0.2, "persist": 0.2},
    ]


@pytest.mark.parametrize(("overhead", "met"), [(1e-6, True), (0.05, False)])
def test_wasted_time_of_cheap_and_dear_logs(overhead: float, met: bool) -> None:
    """All failures are the same for all systems, and what is wasted has its parts."""
    cases = [Failures(hours * wasted.HOUR) for hours in (0.05, 0.5)]
    rows = wasted.compare(constants_of(overhead), cases, 500, 0.0)
    assert len(rows) == 2 * 10
    for row in rows:
        assert row["lost"] + row["recovering"] + row["steady"] == pytest.approx(row["wasted"])
    targets = aims.targets(aims.WASTED, rows)
    assert [target.met for target in targets if target.text.startswith("LowDiff at")] == 4 * [met]
    rarely = {row["name"]: row["wasted"] for row in rows if row["mtbf"] == 0.5 * wasted.HOUR}
    assert rarely["torch.save, best interval"] < rarely["torch.save"]
    assert rarely["LowDiff+ (S)"] < rarely["LowDiff+ (P)"]


def test_overheads_of_other_runs() -> None:
    """All blocks of a system count, each against its process's own ratio; but a stall is no less than it is."""
    rows = [{"name": name, "iteration": 2.0, "overhead": 9.0, "stalled": 0.1} for name in ("a", "b", "c")]
    times = [
        {"name": "a", "before": 0.1, "blocks": [[1.0, 1.1], [1.0, 1.32]]},
        {"name": "a", "before": 0.0, "blocks": [[1.0, 1.4]]},
        {"name": "b", "before": 0.0, "blocks": [[1.0, 0.9]]},
    ]
    new_rows = wasted.with_overheads(rows, times)
    assert [row["overhead"] for row in new_rows] == pytest.approx([2.0 * 0.2, 0.1, 9.0])


@pytest.mark.slow
def test_an_experiment_from_its_command_to_its_plot(tmp_path: Path) -> None:
    file = tmp_path / "time.json"
    arguments = ["time", "--workload", "gpt-tiny", "--systems", "none,torch.save", "--compressor", "none"]
    sizes = ["--rounds", "2", "--steps", "3", "--lead", "1"]
    result = CliRunner().invoke(app, [*arguments, *sizes, "--directory", str(tmp_path), "--json", str(file)])
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert document["measured"] == aims.TIME and document["settings"]["steps"] == 3
    assert [row["name"] for row in document["rows"]] == ["none", "torch.save"]
    assert document["rows"][1]["bytes_per_step"] > 490_000 and len(document["rows"][1]["blocks"]) == 2
    assert CliRunner().invoke(app, ["report", str(file)]).exit_code == 0
    assert file.with_suffix(".png").stat().st_size > 0
    assert sorted(tmp_path.iterdir()) == [file, file.with_suffix(".png")]


def test_stalls_are_what_a_system_says_it_took() -> None:
    """Hooks around a system's own miss what it does after them."""
    class Told(Without):
        spent = 0.0

        def after_step(self, step: int) -> None:
            self.spent += step

    class Counted:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        done = 0

        def step(self) -> None:
            self.done += 1

    loop = Loop(cast(Training, Counted()))
    loop.begin(Told())
    assert loop.run(3, lead=1).stalls == [2.0, 3.0, 4.0]


@pytest.mark.slow
def test_contention_is_of_the_work_of_a_log(tmp_path: Path) -> None:
    """Both kinds of work are done while training trains, and each block with them has its neighbours without."""
    file = tmp_path / "contention.json"
    sizes = ["--workload", "gpt-tiny", "--rounds", "2", "--steps", "5", "--lead", "1", "--logged", "3"]
    result = CliRunner().invoke(app, ["contention", *sizes, "--directory", str(tmp_path), "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["logged steps", "snapshots"]
    for row in rows:
        assert row["done"] >= 2 and row["work"] > 0
        assert row["contention"] == pytest.approx(sum(slowed / alone - 1 for alone, slowed in row["blocks"]) / 2)
    assert sorted(tmp_path.iterdir()) == [file]


def test_child_processes_are_found():
    """As those are whose work is waited for, in place of which the tests above have forks."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in idle.children()
        child.communicate(b"\n")
    assert child.pid not in idle.children()
