"""Replay of the optimizer's steps with logged gradients.

The same optimizer does the same arithmetic on the same numbers, so the result is bit for bit the state of training.
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

from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.core.workers import submit
from dsq_ckpt.engine.tied import share_memory
from dsq_ckpt.errors import DSQError
from dsq_ckpt.lowdiff.segments import LogSegment
from dsq_ckpt.lowdiff.step_merging import StepMerger
from dsq_ckpt.lowdiff.train_state import TrainState

_PREFETCHED_STEPS = 4
_INDEPENDENT_OPTIMIZERS = frozenset({
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor",
})
"""Optimizers of torch.optim that update each parameter independently, so that a subset can be replayed exactly."""


class DecodedStep(NamedTuple):
    """A decoded step; `hyper` is None if the optimizer made no step."""

    number: int
    hyper: list[dict[str, Any]] | None
    after: dict[str, Any]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


class ReplayResult(NamedTuple):
    """The result of a replay.

    Attributes:
        steps: number of replayed steps.
        hyper: hyperparameters of each group after the last step.
        states: states of schedulers and the like after the last step.
        buffers: buffers of the model after the last step.
        ended: why the replay ended early; None if it did not.
        drew: True if the optimizer drew random numbers, which are others than in training.
    """

    steps: int
    hyper: list[dict[str, Any]]
    states: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    ended: str | None
    drew: bool


def replay(
    train_state: TrainState, log_steps: Sequence[Sequence[LogSegment]], first: int, threads: int, merge: bool = False,
    rank: int | None = None,
) -> ReplayResult:
    """Replay steps in place, up to the last readable step.

    Args:
        train_state: train state before the first step.
        log_steps: segments of each step; see `segments.replayable_steps`.
        first: number of the first step.
        threads: number of threads over which parameters on the CPU are distributed, if the optimizer updates each
            independently.
        merge: merge the steps instead; see `step_merging`.
        rank: rank whose share of the parameters is replayed; None for all parameters.

    Raises:
        ConfigError: the optimizer's steps cannot be merged.
    """
    names = owned_parameters(train_state, log_steps, rank)
    method = StepMerger(train_state, threads) if merge else _ShardedOptimizer(train_state, names, threads)
    watched = not merge and not updates_independently(train_state.optimizer)
    count, ended, drew = 0, None, False
    hyper: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    buffers: dict[str, torch.Tensor] = {}
    with method, _prefetch_steps(log_steps, first, rank) as steps:
        for step in steps:
            run_pending_handlers()
            if isinstance(step, DSQError):
                ended = f"step {first + count} cannot be read: {step}"
                break
            if step.hyper is not None:
                before = _get_random_states(train_state) if watched and not drew else []
                with log_steps[count][0].translate_errors(first + count):
                    method.step(step.hyper, step.gradients)
                if before:
                    drew = not all(map(torch.equal, before, _get_random_states(train_state)))
            count += 1
            hyper, states = step.after["hyper"] or step.hyper or hyper, step.after["states"]
            buffers |= step.buffers
    return ReplayResult(count, hyper, states, buffers, ended, drew)


def _get_random_states(train_state: TrainState) -> list[torch.Tensor]:
    """Return the states of torch's random generators of the CPU and of the parameters' GPUs."""
    gpus = {parameter.device for parameter in train_state.parameters.values() if parameter.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in sorted(gpus, key=str))]


def owned_parameters(train_state: TrainState, log_steps: Sequence[Sequence[LogSegment]], rank: int | None) -> list[str]:
    """Return the names of the parameters that a rank logged, or of all if `rank` is None or there are no steps."""
    if rank is None or not log_steps:
        return list(train_state.parameters)
    return [entry.name for segment in log_steps[0] if segment.rank == rank for entry in segment.entries]


def updates_independently(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to update each parameter independently, none in the memory of another."""
    known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _INDEPENDENT_OPTIMIZERS
    return known and not share_memory(parameter for group in optimizer.param_groups for parameter in group["params"])


class _ShardedOptimizer:
    """An optimizer split into shards of the parameters that step in parallel."""

    def __init__(self, train_state: TrainState, own_names: Sequence[str], threads: int) -> None:
        self._train_state = train_state
        optimizer = train_state.optimizer
        on_host = all(parameter.device.type == "cpu" for parameter in train_state.parameters.values())
        count = max(min(threads, len(own_names)), 1) if on_host and updates_independently(optimizer) else 1
        partitions: list[list[str]] = [[] for _ in range(count)]
        loads = [0] * count
        for name in sorted(own_names, key=lambda name: -train_state.parameters[name].numel()):
            lightest = loads.index(min(loads))
            partitions[lightest].append(name)
            loads[lightest] += train_state.parameters[name].numel()
        if not updates_independently(optimizer):
            partitions = train_state.optimizer_calls()  # the optimizer may treat parameters of one call together
        self._shards = [
            (names, _copy_optimizer(optimizer, {train_state.parameters[name] for name in names}))
            for names in partitions
        ]
        self._pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) if count > 1 else None

    def __enter__(self) -> _ShardedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for parameter in self._train_state.parameters.values():
            parameter.grad = None

    def step(self, hyper: Sequence[dict[str, Any]], gradients: dict[str, torch.Tensor]) -> None:
        """Set the hyperparameters of all shards, and make one step with each."""
        self._train_state.set_hyper(hyper)
        if self._pool is None:
            for names, shard in self._shards:
                self._step(names, shard, gradients)
        else:
            state = self._train_state.optimizer.state
            before = len(state)
            for future in [submit(self._pool, lambda shard: self._step(*shard, gradients), s) for s in self._shards]:
                future.result()
            # Threads create new states in any order. Restore the order of the parameters, as in training.
            created = set(list(state)[before:])
            for parameter in self._train_state.parameters.values():
                if parameter in created:
                    state[parameter] = state.pop(parameter)

    def _step(
        self, names: Sequence[str], optimizer: torch.optim.Optimizer, gradients: dict[str, torch.Tensor]
    ) -> None:
        for own_group, group in zip(optimizer.param_groups, self._train_state.optimizer.param_groups, strict=True):
            own_group.update({key: value for key, value in group.items() if key != "params"})
        for name in names:
            parameter = self._train_state.parameters[name]
            flat = gradients.get(name)
            if flat is None:
                parameter.grad = None
                continue
            gradient = flat.view(parameter.shape)
            if gradient.device != parameter.device or not parameter.is_contiguous():
                gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            parameter.grad = gradient
        optimizer.step()


def _copy_optimizer(optimizer: torch.optim.Optimizer, parameters: set[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with a subset of its parameters, without hooks and wrappers of schedulers."""
    shard = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name != "step":  # copy.copy leaves out attributes of optimizers outside of torch
            shard.__dict__.setdefault(name, value)
    shard.param_groups = [
        {**group, "params": [parameter for parameter in group["params"] if parameter in parameters]}
        for group in optimizer.param_groups
    ]
    return shard


@contextmanager
def _prefetch_steps(
    log_steps: Sequence[Sequence[LogSegment]], first: int, rank: int | None
) -> Iterator[Iterator[DecodedStep | DSQError]]:
    """Yield an iterator over steps that a thread reads and decodes in advance. An error is the last item."""
    decoded: queue.Queue[DecodedStep | DSQError | BaseException | None] = queue.Queue(_PREFETCHED_STEPS)
    stop = threading.Event()

    def put(item: DecodedStep | DSQError | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                decoded.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        last: Sequence[LogSegment] = ()
        try:
            for number, segments in enumerate(log_steps, first):
                for segment in last:
                    if segment not in segments:
                        segment.close()
                last = segments
                if not put(_decode_step(number, segments, rank)):
                    break
            put(None)
        except BaseException as error:
            put(error)
        finally:
            for segment in last:
                segment.close()

    def steps() -> Iterator[DecodedStep | DSQError]:
        while (item := decoded.get()) is not None:
            if isinstance(item, DSQError):
                yield item
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=read, name="read", daemon=True)
    thread.start()
    try:
        yield steps()
    finally:
        stop.set()
        thread.join()


def _decode_step(number: int, segments: Sequence[LogSegment], rank: int | None) -> DecodedStep:
    """Decode a step, with the gradients of one rank, or of all ranks if `rank` is None."""
    gradients: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    hyper, after = segments[0].hyper_and_after(number)
    for segment in segments:
        if rank in (None, segment.rank):
            gradients |= segment.gradients(number)
        if segment.steps[number].get("buffers"):
            buffers |= segment.buffers(number)
    return DecodedStep(number, hyper, after, gradients, buffers)
