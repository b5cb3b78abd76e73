"""A replica whose training process is gone: who may ask for it, what strangers can do, when it ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import signal
import socket
import struct
import threading
import time
import warnings

import pytest
from torch.optim import SGD, Adam

from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.lowdiff import replica_transfer, snapshots
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.replica_server import ReplicaServer
from tests.lowdiff.loops import Case, Loop
from tests.lowdiff.workers.replica import check_same, known_holders, replica_of, restored, until

pytestmark = pytest.mark.usefixtures("one_thread")
holders = pytest.fixture(known_holders)
CASE = Case(lambda m: Adam(m.parameters(), 0.01))


def train(loop, replica, steps, pause=0.0):
    for _ in range(steps):
        loop.step(replica.steps_done)
        replica.step()
        time.sleep(pause)


def survived(run, steps=5, **options):
    """A loop whose replica was left behind after so many steps."""
    loop = Loop(CASE)
    replica = replica_of(loop, run, **options)
    train(loop, replica, steps)
    replica._leave_process()
    until(lambda: listens(run))
    return loop


def listens(run, rank=0):
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(replica_transfer._address(run, rank)) == 0


def lock_files(run):
    """Names of lock files below `run`, by `os.walk`: unlike `Path.glob`, it bears that a directory is renamed."""
    return [name for _, _, names in os.walk(run) for name in names if name.endswith(".lock")]


def connected(run):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(replica_transfer._address(run, 0))
    return connection


def message(tree):
    data = json.dumps(tree).encode()
    return struct.pack("<II", len(data), 0) + data


NOISE = {
    "nothing": b"",
    "one byte": b"\x07",
    "noise": bytes(range(256)) * 9,
    "no JSON": struct.pack("<II", 5, 0) + b"{1: 2",
    "no UTF-8": struct.pack("<II", 2, 0) + b"\xff\xfe",
    "no message": message([1, 2]),
    "no kind": message({"step": 3}),
    "unknown": message({"kind": "persist", "step": 3}),
    "no step": message({"kind": "state"}),
    "a step that is none": message({"kind": "state", "step": "many"}),
    "a step that is to come": message({"kind": "state", "step": 10**9}),
    "memory that is missing": struct.pack("<II", 2, 1) + b"{}",
    "a pickle": struct.pack("<II", 30, 0) + b"cos\nsystem\n(S'exit 1'\ntR.     ",
    "deep": struct.pack("<II", 200_000, 0) + b"[" * 200_000,
    "half a message": struct.pack("<II", 1 << 29, 0) + b"{",
    "too much": struct.pack("<II", (1 << 31) - 1, 0),
}


def test_strangers(tmp_path, holders):
    """Whatever they send, and however long they stay, the replica is there for the next training process."""
    loop = survived(tmp_path)
    stay = []
    for sent in NOISE.values():
        with connected(tmp_path) as connection:
            connection.sendall(sent)
        stay.append(connected(tmp_path))
        stay[-1].sendall(sent)
        assert listens(tmp_path)
    again = Loop(CASE, seed=1)
    recovery = again.recover(tmp_path)
    assert (recovery.step, recovery.from_memory, recovery.exact) == (5, True, True)
    check_same(again, loop)
    until(lambda: not listens(tmp_path))
    for connection in stay:
        connection.close()


def test_a_stranger_in_its_place(tmp_path, holders):
    """A process of the same user that answers nonsense, or nothing: what is on disk is recovered."""
    loop = Loop(CASE)
    with replica_of(loop, tmp_path) as replica:
        train(loop, replica, 3)
    for answer in (b"", NOISE["noise"], NOISE["no kind"], message({"newest": 7, "session": "x", "ranks": 2})):
        listener = replica_transfer.listen(tmp_path, 0)
        assert replica_transfer.listen(tmp_path, 0) is None

        def serve(listener=listener, answer=answer):
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(answer)
            connection.close()
            listener.close()

        thread = threading.Thread(target=serve)
        thread.start()
        again = Loop(CASE, seed=1)
        recovery = again.recover(tmp_path)
        thread.join()
        assert (recovery.step, recovery.from_memory) == (3, False)
        check_same(again, loop)


@pytest.mark.parametrize("left_how", ["recovered", "memory=False", "another model", "a new log"])
def test_a_survivor_keeps_nobody_waiting(tmp_path, holders, left_how):
    """Its last state is on disk, and it ends as soon as somebody else is at the run."""
    loop = survived(tmp_path, persist_every=1000)
    again = Loop(CASE, seed=1)
    started = time.monotonic()
    if left_how == "another model":
        other = Loop(Case(lambda m: SGD(m.parameters(), 0.1)))
        with pytest.raises(LoadFailed):
            other.recover(tmp_path)
    elif left_how == "a new log":
        with pytest.raises(Exception, match="recover from"):
            again.log(tmp_path)
    recovery = again.recover(tmp_path, memory=left_how == "recovered")
    assert time.monotonic() - started < 60
    assert (recovery.step, recovery.from_memory, recovery.closed) == (5, left_how == "recovered", False)
    check_same(again, loop)
    until(lambda: not listens(tmp_path))
    with again.log(tmp_path, resume=recovery) as log:
        assert log.steps_done == 5


def test_linger(tmp_path):
    """The process ends by itself, and nothing of it is left; its last state is on disk."""
    loop = Loop(CASE)
    replica = replica_of(loop, tmp_path, linger=3.0, persist_every=1000)
    process = replica._require_client()._process
    train(loop, replica, 7)
    left = time.monotonic()
    replica._leave_process()
    until(lambda: listens(tmp_path))
    until(lambda: (tmp_path / "step-000000007" / "manifest.json").exists())
    assert process.wait(60) == 0
    assert time.monotonic() - left > 2.5
    assert not listens(tmp_path) and not lock_files(tmp_path) and not list(tmp_path.glob("**/*.tmp"))
    again = Loop(CASE, seed=1)
    recovery = again.recover(tmp_path)
    assert (recovery.step, recovery.from_memory) == (7, False)
    check_same(again, loop)


def test_the_run_went_on_elsewhere(tmp_path, holders):
    """A survivor of an earlier session has an old state; what is on disk is newer."""
    survived(tmp_path / "here", persist_every=1000)
    until(lambda: (tmp_path / "here" / "step-000000005" / "manifest.json").exists())
    until(lambda: not lock_files(tmp_path / "here"))
    elsewhere = tmp_path / "elsewhere"  # the same storage under another name
    elsewhere.symlink_to(tmp_path / "there")
    (tmp_path / "here").rename(tmp_path / "there")
    loop = Loop(CASE, seed=1)
    recovery = loop.recover(elsewhere)
    assert (recovery.step, recovery.from_memory) == (5, False)
    with replica_of(loop, elsewhere, resume=recovery) as replica:
        train(loop, replica, 4)
    (tmp_path / "there").rename(tmp_path / "here")
    assert listens(tmp_path / "here")
    again = Loop(CASE, seed=2)
    recovery = again.recover(tmp_path / "here")
    assert (recovery.step, recovery.from_memory) == (9, False)
    check_same(again, loop)
    until(lambda: not listens(tmp_path / "here"))


def test_with_an_exception(tmp_path):
    """The replica survives as if the process had died; the same process may go on from it."""
    loop = Loop(CASE)
    with pytest.raises(FloatingPointError), replica_of(loop, tmp_path, persist_every=1000) as replica:
        train(loop, replica, 4)
        process = replica._require_client()._process
        raise FloatingPointError("loss is NaN")
    until(lambda: listens(tmp_path))
    before = Loop(CASE)
    for number in range(4):
        before.step(number)
    loop.step(4)  # nothing is attached any more
    recovery = loop.recover(tmp_path)
    assert (recovery.step, recovery.from_memory) == (4, True)
    check_same(loop, before)
    with replica_of(loop, tmp_path, resume=recovery) as replica:
        assert process.wait(60) == 0
        train(loop, replica, 3)
    assert Loop(CASE, seed=1).recover(tmp_path).step == 7


# Persistence.


def test_persistence_waits_for_the_disk_and_training_does_not(tmp_path, holders, monkeypatch):
    """While one state is being saved, training does 40 steps and the replica too; the next that is saved is the newest
    then, and there are fewer saves than steps.
    """
    save, saving, go_on, saved_steps = snapshots.save_snapshot, threading.Event(), threading.Event(), []

    def slow(run, step, *rest):
        if step:
            saving.set()
            assert go_on.wait(60)
            go_on.clear()
        saved_steps.append(step)
        return save(run, step, *rest)

    monkeypatch.setattr(snapshots, "save_snapshot", slow)
    loop = Loop(CASE)
    with replica_of(loop, tmp_path, queue=2) as replica:
        for _ in range(3):
            while not saving.wait(0.05):
                train(loop, replica, 1)
            saving.clear()
            first = replica.steps_done
            train(loop, replica, 40)
            until(lambda: holders[-1].applied == replica.steps_done)
            assert replica._require_client().saving and saved_steps[-1] < first
            go_on.set()
            replica._require_client().wait("saved", 60)
        monkeypatch.setattr(snapshots, "save_snapshot", save)
    assert len(saved_steps) == 4 and all(after - before > 40 for before, after in itertools.pairwise(saved_steps[1:]))
    again = Loop(CASE, seed=1)
    assert again.recover(tmp_path).step == replica.steps_done
    check_same(again, loop)


@pytest.mark.slow
def test_saving_that_slows_training_down_is_done_less_often(tmp_path, holders, monkeypatch):
    """CheckFreq's rule: where training waited while a state was saved, the next saves are further apart; where it no
    longer does, they are nearer again.
    """
    save, apply, saved_steps, busy = snapshots.save_snapshot, ReplicaServer._apply_step, [], threading.Event()
    slows = True

    def noted(run, step, *rest):
        saved_steps.append(step)
        busy.set()
        time.sleep(0.1)
        busy.clear()
        return save(run, step, *rest)

    def delayed(server, told):
        if busy.is_set() and slows:
            time.sleep(0.02)
        apply(server, told)

    monkeypatch.setattr(snapshots, "save_snapshot", noted)
    monkeypatch.setattr(ReplicaServer, "_apply_step", delayed)
    loop = Loop(CASE)
    with replica_of(loop, tmp_path, queue=2, persist_every=2) as replica:
        while replica._save_interval < 16:
            assert replica.steps_done < 5000
            train(loop, replica, 1, pause=0.005)
        first, slows = len(saved_steps), False
        while replica._save_interval > 2:
            assert replica.steps_done < 10000
            train(loop, replica, 1, pause=0.02)  # in the time of a save fewer steps than between saves
        assert replica.logging
    gaps = [after - before for before, after in itertools.pairwise(saved_steps)]
    assert min(gaps[:-1]) >= 2 and max(gaps) >= 8, gaps
    assert first < len(saved_steps)


def test_no_room_on_disk(tmp_path):
    """One warning, once; training and the replica go on, and it is saved again when there is room."""
    loop = Loop(CASE)
    with warnings.catch_warnings(record=True) as caught, replica_of(loop, tmp_path) as replica:
        warnings.simplefilter("always", UserWarning)
        train(loop, replica, 3)
        replica._require_client().wait("saved", 60)
        pid = replica._require_client().pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        newest = snapshots.list_snapshots(tmp_path)[0][0]
        tries, deadline = {replica._requested_step}, time.monotonic() + 60
        while len(tries) < 5:
            assert time.monotonic() < deadline
            train(loop, replica, 1, pause=0.01)
            tries.add(replica._requested_step)
        assert replica.logging and replica._require_client().pid == pid
        assert snapshots.list_snapshots(tmp_path)[0][0] >= newest
        train(loop, replica, 2)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == 1 and os.strerror(errno.EFBIG) in texts[0] and "Training goes on" in texts[0], texts

        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        room = replica.steps_done
        deadline = time.monotonic() + 60
        while int(snapshots.list_snapshots(tmp_path)[0][0].name[5:]) <= room:
            assert time.monotonic() < deadline
            train(loop, replica, 1, pause=0.01)
        assert len(caught) == 1
        replica._leave_process()
        steps = replica.steps_done
    until(lambda: listens(tmp_path))
    again = Loop(CASE, seed=1)
    recovery = again.recover(tmp_path)
    assert (recovery.step, recovery.from_memory) == (steps, True)
    check_same(again, loop)


def test_no_room_on_disk_when_training_is_done(tmp_path):
    """It is said, and the state before is there."""
    loop = Loop(CASE)
    replica = replica_of(loop, tmp_path, persist_every=1000)
    train(loop, replica, 3)
    resource.prlimit(replica._require_client().pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    with pytest.warns(UserWarning, match=os.strerror(errno.EFBIG)):
        replica.close()
    recovery = Loop(CASE, seed=1).recover(tmp_path)
    assert (recovery.step, recovery.closed) == (0, False)


def test_the_process_is_killed(tmp_path):
    """One warning; it is started again, and the replica is right afterwards."""
    loop = Loop(CASE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        replica = replica_of(loop, tmp_path)
        train(loop, replica, 3)
        pid, deadline = replica._require_client().pid, time.monotonic() + 60
        os.kill(pid, signal.SIGKILL)
        while not replica.logging or replica._require_client().pid == pid or replica._require_client().saving:
            assert time.monotonic() < deadline
            train(loop, replica, 1, pause=0.02)
        train(loop, replica, 3)
        assert [
            ("signal 9" in str(warning.message), "Training goes on" in str(warning.message)) for warning in caught
        ] == [
            (True, True)
        ]
    replica._leave_process()
    until(lambda: listens(tmp_path))
    again = Loop(CASE, seed=1)
    recovery = again.recover(tmp_path)
    assert (recovery.step, recovery.from_memory) == (replica.steps_done, True)
    check_same(again, loop)
    alone = Loop(CASE)
    for number in range(replica.steps_done):
        alone.step(number)
    check_same(alone, loop)


def test_a_replica_may_be_asked_twice(tmp_path, holders):
    """A step that it has not reached, and one that it left behind: not given; and no harm is done."""
    loop = survived(tmp_path)
    holder = holders[-1]
    assert holder.shard_after(4) is None and holder.shard_after(6) is None
    check_same(restored(CASE, tmp_path, holder), loop)
    assert Loop(CASE, seed=1).recover(tmp_path).from_memory


def test_no_memory_to_share(tmp_path, holders, monkeypatch):
    """The state cannot be given from memory then; it is on disk all the same."""
    loop = Loop(CASE)
    replica = replica_of(loop, tmp_path)
    train(loop, replica, 5)

    def none(size):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(Arena, "create", none)
    replica._leave_process()
    until(lambda: listens(tmp_path))
    again = Loop(CASE, seed=1)
    recovery = again.recover(tmp_path)
    assert (recovery.step, recovery.from_memory) == (5, False)
    check_same(again, loop)
