"""Logs in one process: what they refuse, how they go on after a recovery, and what they do when they cannot log."""

from __future__ import annotations

import fcntl
import shutil
import time

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam

import dsq_ckpt.lowdiff
from dsq_ckpt.errors import CheckpointExists, ConfigError, LoadFailed, SaveFailed
from dsq_ckpt.lowdiff import recorder, replica_transfer, segments
from dsq_ckpt.lowdiff.locks import Lock, lock_path, wait_for_writers
from tests.lowdiff.loops import (
    ADAM,
    SCHEDULED,
    TOPK,
    Case,
    Loop,
    check_recovers,
    differences,
    normalized,
    perceptron,
    recorded,
    seeded,
)

pytestmark = pytest.mark.usefixtures("in_thread", "one_thread")


def files(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_training_is_what_it_was(tmp_path):
    """A log that compresses nothing changes nothing."""
    alone = Loop(SCHEDULED)
    table = [alone.state()]
    for number in range(5):
        alone.step(number)
        table.append(alone.state())
    logged = recorded(SCHEDULED, tmp_path, 5, compressor="none")
    assert differences(logged, table) == []


def test_recovering_an_empty_log_returns_none(tmp_path):
    loop = Loop(SCHEDULED)
    before = loop.state()
    assert loop.recover(tmp_path / "nowhere") is None
    (tmp_path / "log").mkdir()
    assert loop.recover(tmp_path) is None
    assert differences(loop.state(), before) == []


def test_time_spent_is_counted(tmp_path, monkeypatch):
    """Of the capture before the optimizer's step as well as of what comes after."""
    own, taken = recorder.ChangeDetector.describe_change, []

    def slow(watch):
        taken.append(0.05)
        time.sleep(taken[-1])
        return own(watch)

    monkeypatch.setattr(recorder.ChangeDetector, "describe_change", slow)
    loop = Loop(ADAM)
    with loop.log(tmp_path, compressor="none") as log:
        for number in range(3):
            before = log.spent, len(taken)
            loop.step(number)
            between = log.spent, len(taken)
            log.step()
            assert between[0] - before[0] >= sum(taken[before[1]:between[1]]) > 0
            assert log.spent - between[0] >= sum(taken[between[1]:]) > 0


def test_recovery_from_what_is_no_run(tmp_path):
    loop = Loop(SCHEDULED)
    before = loop.state()
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(LoadFailed, match=r"model\.pt' is a file; expected the directory of a run"):
        loop.recover(tmp_path / "model.pt")
    assert differences(loop.state(), before) == []


def test_recovery_while_another_process_writes(tmp_path, monkeypatch):
    # A replica in memory is not waited for any longer than is asked.
    monkeypatch.setattr(replica_transfer, "_ANSWER_TIMEOUT", 1e6)
    table = recorded(ADAM, tmp_path, 3)
    lock = Lock(lock_path(tmp_path, "another", 0))
    with (
        pytest.warns(UserWarning, match=r"waiting, for 0 s at most.*'another-00000\.lock'.*close\(\) that log"),
        pytest.raises(LoadFailed, match=r"still writes into '.*another-00000\.lock"),
    ):
        Loop(ADAM).recover(tmp_path, timeout=0.1)
    lock.release()
    check_recovers(ADAM, tmp_path, table[3], 3)


def test_a_lock_that_is_removed_while_it_is_taken(tmp_path, monkeypatch):
    """By who looked whether somebody held it; its owner takes another one, which is seen."""
    path, own, removed = lock_path(tmp_path, "session", 0), fcntl.flock, []
    path.parent.mkdir()

    def flock(descriptor, how):
        own(descriptor, how)
        if not removed:
            removed.append(path)
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = Lock(path)
    with pytest.raises(SaveFailed, match="still writes"):
        wait_for_writers(tmp_path, 0.1)
    lock.release()
    wait_for_writers(tmp_path, 0.1)
    assert removed and not path.exists()


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_batches(tmp_path, batch):
    """Steps wait for their batch, and all are on disk when the log is closed."""
    table = recorded(ADAM, tmp_path, 7, batch=batch, compressor="none")
    assert len(segments.list_segments(tmp_path)) == -(-7 // batch)
    assert check_recovers(ADAM, tmp_path, table[7], 7).closed


def test_snapshots_supersede_the_log(tmp_path):
    loop = Loop(ADAM)
    with loop.log(tmp_path, snapshot_every=4, compressor="none") as log:
        assert log.snapshot_every == 4 and log.bound == 4 + 1 + 1
        for number in range(30):
            loop.step(number)
            log.step()
            log._require_client().wait("saved", 240)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000000028"]
    assert [name.last for name, _ in segments.list_segments(tmp_path)] == [29, 30]
    assert check_recovers(ADAM, tmp_path, loop.state(), 30).replayed == 2


def test_two_snapshots_are_kept(tmp_path):
    loop, states = Loop(ADAM), {}
    with loop.log(tmp_path, snapshot_every=4, keep=2, compressor="none") as log:
        for number in range(14):
            loop.step(number)
            log.step()
            log._require_client().wait("saved", 240)
            states[number + 1] = loop.state()
    newest = tmp_path / "step-000000012"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000008", newest.name]
    assert [name.last for name, _ in segments.list_segments(tmp_path)] == [9, 10, 11, 12, 13, 14]
    data = next(newest.glob("*.dsq"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.warns(UserWarning, match="older snapshot is used.*step-000000008.*000000012"):
        recovered = check_recovers(ADAM, tmp_path, states[14], 14)
    assert recovered.snapshot == 8


@pytest.mark.parametrize("pattern", ["*.dsq", "*.index", "manifest.json"])
def test_unreadable_snapshots_are_refused(tmp_path, pattern):
    recorded(SCHEDULED, tmp_path, 3)
    damaged = next(tmp_path.glob(f"step-*/{pattern}"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    loop = Loop(SCHEDULED, seed=1)
    before, contents = loop.state(), files(tmp_path)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=rf"no snapshot of .* can be read.*{damaged.parent.name}"):
        loop.recover(tmp_path)
    assert differences(loop.state(), before) == []
    with pytest.raises(CheckpointExists):
        loop.log(tmp_path)
    assert differences(loop.state(), before) == [] and files(tmp_path) == contents


def test_a_damaged_step(tmp_path):
    """The replay ends before it, and says which file of which rank it was."""
    table = recorded(ADAM, tmp_path, 6, compressor="none")
    for how in ("data", "truncated", "gone"):
        run = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{how}"))
        path = next(path for name, path in segments.list_segments(run) if name.last == 4)
        content = bytearray(path.read_bytes())
        content[20] ^= 1
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(content if how == "data" else content[:-10])
        loop = Loop(ADAM, seed=1)
        recovered = loop.recover(run)
        assert recovered.step == 3 and not differences(loop.state(), table[3])
        assert recovered.ended.startswith("step 4 is missing" if how == "gone" else "step 4 cannot be read")
        assert how == "gone" or path.name in recovered.ended


def test_a_run_that_has_a_log(tmp_path):
    recorded(TOPK, tmp_path, 3)
    contents, loop = files(tmp_path), Loop(TOPK)
    with pytest.raises(CheckpointExists, match="pass what `recover` returned as resume="):
        loop.log(tmp_path)
    assert files(tmp_path) == contents
    loop.step(0)
    loop.step(1)  # no hook is left


def test_going_on(tmp_path):
    """Recover, go on, recover again; steps count on."""
    recorded(SCHEDULED, tmp_path, 3, compressor="none")
    for first, last in ((3, 5), (5, 9), (9, 10)):
        loop = Loop(SCHEDULED, seed=first)
        recovered = loop.recover(tmp_path)
        assert recovered.step == first and recovered.continues_exactly
        with loop.log(tmp_path, resume=recovered, compressor="none") as log:
            assert log.steps_done == first
            for number in range(first, last):
                loop.step(number)
                log.step()
            assert log.steps_done == last
    alone = Loop(SCHEDULED)
    for number in range(10):
        alone.step(number)
    check_recovers(SCHEDULED, tmp_path, alone.state(), 10)


@pytest.mark.parametrize("spec", ["topk:0.05", "kmeans:4", "topk:0.05,feedback=off"])
def test_going_on_from_a_snapshot(tmp_path, spec):
    """What error feedback holds back goes on too: the run is what it would have been."""
    table, loop = {}, Loop(TOPK)
    with loop.log(tmp_path, compressor=spec, snapshot_every=5) as log:
        for number in range(12):
            loop.step(number)
            log.step()
            log._require_client().wait("saved", 240)
            table[number + 1] = loop.state()
    again = Loop(TOPK, seed=3)
    recovered = again.recover(tmp_path, replay_log=False)
    assert (recovered.step, recovered.replayed) == (10, 0) and recovered.continues_exactly
    assert (recovered.residual is None) == ("off" in spec)
    with again.log(tmp_path, resume=recovered, compressor=spec) as log:
        for number in range(10, 12):
            again.step(number)
            log.step()
            assert differences(again.state(), table[number + 1]) == []


def test_going_on_after_a_replay_with_feedback(tmp_path):
    """What is held back is that of the snapshot without what was sent since; training goes on from an exact state."""
    table = recorded(TOPK, tmp_path, 6)
    loop = Loop(TOPK, seed=1)
    recovered = loop.recover(tmp_path)
    assert recovered.exact and not recovered.continues_exactly and not differences(loop.state(), table[6])
    with loop.log(tmp_path, resume=recovered) as log:
        loop.step(6)
        log.step()
        truth = loop.state()
    check_recovers(TOPK, tmp_path, truth, 7)


class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 21), nn.LayerNorm(21), nn.Tanh(), nn.Linear(21, 12))


@pytest.mark.parametrize(("case", "says"), [
    (Case(ADAM.optimizer, lambda seed: Wide()), r"'0\.weight' was logged with shape \(20, 12\), is \(21, 12\)"),
    (Case(ADAM.optimizer, lambda seed: nn.Sequential(nn.Linear(12, 20))), "'1.weight' was logged, and the optimizer"),
    (Case(ADAM.optimizer, lambda seed: perceptron(seed).double()), "logged with dtype float32, is float64"),
    (Case(lambda m: SGD(m.parameters(), 0.1)), "the optimizer is SGD, logged was Adam"),
    (Case(lambda m: Adam([{"params": [p]} for p in m.parameters()])), "logged with group 0, is 1"),
    (Case(lambda m: Adam(list(m.parameters())[::-1])), "another order"),
    (Case(lambda m: Adam(list(m.parameters())[1:])), "'0.weight' was logged, and the optimizer has no such"),
    (SCHEDULED, r"states \[\] were logged, \['scheduler'\] are to be recovered"),
])
def test_something_else_is_recovered(tmp_path, case, says):
    recorded(ADAM, tmp_path, 2)
    loop = Loop(case, seed=1)
    before = loop.state()
    with pytest.raises(LoadFailed, match=says) as error:
        loop.recover(tmp_path)
    assert "partial=True" in str(error.value)
    assert differences(loop.state(), before) == []


def test_partial_recovers_what_fits(tmp_path):
    """Another head: all other weights come back, the optimizer begins anew."""
    recorded(ADAM, tmp_path, 3)
    truth = Loop(ADAM)
    snapshot = truth.recover(tmp_path, replay_log=False)
    loop = Loop(Case(ADAM.optimizer, lambda seed: seeded(seed, lambda: nn.Sequential(
        nn.Linear(12, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 5)
    ))), seed=1)
    head = loop.model[3].weight.clone()
    recovered = loop.recover(tmp_path, partial=True)
    assert recovered.step == snapshot.step == 0 and not recovered.exact
    assert recovered.ended == "3 logged steps were not replayed: they need what was left out"
    assert any("3.weight" in problem for problem in recovered.left_out)
    assert torch.equal(loop.model[3].weight, head)
    assert torch.equal(loop.model[0].weight, truth.model[0].weight)
    assert not loop.optimizer.state


def test_lossy_snapshots(tmp_path):
    case = Case(ADAM.optimizer, lambda seed: seeded(seed, lambda: nn.Sequential(
        nn.Linear(12, 400), nn.Tanh(), nn.Linear(400, 12)
    )), log={"base": "dsq", "compressor": "none"})
    table = recorded(case, tmp_path, 3)
    loop = Loop(case, seed=1)
    recovered = loop.recover(tmp_path)
    assert recovered.lossy and not recovered.exact and not recovered.continues_exactly and recovered.step == 3
    assert differences(loop.state(), table[3])
    for name, tensor in table[3]["model"].items():
        assert (loop.model.state_dict()[name] - tensor).norm() < 0.1 * tensor.norm()


def test_refused(tmp_path):
    model = perceptron()
    adam = Adam(model.parameters())

    def refused(says, optimizer=adam, model=model, error=ConfigError, **options):
        with pytest.raises(error, match=says):
            dsq_ckpt.lowdiff.GradientLog(tmp_path / "run", model, optimizer, **options)
        assert not list(tmp_path.glob("run/step-*"))
        assert not optimizer._optimizer_step_pre_hooks

    refused("LBFGS cannot be logged: it calls the model several times", LBFGS(model.parameters()))
    refused("parameter 0 of the optimizer's group 1 is no parameter", Adam([
        {"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(2))]},
    ]))
    refused("'topl', expected topk", compressor="topl:0.1")
    for name in ("queue", "keep", "batch", "snapshot_every"):
        refused(f"{name} is 0", **{name: 0})
    mine = type("Mine", (), {"state_dict": lambda self: {"a": object()}, "load_state_dict": print})()
    refused("object", state={"mine": mine})
    refused(r"state=\{'scheduler': ...\} is 3; expected something with state_dict", state={"scheduler": 3})
    refused("base is 'exactly'; expected 'exact', 'dsq' or a configuration", base="exactly")
    refused("resume is True; expected what dsq_ckpt.lowdiff.recover", resume=True)
    refused("cores: there is no CPU 100000; this machine has 0 to", cores=[100_000])


def test_a_second_log(tmp_path):
    """Both would hook into the same steps; the first one is not disturbed."""
    loop = Loop(ADAM)
    with loop.log(tmp_path / "first", compressor="none") as log:
        for kind in (dsq_ckpt.lowdiff.GradientLog, dsq_ckpt.lowdiff.Replica):
            with pytest.raises(ConfigError, match=r"logged already, into '.*first'; close\(\) that first"):
                kind(tmp_path / "second", loop.model, loop.optimizer)
        loop.step(0)
        log.step()
        truth = loop.state()
    check_recovers(ADAM, tmp_path / "first", truth, 1)
    loop.log(tmp_path / "second", compressor="none").close()


def test_a_second_step(tmp_path):
    loop = Loop(ADAM)
    with loop.log(tmp_path, compressor="none") as log:
        loop.step(0)
        with pytest.raises(SaveFailed, match=r"ran twice since the last log.step\(\)"):
            loop.optimizer.step()
        log.step()
        with pytest.raises(ConfigError, match="closure"):
            loop.optimizer.step(lambda: torch.ones(()))
        loop.step(1)
        log.step()
        truth = loop.state()
    check_recovers(ADAM, tmp_path, truth, 2)


def test_iterations_without_a_step(tmp_path):
    """Buffers and schedulers move on in iterations in which the optimizer does nothing."""
    case = Case(ADAM.optimizer, lambda seed: seeded(seed, normalized), schedule=SCHEDULED.schedule)
    loop = Loop(case)
    with loop.log(tmp_path, compressor="none") as log:
        for number in range(6):
            if number % 3 == 1:
                loop.model(torch.randn(8, 12))
                loop.states["scheduler"].last_epoch += 7
            else:
                loop.step(number)
            log.step()
        truth = loop.state()
    check_recovers(case, tmp_path, truth, 6)


def test_after_the_end(tmp_path):
    """Training goes on without a log that is closed."""
    loop = Loop(TOPK)
    log = loop.log(tmp_path)
    loop.step(0)
    log.step()
    log.close()
    log.close()
    truth = loop.state()
    loop.step(1)
    assert not log.logging and not loop.optimizer._optimizer_step_pre_hooks
    check_recovers(TOPK, tmp_path, truth, 1)
