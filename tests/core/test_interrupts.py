"""Handlers of signals wait for a place where other ranks can be told; real signals on several ranks: tests/dcp."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dsq_ckpt
from dsq_ckpt.core.interrupts import (
    defer_handler_errors,
    hold_signals,
    in_user_code,
    propagate_handler_errors,
    run_pending_handlers,
)
from dsq_ckpt.dcp.nested_planners import NestedSavePlanner
from dsq_ckpt.engine import quantizing, warmup
from dsq_ckpt.engine.pipeline import SavePipeline
from dsq_ckpt.quantization import global_sketch
from dsq_ckpt.quantization.chunk import QuantizingChunk
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest, _parse_cached, is_complete
from dsq_ckpt.storage.shard import ShardWriter
from tests.helpers.states import is_equal, load_copy
from tests.helpers.training import Net, compute_loss

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def handler():
    """A handler of SIGUSR1 that counts, and raises when it is told to."""
    class Handler:
        calls = 0
        error: BaseException | None = None

        def __call__(self, number, frame):
            self.calls += 1
            if self.error is not None:
                raise self.error

    own = Handler()
    before = signal.signal(signal.SIGUSR1, own)
    yield own
    assert signal.getsignal(signal.SIGUSR1) is own
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_waits(handler):
    with hold_signals():
        signal.raise_signal(signal.SIGUSR1)
        assert handler.calls == 0
        run_pending_handlers()
        assert handler.calls == 1
        with hold_signals():  # the outermost counts
            signal.raise_signal(signal.SIGUSR1)
        assert handler.calls == 1
    assert handler.calls == 2
    run_pending_handlers()
    assert handler.calls == 2


def test_a_second_signal_does_not_wait(handler):
    handler.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), hold_signals():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        pytest.fail("not reached")
    assert handler.calls == 1


def test_an_exception_of_a_handler_at_the_end_is_raised(handler):
    handler.error = SystemExit(3)
    with pytest.raises(SystemExit) as caught, hold_signals():
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("of the work")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_is_set_meanwhile_stays(handler):
    def other(number, frame):
        pass

    with hold_signals():
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other
    signal.signal(signal.SIGUSR1, handler)


def test_other_threads_neither_hold_nor_let_through(handler):
    def other():
        with hold_signals():
            run_pending_handlers()

    with hold_signals():
        signal.raise_signal(signal.SIGUSR1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert handler.calls == 0
    assert handler.calls == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_error_that_is_no_exception_is_raised_as_it_is(tmp_path, error):
    """As of Ctrl-C in an evaluation, or of an object that is saved; a loop which logs DSQError must not go on."""
    class Thing:
        def __deepcopy__(self, memo):
            return self

        def __reduce_ex__(self, protocol):
            raise error

    def evaluate():
        raise error

    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saves = [
        lambda path: dsq_ckpt.save({"w": torch.randn(80, 80), "thing": Thing()}, path),
        lambda path: dsq_ckpt.async_save({"w": torch.randn(80, 80), "thing": Thing()}, path).result(),
        lambda path: dsq_ckpt.Compressor(model, evaluate=evaluate).save(path),
        lambda path: dsq_ckpt.compress(model, path, evaluate=evaluate, max_degradation=0.1),
    ]
    for number, save in enumerate(saves):
        with pytest.raises(type(error)) as caught:
            save(tmp_path / str(number))
        assert caught.value is error
        assert not (tmp_path / str(number) / "manifest.json").exists()
    assert all(is_equal(value, before[name]) for name, value in model.state_dict().items())
    compressor = dsq_ckpt.Compressor(model, evaluate=lambda: compute_loss(model))
    compressor.save(tmp_path / "0")
    assert is_equal(load_copy(tmp_path / "0", {"model": model.state_dict()})["model"]["norm.bias"], before["norm.bias"])


def test_an_interrupted_load(tmp_path):
    state = {"w": torch.randn(80, 80), "v": torch.randn(80, 80)}
    dsq_ckpt.save(state, tmp_path / "a")

    class Signals(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.detach:
                signal.raise_signal(signal.SIGINT)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    with pytest.raises(KeyboardInterrupt):
        dsq_ckpt.load({name: value.as_subclass(Signals) for name, value in state.items()}, tmp_path / "a")
    load_copy(tmp_path / "a", state)


def test_a_save_of_one_large_tensor_does_not_go_on(tmp_path, monkeypatch):
    """No more than the few blocks that threads have taken."""
    original, blocks = QuantizingChunk.block, []

    def block(self, where):
        blocks.append(where)
        if len(blocks) == 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, where)

    monkeypatch.setattr(QuantizingChunk, "block", block)
    config = {"storage": {"block_elements": 1 << 12, "threads": 1}}
    with pytest.raises(KeyboardInterrupt):
        dsq_ckpt.save({"a.weight": torch.randn(512, 512)}, tmp_path / "x", config=config)
    assert len(blocks) <= 2
    assert not (tmp_path / "x").exists()


def test_a_save_does_not_wait_for_kernels(tmp_path, monkeypatch):
    """A signal ends it although the thread that compiles goes on."""
    compiled, asked = threading.Event(), threading.Event()
    background, killed = warmup._Background(), list[bool]()

    def compiles(group, stopped):
        if not killed:
            killed.append(asked.wait(60))
            os.kill(os.getpid(), signal.SIGINT)
        compiled.wait(60)

    monkeypatch.setattr(warmup.native, "path", lambda: "numba")
    monkeypatch.setattr(warmup, "compile_group", compiles)
    monkeypatch.setattr(warmup, "_background", background)
    gather = quantizing.drop_damaged_parent
    monkeypatch.setattr(quantizing, "drop_damaged_parent", lambda *args: asked.set() or gather(*args))
    with pytest.raises(KeyboardInterrupt):
        dsq_ckpt.save({"a.weight": torch.randn(100, 100)}, tmp_path / "x")
    compiled.set()
    assert not (tmp_path / "x").exists()


class Preempted(Exception):
    """An exception that a handler of the user raises to stop a job."""


class Alarm:
    """A handler of SIGALRM; objects and others than functions are handlers, too."""

    error: BaseException

    def __call__(self, number, frame):
        raise self.error


@pytest.fixture(params=[Preempted, TimeoutError, FileNotFoundError, dsq_ckpt.LoadFailed, SystemExit])
def alarm(request):
    """Exceptions of a handler of SIGALRM, which does not wait; also of classes that the package takes for its own."""
    handler = Alarm()
    handler.error = error = request.param("by the queue")
    error.__cause__ = cause = KeyError("of the user")
    before = signal.signal(signal.SIGALRM, handler)
    yield error
    assert signal.getsignal(signal.SIGALRM) is handler
    signal.signal(signal.SIGALRM, before)
    assert isinstance(error, SystemExit) or error.__cause__ is cause


def rings(original):
    """Return a function before which the alarm rings."""
    def function(*args, **kwargs):
        signal.raise_signal(signal.SIGALRM)
        return original(*args, **kwargs)

    return function


def during(owner, name):
    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, rings(getattr(owner, name)))
    return patch


SAVES = {
    "sketches": (global_sketch, "add_joint"), "writing": (ShardWriter, "finish"),
    "plan": (NestedSavePlanner, "create_local_plan"), "parent": (Manifest, "model_validate"),
    "commit": (SavePipeline, "commit"),
}


@pytest.mark.parametrize("place", SAVES)
def test_an_exception_of_a_handler_during_a_save_reaches_the_caller(tmp_path, alarm, place):
    """The very exception, whatever was being done; the checkpoint is complete or was never there."""
    state = {"a.weight": torch.randn(100, 100), "step": 1}
    dsq_ckpt.save(state, tmp_path / "0")
    for number, save in enumerate((dsq_ckpt.save, dsq_ckpt.Compressor(Net()).save)):
        path = tmp_path / f"x{number}"
        _parse_cached.cache_clear()
        patch = during(*SAVES[place])
        try:
            with pytest.raises(type(alarm)) as caught:
                save(state, path) if number == 0 else save(path)
        finally:
            patch.undo()
        assert caught.value is alarm
        assert is_complete(path) or not path.exists()
        if place != "parent":  # which a first save reads nowhere, and what is complete is read once more
            assert not is_complete(path), "it is raised where the save can still end"
    dsq_ckpt.save(state, tmp_path / "1")
    load_copy(tmp_path / "1", state)


@pytest.mark.parametrize(
    "place", [(Manifest, "model_validate"), (Checkpoint, "read_record"), (Checkpoint, "prepare_load")],
    ids=lambda place: place[1],
)
def test_an_exception_of_a_handler_during_a_load_reaches_the_caller(tmp_path, alarm, place):
    """The exception is no LoadFailed, on which a job would go back further, and says that the state is half new."""
    state = {"a.weight": torch.randn(100, 100), "b.weight": torch.randn(100, 100)}
    dsq_ckpt.save(state, tmp_path / "a")
    compressor = dsq_ckpt.Compressor(Net())
    compressor.save(tmp_path / "b")
    loads = [lambda: dsq_ckpt.load(state, tmp_path / "a"), lambda: compressor.load(tmp_path / "b")]
    for load in loads:
        _parse_cached.cache_clear()
        patch = during(*place)
        try:
            with pytest.raises(type(alarm)) as caught:
                load()
        finally:
            patch.undo()
        assert caught.value is alarm
        if place[0] is Checkpoint and sys.version_info >= (3, 11):
            assert "partly filled" in alarm.__notes__[-1]
        load()


def test_an_exception_of_a_handler_within_dcps_functions(tmp_path, alarm):
    """DCP bundles it as it is."""
    state = {"a.weight": torch.randn(100, 100)}
    dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / "a"))
    for place, call in {
        (ShardWriter, "finish"): lambda: dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / "b")),
        (Checkpoint, "read_record"): lambda: dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "a")),
    }.items():
        patch = during(*place)
        try:
            with pytest.raises(CheckpointException) as caught:
                call()
        finally:
            patch.undo()
        assert caught.value.failures[0][0] is alarm


def test_latest_is_no_older_one_when_a_handler_raises(tmp_path, alarm):
    for name in ("a", "b"):
        dsq_ckpt.save({"w": torch.randn(10)}, tmp_path / name)
    _parse_cached.cache_clear()
    patch = during(Manifest, "model_validate")
    try:
        with pytest.raises(type(alarm)) as caught:
            dsq_ckpt.latest(tmp_path)
    finally:
        patch.undo()
    assert caught.value is alarm
    assert dsq_ckpt.latest(tmp_path) == str(tmp_path / "b")


def test_an_alarm_in_an_evaluation_ends_the_save(tmp_path, alarm):
    """An alarm is not taken for a metric that cannot be had (weights are then stored finely); the model is put back."""
    def evaluate():
        signal.raise_signal(signal.SIGALRM)
        pytest.fail("it is raised at once")

    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(type(alarm)) as caught:
        dsq_ckpt.Compressor(model, evaluate=evaluate).save(tmp_path / "x")
    assert caught.value is alarm
    assert not (tmp_path / "x").exists()
    assert all(is_equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_evaluation_may_catch_its_alarm(tmp_path, alarm):
    def evaluate():
        with pytest.raises(type(alarm)):
            signal.raise_signal(signal.SIGALRM)
        return compute_loss(model)

    model = Net()
    dsq_ckpt.Compressor(model, evaluate=evaluate, config={"search": {"epsilon": 0.5}}).save(tmp_path / "x")
    assert dsq_ckpt.latest(tmp_path) is not None


def test_a_lost_exception_is_raised_again(alarm):
    """As in a destructor, or where the package goes on without something; where others can be told, or at the end."""
    with pytest.raises(type(alarm)) as caught, propagate_handler_errors():
        with suppress(BaseException):
            signal.raise_signal(signal.SIGALRM)
        with hold_signals(), pytest.raises(type(alarm)):
            run_pending_handlers()
        run_pending_handlers()
        raise ValueError("of the work")
    assert caught.value is alarm
    assert alarm.__context__ is None


def test_an_alarm_waits_only_while_the_model_is_not_the_users(alarm):
    """A second one waits as well, as of an interval timer; the handler itself never does."""
    with pytest.raises(type(alarm)), hold_signals(), defer_handler_errors():
        signal.raise_signal(signal.SIGALRM)
        with in_user_code(), pytest.raises(type(alarm)):
            signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)
        with pytest.raises(type(alarm)):
            run_pending_handlers()
        signal.raise_signal(signal.SIGALRM)
    with pytest.raises(type(alarm)), hold_signals():
        signal.raise_signal(signal.SIGALRM)
        pytest.fail("not reached")


def test_a_handler_that_calls_the_one_before_it(handler):
    """As a library that sets its own during an evaluation: the signals of later are not held for good."""
    with hold_signals():
        earlier_handler = signal.getsignal(signal.SIGUSR1)
    earlier_handler(signal.SIGUSR1, None)
    assert handler.calls == 1
