"""Signals during saves on one rank: argv = an empty directory.

The rank gets what its handler raised, the others SaveFailed, which names it; what failed is invisible, and the next
save works as if nothing had been.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import done, normal, world

import dsq_ckpt
from dsq_ckpt.core import interrupts
from dsq_ckpt.distributed.comm import TorchCommunicator
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import ContainerWriter
from dsq_ckpt.storage.manifest import is_complete


class Preempted(Exception):
    """An exception of a handler, which can be pickled, but not unpickled."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{why} {number}")


RAISES = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit, signal.SIGALRM: Preempted}


class Saves:
    """A run of a model that every rank owns, and of a tensor that each writes, too large to be rank 0's."""

    def __init__(self, run: Path, culprit: int) -> None:
        self.run, self.culprit, self.count = run, culprit, 0
        self.rank = dist.get_rank()
        self.ended = threading.Event()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(96, 64)
        self.during_evaluation: Callable[[], None] = lambda: None
        self.thing: Any = None
        self.compressor = dsq_ckpt.Compressor(self.model, evaluate=self.evaluate, config={"search": {"trials": 1}})

    def evaluate(self) -> float:
        self.during_evaluation()
        return float(self.model.weight.double().square().sum())

    def state(self) -> dict[str, Any]:
        state = {f"own{rank}.weight": normal(90, 256, seed=rank) for rank in range(dist.get_world_size())}
        return {**{name: state[name] + 0.001 * self.count for name in state}, "count": self.count}

    def save(self, how: str) -> Path:
        path = self.run / f"{self.count:03d}"
        if how == "compressor":
            self.compressor.save(path, extra=self.state())
        elif how == "async":
            dsq_ckpt.async_save({**self.state(), f"object{self.rank}": self.thing}, path).result()
        else:
            dsq_ckpt.save(self.state(), path)
        return path

    def attempt(self, how: str, number: signal.Signals, always: bool, before: Callable[[], Any] = lambda: None) -> bool:
        """One save that may be interrupted on the culprit; returns whether it was."""
        self.count += 1
        self.ended.clear()
        weights, caught, waiting = self.model.weight.detach().clone(), None, None
        try:
            waiting = before()
            try:
                self.save(how)
            finally:
                self.ended.set()
            if waiting is not None:
                waiting.join()
        except (dsq_ckpt.SaveFailed, KeyboardInterrupt, SystemExit, Preempted) as error:
            caught = error
            if waiting is not None:
                waiting.join()
        dist.barrier()
        failed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failed, isinstance(caught, dsq_ckpt.SaveFailed))
        complete = is_complete(self.run / f"{self.count:03d}")
        if self.rank == self.culprit:
            assert caught is None or type(caught) is RAISES[number], repr(caught)
            assert not always or caught is not None
            assert complete or caught is not None
        else:
            assert (caught is None) == complete, repr(caught)
            assert caught is None or (f"rank {self.culprit}" in str(caught) and RAISES[number].__name__ in str(caught))
        assert dist.get_world_size() == 1 or any(failed) != complete
        assert torch.equal(self.model.weight, weights), "trial weights were put back"
        assert signal.getsignal(number) is HANDLERS[number], "the handler is the user's again"
        assert not list(self.run.glob("*/.*")), "temporary files are removed"
        return not complete

    def works(self) -> None:
        self.count += 1
        path = self.save("sync")
        back = {name: torch.zeros_like(v) if torch.is_tensor(v) else 0 for name, v in self.state().items()}
        dsq_ckpt.load(back, path)
        wanted = self.state()
        for name in wanted:
            if name != "count":
                assert (back[name] - wanted[name]).norm() < 0.02 * wanted[name].norm(), name
        assert back["count"] == self.count


class Leaves:
    """An object that ends the thread which stores it."""

    def __deepcopy__(self, memo: Any) -> Leaves:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        sys.exit(5)


def leave(number: int, frame: Any) -> None:
    sys.exit(5)


def preempt(number: int, frame: Any) -> None:
    raise Preempted(number, "by signal")


USERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: leave, signal.SIGALRM: preempt}
HANDLERS: dict[int, Any] = {}


def from_within(saves: Saves) -> None:
    """The signal comes at a known place of this rank's work."""
    own = saves.rank == saves.culprit
    for number in RAISES:
        for how in ("sync", "compressor"):
            append = ContainerWriter.add

            def add(self: Any, data: Any) -> Any:
                os.kill(os.getpid(), number)  # noqa: B023
                return append(self, data)  # noqa: B023

            with mock.patch.object(ContainerWriter, "add", add if own else append):
                assert saves.attempt(how, number, always=True)
        saves.during_evaluation = lambda: os.kill(os.getpid(), number) if own else None  # noqa: B023
        assert saves.attempt("compressor", number, always=True)
        saves.during_evaluation = lambda: sys.exit(5) if own else None
        assert saves.attempt("compressor", signal.SIGTERM, always=True)
        saves.during_evaluation = lambda: None
    saves.works()
    done("from within")


def during_a_load(saves: Saves) -> None:
    """The rank gets what its handler raised, the others LoadFailed; the next load works."""
    own, path = saves.rank == saves.culprit, saves.run / f"{saves.count:03d}"
    for number, raised in RAISES.items():
        find = Checkpoint.read_record

        def record(self: Any, *args: Any) -> Any:
            os.kill(os.getpid(), number)  # noqa: B023
            return find(self, *args)  # noqa: B023

        expected = raised if own else dsq_ckpt.LoadFailed
        with mock.patch.object(Checkpoint, "read_record", record if own else find):
            try:
                dsq_ckpt.load(saves.state(), path)
            except BaseException as error:
                assert type(error) is raised if own else isinstance(error, expected), repr(error)
                assert own or raised.__name__ in str(error), repr(error)
            else:
                raise AssertionError("not reached")
        dsq_ckpt.load(saves.state(), path)
    done("during a load")


class Slow:
    """An object that gives up after a time of its own to tell its state."""

    seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        begun = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            time.sleep(20)
        except Preempted:
            self.seconds = time.monotonic() - begun
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def alarms_of_objects(saves: Saves) -> None:
    """They ring at once, and are not told of where they are caught."""
    slow = Slow()
    dsq_ckpt.save({**saves.state(), "slow": slow}, saves.run.parent / "slow")
    assert 0 < slow.seconds < 10
    done("alarms of objects")


def interval_timer(saves: Saves) -> None:
    """Each of its alarms waits, whatever the rank does; the others are told once."""
    own = saves.rank == saves.culprit
    gather = TorchCommunicator.gather

    def slowly(self: Any, value: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.01 if own else 0, 0.02)
        time.sleep(0.1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return gather(self, value)

    with mock.patch.object(TorchCommunicator, "gather", slowly):
        try:
            dsq_ckpt.save(saves.state(), saves.run.parent / "timer")
        except (Preempted, dsq_ckpt.SaveFailed) as error:
            assert isinstance(error, Preempted if own else dsq_ckpt.SaveFailed), repr(error)
            assert own or f"rank {saves.culprit}" in str(error), repr(error)
        else:
            raise AssertionError("not reached")
    done("interval timer")


def in_the_background(saves: Saves) -> None:
    """What ends the thread of an asynchronous save ends its future."""
    saves.thing = Leaves() if saves.rank == saves.culprit else None
    assert saves.attempt("async", signal.SIGTERM, always=True)
    saves.thing = None
    saves.works()
    done("in the background")


def is_held() -> bool:
    """Signals wait, since a save of this rank has begun."""
    state = interrupts._state
    return state is not None and state.holds_signals


def at_any_time(saves: Saves) -> None:
    """The signal comes from a thread, whenever it comes."""
    chance = random.Random(5)
    interrupted = 0
    for turn in range(24):
        how, number = ("sync", "compressor")[turn % 2], list(RAISES)[turn // 2 % 3]
        delay = chance.random() * 0.2

        def soon() -> threading.Thread | None:
            if saves.rank != saves.culprit:
                return None

            def later() -> None:
                while not (saves.ended.is_set() or is_held()):  # before it, the rank would not take part in the save
                    time.sleep(0.0005)
                time.sleep(delay)  # noqa: B023
                os.kill(os.getpid(), number)  # noqa: B023

            thread = threading.Thread(target=later)
            thread.start()
            return thread

        interrupted += saves.attempt(how, number, always=True, before=soon)
    saves.works()
    print(f"{interrupted} of 24 in the middle", flush=True)
    done("at any time")


def main() -> None:
    with world() as (_, size):
        for number in RAISES:
            signal.signal(number, USERS[number])
            HANDLERS[number] = signal.getsignal(number)
        saves = Saves(Path(sys.argv[1]) / "run", culprit=size - 1)
        saves.works()
        from_within(saves)
        during_a_load(saves)
        alarms_of_objects(saves)
        if size > 1:
            interval_timer(saves)
        in_the_background(saves)
        at_any_time(saves)


main()
