"""Handlers of signals wait for a place where other ranks can be told; real signals on several ranks: tests/dcp."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.core.interrupts import held_signals, let_signals_through
from dsq_ckpt.engine import quantizing, warmup
from dsq_ckpt.quantization.chunk import QuantizingChunk
from tests.helpers.states import loaded, same
from tests.helpers.training import Net, loss_of

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
    with held_signals():
        signal.raise_signal(signal.SIGUSR1)
        assert handler.calls == 0
        let_signals_through()
        assert handler.calls == 1
        with held_signals():  # the outermost counts
            signal.raise_signal(signal.SIGUSR1)
        assert handler.calls == 1
    assert handler.calls == 2
    let_signals_through()
    assert handler.calls == 2


def test_a_second_signal_does_not_wait(handler):
    handler.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), held_signals():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        pytest.fail("not reached")
    assert handler.calls == 1


def test_what_a_handler_raises_at_the_end_is_raised(handler):
    handler.error = SystemExit(3)
    with pytest.raises(SystemExit) as caught, held_signals():
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("of the work")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_is_set_meanwhile_stays(handler):
    def other(number, frame):
        pass

    with held_signals():
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other
    signal.signal(signal.SIGUSR1, handler)


def test_other_threads_neither_hold_nor_let_through(handler):
    def other():
        with held_signals():
            let_signals_through()

    with held_signals():
        signal.raise_signal(signal.SIGUSR1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert handler.calls == 0
    assert handler.calls == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_is_no_exception_is_raised_as_it_is(tmp_path, error):
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
    assert all(same(value, before[name]) for name, value in model.state_dict().items())
    compressor = dsq_ckpt.Compressor(model, evaluate=lambda: loss_of(model))
    compressor.save(tmp_path / "0")
    assert same(loaded(tmp_path / "0", {"model": model.state_dict()})["model"]["norm.bias"], before["norm.bias"])


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
    loaded(tmp_path / "a", state)


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

    monkeypatch.setattr(warmup, "compile_group", compiles)
    monkeypatch.setattr(warmup, "_background", background)
    gather = quantizing.with_sound_parent
    monkeypatch.setattr(quantizing, "with_sound_parent", lambda *args: asked.set() or gather(*args))
    with pytest.raises(KeyboardInterrupt):
        dsq_ckpt.save({"a.weight": torch.randn(100, 100)}, tmp_path / "x")
    compiled.set()
    assert not (tmp_path / "x").exists()
