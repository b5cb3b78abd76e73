"""Replay: the optimizer run again over logged gradients.

The same optimizer does the same arithmetic on the same numbers, so what comes out is bit for bit what training had.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dsq_ckpt.core.interrupts import let_signals_through
from dsq_ckpt.errors import DSQError
from dsq_ckpt.lowdiff.linear import Merging
from dsq_ckpt.lowdiff.segments import Segment
from dsq_ckpt.lowdiff.train_state import TrainState

_AHEAD = 4
_BY_PARAMETER = frozenset({
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor",
})
"""Optimizers of torch.optim that update each parameter by itself: replay of some of them is exact by itself."""


class Decoded(NamedTuple):
    """A step, read: None for `hyper` where the optimizer did no step."""

    number: int
    hyper: list[dict[str, Any]] | None
    after: dict[str, Any]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


class Replayed(NamedTuple):
    """What a replay came to: steps, what the last one left behind (hyperparameters, states of schedulers and the like,
    buffers of the model), and why it ended early.
    """

    steps: int
    hyper: list[dict[str, Any]]
    states: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    ended: str | None


def replay(
    subject: TrainState, course: Sequence[Sequence[Segment]], first: int, threads: int, merge: bool = False,
    rank: int | None = None,
) -> Replayed:
    """Replay steps, in place; it ends at the last one that can be read.

    Args:
        subject: whose parameters and optimizer state are those before the first step.
        course: see `segments.course`.
        first: number of the first step.
        threads: over which parameters on the CPU are dealt, where the optimizer updates each by itself.
        merge: merge the steps with each other instead; see `linear`.
        rank: replay what this rank logged, and nothing else; None: all of it.

    Raises:
        ConfigError: the optimizer's steps cannot be merged.
    """
    names = share(subject, course, rank)
    way = Merging(subject, threads) if merge else _Shards(subject, names, threads)
    done, ended = 0, None
    hyper: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    buffers: dict[str, torch.Tensor] = {}
    with way, _ahead(course, first, rank) as steps:
        for step in steps:
            let_signals_through()
            if isinstance(step, DSQError):
                ended = f"step {first + done} cannot be read: {step}"
                break
            if step.hyper is not None:
                with course[done][0].readable(first + done):
                    way.step(step.hyper, step.gradients)
            done += 1
            hyper, states = step.after["hyper"] or step.hyper or hyper, step.after["states"]
            buffers |= step.buffers
    return Replayed(done, hyper, states, buffers, ended)


def share(subject: TrainState, course: Sequence[Sequence[Segment]], rank: int | None) -> list[str]:
    """Names of the parameters that a rank logged; of all, where that is None or nothing was logged."""
    if rank is None or not course:
        return list(subject.parameters)
    return [entry.name for segment in course[0] if segment.rank == rank for entry in segment.entries]


def by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known to update each parameter by itself."""
    return type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _BY_PARAMETER


class _Shards:
    """The optimizer in parts, each with some of the parameters, that do their steps at the same time."""

    def __init__(self, subject: TrainState, own: Sequence[str], threads: int) -> None:
        self._subject = subject
        optimizer = subject.optimizer
        on_host = all(parameter.device.type == "cpu" for parameter in subject.parameters.values())
        count = max(min(threads, len(own)), 1) if on_host and by_parameter(optimizer) else 1
        dealt: list[list[str]] = [[] for _ in range(count)]
        loads = [0] * count
        for name in sorted(own, key=lambda name: -subject.parameters[name].numel()):
            lightest = loads.index(min(loads))
            dealt[lightest].append(name)
            loads[lightest] += subject.parameters[name].numel()
        if not by_parameter(optimizer):
            dealt = subject.calls()  # it may tell parameters of one call from those of another
        self._parts = [(names, _part(optimizer, {subject.parameters[name] for name in names})) for names in dealt]
        self._pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) if count > 1 else None

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for parameter in self._subject.parameters.values():
            parameter.grad = None

    def step(self, hyper: Sequence[dict[str, Any]], gradients: dict[str, torch.Tensor]) -> None:
        """One step of all parts; they share hyperparameters, which therefore are set before."""
        self._subject.set_hyper(hyper)
        if self._pool is None:
            for names, part in self._parts:
                self._step(names, part, gradients)
        else:
            state = self._subject.optimizer.state
            before = len(state)
            for done in [self._pool.submit(self._step, *part, gradients) for part in self._parts]:
                done.result()
            # What this step made is in the order in which threads made it; training had that of the parameters.
            made = set(list(state)[before:])
            for parameter in self._subject.parameters.values():
                if parameter in made:
                    state[parameter] = state.pop(parameter)

    def _step(
        self, names: Sequence[str], optimizer: torch.optim.Optimizer, gradients: dict[str, torch.Tensor]
    ) -> None:
        for own, group in zip(optimizer.param_groups, self._subject.optimizer.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        for name in names:
            parameter = self._subject.parameters[name]
            flat = gradients.get(name)
            if flat is None:
                parameter.grad = None
                continue
            gradient = flat.view(parameter.shape)
            if gradient.device != parameter.device or not parameter.is_contiguous():
                gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            parameter.grad = gradient
        optimizer.step()


def _part(optimizer: torch.optim.Optimizer, parameters: set[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with some of the parameters, their state, and neither hooks nor what a scheduler put around it."""
    part = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name != "step":  # optimizers that are not torch's have more, which copying leaves out
            part.__dict__.setdefault(name, value)
    part.param_groups = [
        {**group, "params": [parameter for parameter in group["params"] if parameter in parameters]}
        for group in optimizer.param_groups
    ]
    return part


@contextmanager
def _ahead(
    course: Sequence[Sequence[Segment]], first: int, rank: int | None
) -> Iterator[Iterator[Decoded | DSQError]]:
    """Steps, read and decoded by a thread some steps ahead of who takes them; an error is the last."""
    waiting: queue.Queue[Decoded | DSQError | BaseException | None] = queue.Queue(_AHEAD)
    stop = threading.Event()

    def put(item: Decoded | DSQError | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        last: Sequence[Segment] = ()
        try:
            for number, found in enumerate(course, first):
                for segment in last:
                    if segment not in found:
                        segment.close()
                last = found
                if not put(_decoded(number, found, rank)):
                    break
            put(None)
        except BaseException as error:
            put(error)
        finally:
            for segment in last:
                segment.close()

    def steps() -> Iterator[Decoded | DSQError]:
        while (item := waiting.get()) is not None:
            if isinstance(item, DSQError):
                yield item
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=work, name="read", daemon=True)
    thread.start()
    try:
        yield steps()
    finally:
        stop.set()
        thread.join()


def _decoded(number: int, found: Sequence[Segment], rank: int | None) -> Decoded:
    gradients: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    hyper, after = found[0].after(number)
    for segment in found:
        if rank in (None, segment.rank):
            gradients |= segment.gradients(number)
        if segment.steps[number].get("buffers"):
            buffers |= segment.buffers(number)
    return Decoded(number, hyper, after, gradients, buffers)
