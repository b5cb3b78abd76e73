"""What happens to a log when things go wrong: its process dies or hangs, the disk is full, training ends somehow."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.optim import Adam

from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.lowdiff import segments, snapshots, worker_group
from dsq_ckpt.storage.container import ContainerWriter
from tests.helpers import forks, processes
from tests.helpers.new_process import begin_new_process
from tests.lowdiff.loops import Case, Loop, differences

WORKERS = Path(__file__).parent / "workers"
CASE = Case(lambda m: Adam(m.parameters(), 0.01), log={"compressor": "none"})
pytestmark = pytest.mark.usefixtures("one_thread")


def train(log, loop, condition, seconds=240.0, pause=0.0):
    """Train until something is true; the losses."""
    losses, deadline = [], time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        losses.append(loop.step(log.steps_done))
        log.step()
        time.sleep(pause)
    return losses


def all_taken(log, queue):
    """Wait until the process has taken all steps sent to it."""
    client, deadline = log._require_client(), time.monotonic() + 240
    while len(client._free) < queue:
        assert time.monotonic() < deadline
        client.poll(1)


def check(run, loop, steps):
    again = Loop(CASE, seed=1)
    recovered = again.recover(run)
    assert recovered.step == steps and recovered.ended is None
    assert differences(again.state(), loop.state()) == []


@pytest.mark.slow
def test_the_process_hangs_dies_and_finds_no_room(tmp_path):
    """One after the other; training goes on, and in the end everything is there."""
    resource = pytest.importorskip("resource")
    loop, losses = Loop(CASE), []
    with warnings.catch_warnings(record=True) as caught, loop.log(tmp_path, queue=3, batch=4) as log:
        warnings.simplefilter("always", UserWarning)

        def steps(count):
            last = log.steps_done + count
            losses.extend(train(log, loop, lambda: log.steps_done == last))

        steps(5)
        pid = log._require_client().pid
        all_taken(log, queue=3)
        os.kill(pid, signal.SIGSTOP)
        steps(2)
        goes_on = threading.Event()

        def go_on():
            goes_on.set()
            os.kill(pid, signal.SIGCONT)

        threading.Timer(0.6, go_on).start()
        steps(2)
        assert goes_on.is_set() and log._require_client().waited > 0, "no more than the queue holds"
        steps(5)
        assert log.logging and not caught

        for what in ("was killed by signal 9", "File too large"):
            log._require_client().wait("saved", 240)
            pid, first = log._require_client().pid, log.steps_done
            if "signal" in what:
                os.kill(pid, signal.SIGKILL)
            else:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            losses += train(log, loop, lambda: not log.logging, pause=0.01)
            assert log.steps_done - first < 200
            steps(3)
            losses += train(log, loop, lambda: log.logging, pause=0.02)
            assert log._require_client().pid != pid
            steps(3)
        assert [
            what in str(warning.message) for warning, what in zip(caught, ("signal 9", "too large"), strict=True)
        ] == [1, 1]
        assert all("Training goes on" in str(warning.message) for warning in caught)
    check(tmp_path, loop, log.steps_done)
    alone = Loop(CASE)
    assert losses == [alone.step(number) for number in range(len(losses))]
    assert not list(tmp_path.glob("**/*.lock"))


def test_the_process_hangs_for_ever(tmp_path):
    """Training waits for it for as long as `timeout` says, and goes on without."""
    loop = Loop(CASE)
    log = loop.log(tmp_path, queue=2)
    try:
        train(log, loop, lambda: log.steps_done == 5)
        all_taken(log, queue=2)
        hanging = log._require_client().pid
        os.kill(hanging, signal.SIGSTOP)
        log._require_client()._timeout = 1.5
        with pytest.warns(UserWarning, match=f"{hanging}\\) is there, but took no step for 2 s.*Training goes on"):
            train(log, loop, lambda: log.steps_done == 15)
        assert not log.logging
        os.kill(hanging, signal.SIGCONT)
        train(log, loop, lambda: log.logging, pause=0.02)
        train(log, loop, lambda: log.steps_done % 10 == 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(hanging, signal.SIGCONT)
        log.close()
    check(tmp_path, loop, log.steps_done)


class Disk:
    """A disk that is full for logs and snapshots while `full`."""

    def __init__(self, monkeypatch) -> None:
        self.full = False
        append = ContainerWriter._append

        def limited(writer, data):
            if self.full and writer._offset:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            append(writer, data)

        monkeypatch.setattr(ContainerWriter, "_append", limited)
        monkeypatch.setattr(worker_group, "_RESTART_DELAYS", (0.0, 0.05))


def temporary(run):
    return [path for path in run.rglob("*") if path.suffix == ".tmp"]


@pytest.mark.usefixtures("in_thread")
@pytest.mark.parametrize("what", ["a segment", "a snapshot"])
def test_disk_full(tmp_path, monkeypatch, what):
    """The log goes on with a snapshot as soon as there is room; until then what was logged before can be recovered."""
    disk, loop = Disk(monkeypatch), Loop(CASE)
    options = {"batch": 2} if what == "a segment" else {"batch": 8, "snapshot_every": 8}
    with loop.log(tmp_path, **options) as log, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        train(log, loop, lambda: log.steps_done == 6)
        time.sleep(0.1)
        disk.full = True
        train(log, loop, lambda: not log.logging)
        starts = log._starts
        train(log, loop, lambda: log._starts > starts + 2, pause=0.005)
        assert "No space left" in str(caught[0].message)
        assert len({str(warning.message) for warning in caught}) == len(caught) <= 3, "each is said once"
        disk.full = False
        train(log, loop, lambda: log.logging and not log._require_client().saving and log._failures == 0, pause=0.005)
        train(log, loop, lambda last=log.steps_done + 4: log.steps_done == last)
        assert log.logging
    check(tmp_path, loop, log.steps_done)
    assert not temporary(tmp_path)


@pytest.mark.usefixtures("in_thread")
def test_disk_full_when_the_log_is_closed(tmp_path, monkeypatch):
    disk, loop = Disk(monkeypatch), Loop(CASE)
    log = loop.log(tmp_path, batch=1000)
    train(log, loop, lambda: log.steps_done == 3)
    disk.full = True
    with pytest.warns(UserWarning, match="No space left"):
        log.close()
    recovered = Loop(CASE, seed=1).recover(tmp_path)
    assert recovered.step == 0


@pytest.mark.usefixtures("in_thread")
def test_clocks_are_behind(tmp_path, monkeypatch):
    """Each job goes on from the last step of the one before, whose snapshots leave first."""
    now, last = time.time(), 0
    for hours in range(3):
        begin_new_process()
        monkeypatch.setattr(time, "time", lambda earlier=now - 3600 * hours: earlier)
        loop = Loop(CASE, seed=hours)
        resume = loop.recover(tmp_path)
        assert last == (0 if resume is None else resume.step)
        with loop.log(tmp_path, resume=resume, keep=2) as log:
            train(log, loop, lambda done=last + 3: log.steps_done == done)
        last = log.steps_done
        check(tmp_path, loop, last)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000003", "step-000000006"]


@pytest.mark.parametrize("link", [False, True])
def test_the_directory_is_moved(tmp_path, monkeypatch, link):
    """Or a link to it leads elsewhere. The log says so once, and goes on when it is there again."""
    monkeypatch.setattr(worker_group, "_RESTART_DELAYS", (0.0, 0.05))
    run, there = tmp_path / "run", tmp_path / "there"
    if link:
        there.mkdir()
        run.symlink_to(there)
    loop = Loop(CASE)
    with loop.log(run) as log, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        train(log, loop, lambda: log.steps_done == 3)
        if link:
            run.unlink()
            run.symlink_to(tmp_path)
        else:
            run.rename(there)
        train(log, loop, lambda: log._starts > 3, pause=0.01)
        assert not log.logging and not (tmp_path / "log").exists()
        if link:
            run.unlink()
            run.symlink_to(there)
        else:
            there.rename(run)
        train(log, loop, lambda: log.logging, pause=0.01)
        train(log, loop, lambda last=log.steps_done + 2: log.steps_done == last)
    texts = [str(warning.message) for warning in caught]
    expected = "run/log' is not there any more: its run was moved or removed.* until it is there again"
    assert len([text for text in texts if re.search(expected, text)]) == 1 and len(texts) <= 2, texts
    check(run, loop, log.steps_done)


@pytest.mark.usefixtures("in_thread")
def test_nothing_is_removed_before_a_snapshot_is_complete(tmp_path, monkeypatch):
    """Whether it ends before, while or after the snapshot is saved, the state of the last step can be recovered."""
    moments: dict[str, Path] = {}

    def at(moment):
        copied = tmp_path / moment
        if moment not in moments:
            moments[moment] = copied
            while True:
                try:
                    shutil.copytree(tmp_path / "run", copied, ignore=shutil.ignore_patterns("*.lock"))
                    return
                except shutil.Error:  # a segment got its name meanwhile
                    rmtree(copied)

    save, retire, rmtree = snapshots.save_snapshot, snapshots.remove_old_snapshots, snapshots.shutil.rmtree

    def watched_save(*args):
        time.sleep(0.02)  # so that steps after it are on disk before it is
        at("before")
        result = save(*args)
        at("saved")
        return result

    def watched_rmtree(path):
        at("retiring")
        rmtree(path)
        at("segments")

    def watched_retire(*args):
        retire(*args)
        at("after")

    loop, table = Loop(CASE), {}
    with loop.log(tmp_path / "run", snapshot_every=5) as log:
        for name, double in (("save_snapshot", watched_save), ("remove_old_snapshots", watched_retire)):
            monkeypatch.setattr(snapshots, name, double)
        monkeypatch.setattr(snapshots.shutil, "rmtree", watched_rmtree)
        for number in range(9):
            loop.step(number)
            log.step()
            table[number + 1] = loop.state()
        log._require_client().wait("saved", 240)
    assert list(moments) == ["before", "saved", "retiring", "segments", "after"]
    for moment, run in moments.items():
        again = Loop(CASE, seed=1)
        recovered = again.recover(run)
        assert recovered.snapshot == (0 if moment == "before" else 5)
        assert recovered.step >= 5 and recovered.ended is None, moment
        assert differences(again.state(), table[recovered.step]) == [], moment


def test_another_session_is_left_alone(tmp_path):
    """A process that still saves does not remove what its successor has logged since."""
    (tmp_path / "log").mkdir()
    config = snapshots.snapshot_config("exact")
    one, two = "1" * 16, "2" * 16
    meta, tensors = {"session": one, "step": 100}, [snapshots.SnapshotTensor(("x",), torch.ones(2))]
    snapshots.save_snapshot(tmp_path, 100, tensors, meta, config, SingleProcess())
    for session, last in ((one, 99), (one, 101), (two, 106), ("0" * 16, 90)):
        (tmp_path / "log" / str(segments.SegmentName(session, last, last, 0))).touch()
    snapshots.remove_old_snapshots(tmp_path, 1)
    assert [(name.session, name.last) for name, _ in segments.list_segments(tmp_path)] == [(one, 101), (two, 106)]


@pytest.mark.slow
def test_however_training_ends(tmp_path):
    """All steps that were done are there, though 1000 were to be written at once and nothing closed the log."""
    ways = {"exits": 3, "raises": 1, "SIGINT": -2, "SIGTERM": -15, "dies": 4}
    arguments = [str(WORKERS / "ends.py"), str(tmp_path), *ways]
    status, output = processes.run(arguments, forked=True, **{forks.TEARDOWN: "1"})
    assert status == 0, output
    codes = dict(words for words in map(str.split, output.splitlines()) if words and words[0] in ways)
    assert {way: int(code) for way, code in codes.items()} == ways
    alone = Loop(CASE)
    for number in range(6):
        alone.step(number)
    for way in ways:
        check(tmp_path / way, alone, 6)
