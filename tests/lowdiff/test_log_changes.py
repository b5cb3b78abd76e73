"""Parameters and buffers that are added, removed, moved or replaced while a log runs: the log says so, goes on with a
snapshot of what there is then, and at its end says which steps are not in it.
"""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils._python_dispatch import TorchDispatchMode

from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.lowdiff import worker_group
from dsq_ckpt.lowdiff.server import Server
from dsq_ckpt.lowdiff.train_state import TrainState
from dsq_ckpt.lowdiff.worker_group import StepsOnDisk
from tests.lowdiff.loops import ADAM, Case, Loop, check_recovers, differences, perceptron

pytestmark = pytest.mark.usefixtures("in_thread", "one_thread")
FIRST = Case(lambda m: Adam(m[0].parameters(), 0.01), log={"compressor": "topk:0.2"})
SGD_OF_TWO = Case(lambda m: SGD([{"params": m[0].parameters()}, {"params": [m[1].weight]}], 0.1))


def train(log, loop, steps):
    for _ in range(steps):
        loop.step(log.steps_done)
        log.step()
        log._require_client().wait("saved", 240)


def add(optimizer, model, number):
    optimizer.add_param_group({"params": list(model[number].parameters()), "lr": 0.02 * number})


@pytest.mark.parametrize("batch", [1, 100])
def test_parameters_are_added_again_and_again(tmp_path, batch):
    """As for gradual unfreezing: each time a warning tells from which step on steps are missing, and one step is; the
    process goes on, and what comes back is exact.
    """
    loop = Loop(FIRST)
    with loop.log(tmp_path, batch=batch) as log:
        train(log, loop, 3)
        process = log._require_client()
        for layer, step in ((1, 4), (3, 8)):
            add(loop.optimizer, loop.model, layer)
            names = rf"added, removed or moved \('{layer}.weight', '{layer}.bias'\)"
            with pytest.warns(UserWarning, match=f"{names}.*; steps from {step} on are not logged until"):
                train(log, loop, 1)
            assert not log.logging
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                train(log, loop, 3)
            assert log.logging
        assert log._require_client() is process and log._starts == 1

    def all_of_them(model):
        optimizer = FIRST.optimizer(model)
        add(optimizer, model, 1)
        add(optimizer, model, 3)
        return optimizer

    assert check_recovers(Case(all_of_them), tmp_path, loop.state(), 11).snapshot == 9


def test_a_parameter_moves_to_another_group(tmp_path):
    loop = Loop(SGD_OF_TWO)
    with loop.log(tmp_path, compressor="none") as log:
        train(log, loop, 2)
        groups = loop.optimizer.param_groups
        groups[1]["params"].append(groups[0]["params"].pop())
        with pytest.warns(UserWarning, match=r"moved \('0.bias'\).*; steps from 3 on are not logged"):
            train(log, loop, 1)
        train(log, loop, 3)

    def moved(model):
        return SGD([{"params": [model[0].weight]}, {"params": [model[1].weight, model[0].bias]}], 0.1)

    check_recovers(Case(moved), tmp_path, loop.state(), 6)


def test_an_older_snapshot_leads_to_the_step_before(tmp_path):
    """Steps of other parameters in the same session are not replayed after it."""
    loop = Loop(FIRST)
    with loop.log(tmp_path, keep=2, batch=100) as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(log, loop, 3)
        expected = loop.state()
        add(loop.optimizer, loop.model, 3)
        train(log, loop, 4)
    shutil.rmtree(sorted(tmp_path.glob("step-*"))[-1])
    again = Loop(FIRST, seed=1)
    recovery = again.recover(tmp_path)
    assert recovery.step == 3 and "step 4 is missing" in recovery.ended and differences(again.state(), expected) == []


def buffer_added(model):
    model[1].register_buffer("late", torch.full((3,), 2.0))


def buffer_resized(model):
    model[1].seen = torch.ones(4)


def buffer_removed(model):
    del model[1].seen


def frozen_added(model):
    model[1].extra = nn.Parameter(torch.ones(5), requires_grad=False)


def frozen_replaced(model):
    model[1].teacher = nn.Parameter(model[1].teacher + 1, requires_grad=False)


def layer_added(model):
    model.add_module("head", nn.BatchNorm1d(12))


def with_others(seed):
    model = perceptron(seed)
    model[1].register_buffer("seen", torch.zeros(2))
    model[1].register_parameter("teacher", nn.Parameter(torch.zeros(3), requires_grad=False))
    return model


OTHERS = Case(lambda m: Adam([p for p in m.parameters() if p.requires_grad], 0.01), with_others)


@pytest.mark.parametrize(("change", "says"), [
    (buffer_added, r"buffers .* \('1.late'\)"), (buffer_resized, r"buffers .* \('1.seen'\)"),
    (buffer_removed, r"buffers .* \('1.seen'\)"), (frozen_added, r"the model .* \('1.extra'\)"),
    (frozen_replaced, r"the model .* \('1.teacher'\)"), (layer_added, r"the model .* \('head.weight', 'head.bias'\)"),
])
def test_changes_outside_the_optimizer(tmp_path, change, says):
    """A snapshot follows that fits the model as it is now."""
    loop = Loop(OTHERS)
    with loop.log(tmp_path, compressor="none") as log:
        train(log, loop, 3)
        change(loop.model)
        with pytest.warns(UserWarning, match=f"{says}.*; steps from 4 on are not logged until"):
            train(log, loop, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            train(log, loop, 1)
            for _, buffer in log._train_state.buffers():
                buffer.add_(1)
            train(log, loop, 2)
        assert log.logging
    again = Loop(OTHERS, seed=1)
    change(again.model)
    recovery = again.recover(tmp_path)
    assert (recovery.step, recovery.snapshot, recovery.exact, recovery.ended) == (7, 5, True, None)
    assert differences(again.state(), loop.state()) == []


def test_a_buffer_of_a_log_that_changes_its_shape_always_is_reported_once(tmp_path):
    loop = Loop(OTHERS)
    with warnings.catch_warnings(record=True) as caught, loop.log(tmp_path, compressor="none") as log:
        warnings.simplefilter("always", UserWarning)
        for size in range(3, 8):
            loop.model[1].seen = torch.ones(size)
            train(log, loop, 1)
    assert len(caught) == 1


def test_the_comparison_does_no_operation_on_tensors():
    class Refused(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    loop = Loop(OTHERS)
    state = TrainState(loop.model, loop.optimizer)
    with Refused():
        assert state.describe_change() is None
        loop.model[1].teacher = nn.Parameter(loop.model[0].bias, requires_grad=False)
        assert "'1.teacher'" in state.describe_change()


@pytest.mark.parametrize("done", [True, False])
def test_steps_that_are_missing_at_the_end_are_reported(tmp_path, done):
    """No snapshot of the last state follows if training failed."""
    loop = Loop(ADAM)
    log = loop.log(tmp_path, compressor="none")
    train(log, loop, 2)
    with pytest.warns(UserWarning) as caught:
        loop.model[1].register_parameter("extra", nn.Parameter(torch.ones(5), requires_grad=False))
        train(log, loop, 1)
        log.__exit__(*((None,) * 3 if done else (ValueError, ValueError(), None)))
    texts = [str(warning.message) for warning in caught]
    assert any("step 3 is not in the log" in text for text in texts) == (not done), texts
    again = Loop(ADAM, seed=1)
    again.model[1].register_parameter("extra", nn.Parameter(torch.zeros(5), requires_grad=False))
    if done:
        assert again.recover(tmp_path).step == 3
    else:
        with pytest.raises(LoadFailed, match=r"'model.1.extra' was not logged"):
            again.recover(tmp_path)
        assert Loop(ADAM, seed=1).recover(tmp_path).step == 2


def test_steps_after_a_failure_are_reported_at_the_end(tmp_path, monkeypatch):
    """The log has ended before it could begin again."""
    monkeypatch.setattr(worker_group, "_RESTART_DELAYS", (600.0,))
    loop = Loop(ADAM)
    log = loop.log(tmp_path, compressor="none")
    train(log, loop, 2)
    while log._steps_on_disk.last < 2:
        log._handle_reports(log._require_client())
    log._broken = True
    for _ in range(6):
        loop.step(log.steps_done)
        log.step()
    assert log._state == "waiting"
    with pytest.warns(UserWarning, match="steps 3 to 8 are not all in the log, which has ended"):
        log.close()
    assert Loop(ADAM, seed=1).recover(tmp_path).step == 2


def test_an_iteration_that_was_not_ended_is_in_no_snapshot(tmp_path):
    """After the last `log.step` the optimizer did a step; a snapshot at the end would be of a state between steps."""
    loop = Loop(ADAM)
    with pytest.warns(UserWarning, match="step 3 is not in the log"), loop.log(tmp_path, compressor="none") as log:
        train(log, loop, 2)
        truth = loop.state()
        with torch.no_grad():
            loop.model[0].weight.mul_(0.5)
        train(log, loop, 1)
        loop.step(3)
    check_recovers(ADAM, tmp_path, truth, 2)


def test_nothing_is_told_where_nothing_is_missing(tmp_path):
    loop = Loop(ADAM)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with loop.log(tmp_path, compressor="none", batch=100, snapshot_every=3) as log:
            for number in range(8):
                loop.step(number)
                log.step()
        loop.log(tmp_path.with_name("empty"), compressor="none").close()
    assert log._steps_on_disk.last == 8


def test_steps_on_disk():
    """Steps after a gap count once the snapshot before them is saved, in whatever order reports come."""
    steps = StepsOnDisk()

    def reports(*events):
        for kind, *numbers in events:
            names = ("step",) if kind == "snapshot" else ("first", "last")
            steps.add({"kind": kind, **dict(zip(names, numbers, strict=False))})
        return steps.last

    assert reports(("snapshot", 0), ("written", 1, 4)) == 4
    assert reports(("unsaved",), ("written", 7, 8), ("written", 9, 9)) == 4
    assert reports(("snapshot", 6)) == 9
    assert reports(("snapshot", 8), ("written", 10, 12)) == 12


def test_snapshots_of_different_steps_are_not_mixed():
    """Nothing is saved if a rank closes its log and another goes on."""
    class Elsewhere:
        def gather(self, step):
            return [step, step + 1]

    class Saving(Server):
        def __init__(self):
            self.reports, self._is_exclusive, self._comm = [], True, Elsewhere()

        def _handle(self, message): ...

        def _finish(self, closing): ...

        def _report(self, message):
            self.reports.append(message)

    saving = Saving()
    saving._save(4, [], None)
    assert [report["kind"] for report in saving.reports] == ["failed"]
    assert "saves the state after another step" in saving.reports[0]["text"]
