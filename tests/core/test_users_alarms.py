"""Alarms that functions of the user set for themselves, in a save or a load, and catch."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.core.interrupts import defer_handler_errors, hold_signals, in_user_code, run_pending_handlers
from dsq_ckpt.lowdiff.rollback import rollback_on_failure
from dsq_ckpt.lowdiff.train_state import TrainState
from dsq_ckpt.storage.manifest import is_complete

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Alarm(Exception):
    """Raised by the handler."""


@pytest.fixture(autouse=True)
def handler():
    def ring(number: int, frame: Any) -> None:
        raise Alarm("too slow")

    before = signal.signal(signal.SIGALRM, ring)
    yield
    assert signal.getsignal(signal.SIGALRM) is ring
    signal.signal(signal.SIGALRM, before)


def guarded() -> None:
    """Give up what takes too long."""
    with pytest.raises(Alarm):
        signal.raise_signal(signal.SIGALRM)


def turned() -> None:
    """Make another error of it, without the alarm as its cause."""
    try:
        signal.raise_signal(signal.SIGALRM)
    except Alarm:
        raise RuntimeError("of the user") from None


def noted() -> None:
    """Make another error of it, later."""
    try:
        signal.raise_signal(signal.SIGALRM)
    except Alarm:
        late = True
    if late:
        raise RuntimeError("of the user")


class Saved:
    """An object whose state takes long to tell, take, copy or pickle."""

    def __init__(self, place: str = "", slow: Any = guarded) -> None:
        self.place, self.slow, self.position = place, slow, 3

    def _at(self, place: str) -> None:
        if self.place == place:
            self.slow()

    def state_dict(self) -> dict[str, Any]:
        self._at("state_dict")
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at("load_state_dict")
        self.position = state["position"]


class Model(torch.nn.Module):
    """A module with state of its own, and hooks."""

    def __init__(self, place: str = "", slow: Any = guarded) -> None:
        super().__init__()
        self.place, self.slow, self.layer = place, slow, torch.nn.Linear(90, 90)
        self.layer.register_load_state_dict_post_hook(lambda *_: self.slow() if self.place == "hook" else None)

    def get_extra_state(self) -> torch.Tensor:
        if self.place == "get_extra_state":
            self.slow()
        return torch.ones(2)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if self.place == "set_extra_state":
            self.slow()


class Pickled:
    """An object that is stored as such."""

    def __getstate__(self) -> dict[str, Any]:
        if threading.current_thread() is threading.main_thread():  # as in the copy for an asynchronous save
            guarded()
        return {"a": 1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        guarded()


def test_objects_catch_their_alarms(tmp_path):
    """The checkpoint is complete, and loaded; the caller hears of nothing."""
    weights = {"w": torch.randn(90, 90)}
    path = dsq_ckpt.save({**weights, "data": Saved("state_dict")}, tmp_path / "a").path
    for place in ("state_dict", "load_state_dict"):
        own = Saved(place)
        own.position = 0
        dsq_ckpt.load({**weights, "data": own}, path)
        assert own.position == 3
    dsq_ckpt.save({**weights, "thing": Pickled()}, tmp_path / "b")
    dsq_ckpt.load({**weights, "thing": Pickled()}, tmp_path / "b")
    dsq_ckpt.async_save({**weights, "thing": Pickled(), "data": Saved("state_dict")}, tmp_path / "c").result()


@pytest.mark.parametrize("place", ["get_extra_state", "set_extra_state", "hook"])
def test_modules_catch_their_alarms(tmp_path, place):
    model = Model(place)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, given in enumerate((model, {"model": model})):
        dsq_ckpt.load(given, dsq_ckpt.save(given, tmp_path / f"a{number}").path)
    for number, own in enumerate((None, optimizer)):
        compressor = dsq_ckpt.Compressor(model, own)
        extra = {"data": Saved("state_dict")}
        compressor.load(compressor.save(tmp_path / f"b{number}", extra=extra).path, extra=extra)
    dsq_ckpt.compress(model, tmp_path / "c")
    dsq_ckpt.compress(model.state_dict(), tmp_path / "d", model=model, evaluate=lambda: 1.0)


def test_on_save_catches_its_alarm(tmp_path):
    weights = {"w": torch.randn(90, 90)}
    result = dsq_ckpt.save(weights, tmp_path / "a", on_save=lambda _: guarded())
    assert is_complete(result.path)
    with pytest.warns(UserWarning, match="on_save raised RuntimeError: of the user"):
        dsq_ckpt.save(weights, tmp_path / "b", on_save=lambda _: turned())
    with pytest.raises(Alarm):  # which it does not catch
        dsq_ckpt.save(weights, tmp_path / "c", on_save=lambda _: signal.raise_signal(signal.SIGALRM))
    assert is_complete(tmp_path / "c")


@pytest.mark.parametrize("slow", [turned, noted])
def test_an_error_that_the_user_makes_of_an_alarm_is_reported(tmp_path, slow):
    """An error made of an alarm is one of the user's as any other, and no wish to stop."""
    weights = {"w": torch.randn(90, 90)}
    with pytest.raises(dsq_ckpt.SaveFailed, match="of the user"):
        dsq_ckpt.save({**weights, "data": Saved("state_dict", slow)}, tmp_path / "a")
    dsq_ckpt.save({**weights, "data": Saved()}, tmp_path / "b")
    with pytest.raises(dsq_ckpt.LoadFailed, match="of the user"):
        dsq_ckpt.load({**weights, "data": Saved("load_state_dict", slow)}, tmp_path / "b")
    with pytest.warns(UserWarning, match="`evaluate` raised RuntimeError: of the user"):
        dsq_ckpt.Compressor(Model(), evaluate=slow).save(tmp_path / "c")


def test_an_error_that_hooks_of_a_module_make_of_an_alarm_is_reported(tmp_path):
    path = dsq_ckpt.save(Model(), tmp_path / "a").path
    for place in ("set_extra_state", "hook"):
        with pytest.raises(dsq_ckpt.LoadFailed, match="of the user"):
            dsq_ckpt.load(Model(place, turned), path)
        with pytest.raises(dsq_ckpt.LoadFailed, match="of the user"):
            dsq_ckpt.Compressor(Model(place, turned)).load(dsq_ckpt.Compressor(Model()).save(tmp_path / place).path)


def test_an_alarm_while_torch_copies_weights_reaches_the_caller(tmp_path):
    """Although torch makes an error of its own of it."""
    class Rings(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.copy_:
                signal.raise_signal(signal.SIGALRM)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model = Model()
    path = dsq_ckpt.save(model, tmp_path / "a").path
    model.layer.bias = Rings(torch.zeros(90))
    with pytest.raises(RuntimeError, match="too slow"):
        model.load_state_dict(Model().state_dict())
    with pytest.raises(Alarm):
        dsq_ckpt.load(model, path)


def test_states_of_a_log_catch_their_alarms():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for place in ("state_dict", "load_state_dict"):
        own = Saved(place)
        with hold_signals():
            states = TrainState(model, optimizer, {"data": own})
            states.set_states(states.states_to_plain())
            with suppress(ValueError), rollback_on_failure(states):
                own.position = 4
                raise ValueError
            assert own.position == 3


def test_an_interval_timer_waits_each_time():
    """Among several ranks, or with trial weights: it would take its rank out of a collective."""
    reached = list[bool]()
    with pytest.raises(Alarm), hold_signals(), defer_handler_errors():
        for _ in range(3):
            signal.raise_signal(signal.SIGALRM)
        with in_user_code():
            guarded()
        signal.raise_signal(signal.SIGALRM)
        with pytest.raises(Alarm):
            run_pending_handlers()
        run_pending_handlers()
        signal.raise_signal(signal.SIGALRM)
        reached.append(True)
    assert reached
