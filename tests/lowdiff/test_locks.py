"""Locks of a run, and jobs that log into the same directory: one of them does, and the others say why they do not."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from dsq_ckpt.errors import CheckpointExists, LoadFailed, SaveFailed
from dsq_ckpt.lowdiff import locks, worker_group
from tests.helpers import forks, processes
from tests.lowdiff.loops import ADAM, Loop, check_recovers, differences, recorded
from tests.lowdiff.workers.begins import STEPS

WORKER = Path(__file__).parent / "workers" / "begins.py"
pytestmark = pytest.mark.usefixtures("one_thread")


def files(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", ["_assign_parameters", "_send_snapshot"])
def test_two_jobs_begin_at_once(tmp_path, monkeypatch, method):
    """Before either has a snapshot, whether or not the first has its checkpointing process: the second is refused."""
    run, told, loop, waited = tmp_path / "run", tmp_path / "told", Loop(ADAM), []
    os.mkfifo(told)
    said, output = os.pipe()
    first = forks.start([str(WORKER), str(run), method, str(told)], processes.make_environment({}), tmp_path, output)
    os.close(output)

    def second_waits():
        if not waited:
            waited.append(told.write_bytes(b"go on"))

    monkeypatch.setattr(locks, "run_pending_handlers", second_waits)
    try:
        with open(said) as lines:
            assert lines.readline() == "there\n"
            with pytest.raises(CheckpointExists, match="pass what `recover` returned as resume="):
                loop.log(run, compressor="none")
            assert waited and first.wait(processes.PATIENCE) == 0, lines.read()
    finally:
        processes.kill(first)
    truth = Loop(ADAM)
    for number in range(STEPS):
        truth.step(number)
    assert check_recovers(ADAM, run, truth.state(), STEPS).closed
    assert not (run / "log" / "starting").exists()
    loop.step(0)  # no hook is left


@pytest.mark.usefixtures("in_thread")
def test_another_job_went_on_since_recovery(tmp_path):
    table = recorded(ADAM, tmp_path, 2)
    late, other = Loop(ADAM), Loop(ADAM)
    resume = late.recover(tmp_path)
    with other.log(tmp_path, resume=other.recover(tmp_path)) as log:
        other.step(2)
        log.step()
    contents = files(tmp_path)
    with pytest.raises(CheckpointExists, match=r"does not go on, the newest 'step-000000002': recover from them"):
        late.log(tmp_path, resume=resume)
    assert files(tmp_path) == contents and differences(late.state(), table[2]) == []
    check_recovers(ADAM, tmp_path, other.state(), 3)


def test_another_job_goes_on_while_a_process_is_gone(tmp_path, monkeypatch):
    """The log that restarts says so, and leaves the other one alone."""
    monkeypatch.setattr(worker_group, "_RESTART_DELAYS", (0.0, 0.05))
    loop, other = Loop(ADAM), Loop(ADAM)
    log = loop.log(tmp_path, compressor="none")
    process = log._require_client()._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait(processes.PATIENCE)
    with other.log(tmp_path, compressor="none", resume=other.recover(tmp_path)) as others:
        other.step(0)
        others.step()
    contents, deadline = files(tmp_path), time.monotonic() + 240
    with pytest.warns(UserWarning, match="has snapshots from which this log does not go on"):
        while not any("does not go on" in text for text in log._warned):
            assert time.monotonic() < deadline
            loop.step(log.steps_done)
            log.step()
    with pytest.warns(UserWarning, match="in the log, which has ended"):
        log.close()
    check_recovers(ADAM, tmp_path, other.state(), 1)
    assert files(tmp_path).items() >= contents.items()


def test_a_wait_for_a_job_that_begins(tmp_path):
    (tmp_path / "log").mkdir()
    with (
        locks.exclusive_start(tmp_path, 1.0),
        pytest.warns(UserWarning, match=r"waiting, for 0 s at most.*'starting'"),
        pytest.raises(SaveFailed, match=r"still writes into .*'starting'"),
        locks.exclusive_start(tmp_path, 0.1),
    ):
        pass
    with locks.exclusive_start(tmp_path, 0.0):
        pass


def test_recovery_waits_once(tmp_path, monkeypatch):
    """For a process that may hold a replica, and not again, once the time is over, for what it still writes."""
    loop, pauses = Loop(ADAM), []
    recorded(ADAM, tmp_path, 1)
    lock = locks.Lock(locks.lock_path(tmp_path, "another", 0))
    monkeypatch.setattr(locks, "run_pending_handlers", lambda: pauses.append(1))
    with pytest.warns(UserWarning, match="waiting"), pytest.raises(LoadFailed, match="still writes into"):
        loop.recover(tmp_path, timeout=0.1)
    lock.release()
    assert not pauses


def link_copy(run, copy):
    """Copy a run by hard links, as `cp -al` does."""
    shutil.copytree(run, copy, copy_function=os.link)


def test_a_copy_by_hard_links_of_a_log_in_use(tmp_path):
    """A copy holds all up to when it was made, and no process writes into it."""
    run, copy, loop = tmp_path / "run", tmp_path / "copy", Loop(ADAM)
    with loop.log(run, compressor="none") as log:
        link_copy(run, copy)
        assert list(copy.glob("log/*.lock"))
        locks.wait_for_writers(copy, 0.0)
        with pytest.raises(SaveFailed, match="still writes into"):
            locks.wait_for_writers(run, 0.0)
        check_recovers(ADAM, copy, loop.state(), 0)
        loop.step(0)
        log.step()
    check_recovers(ADAM, run, loop.state(), 1)


@pytest.mark.parametrize("change", ["rename", "follow a link", "of an earlier version"])
def test_where_the_holder_of_a_linked_lock_writes(tmp_path, change):
    """To its path, whatever directory that leads to by now; if it is not known, the message says what to do."""
    run, copy, link = tmp_path / "run", tmp_path / "copy", tmp_path / "link"
    (run / "log").mkdir(parents=True)
    link.symlink_to(run)
    lock = locks.Lock(locks.lock_path(link if change == "follow a link" else run, "some", 0))
    used, other = run, copy
    if change == "rename":  # and a copy takes its place
        run.rename(copy)
        link_copy(copy, run)
    elif change == "follow a link":
        link_copy(run, copy)
        link.unlink()
        link.symlink_to(copy)
        used, other = copy, run
    else:
        link_copy(run, copy)
        os.truncate(locks.lock_path(run, "some", 0), 0)
    with pytest.raises(SaveFailed, match=r"several hard links: if '.*' is a copy by `cp -al`"):
        locks.wait_for_writers(used, 0.0)
    if change == "of an earlier version":
        with pytest.raises(SaveFailed, match="several hard links"):
            locks.wait_for_writers(other, 0.0)
    else:
        locks.wait_for_writers(other, 0.0)
    lock.release()
    locks.wait_for_writers(used, 0.0)
    locks.wait_for_writers(other, 0.0)
    assert not list(tmp_path.glob("*/log/*.lock"))
