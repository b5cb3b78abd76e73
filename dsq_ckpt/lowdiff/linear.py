"""Pairwise merging of logged steps where the optimizer is linear: SGD, with momentum, weight decay and Nesterov's step.

LowDiff (section VII-A, figure 10) merges differentials with each other in pairs, and so with the full state about
log2 n times instead of n. That is possible where a step is an affine map of the state: per element, with parameter p,
momentum buffer v and gradient g,

    (p', v') = A (p, v) + b g

with a 2 x 2 matrix A and a vector b that are the same for all elements of a group. A run of steps is such a map too:
one matrix, and what it adds to p and v, which is zero where no gradient of the run was. Two runs in a row merge into
one: A2 A1, and A2 (dp1, dv1) + (dp2, dv2).

What comes out equals a replay up to rounding, not bit for bit: sums are taken in another order, and in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.plain import from_plain
from dsq_ckpt.lowdiff.train_state import TrainState

_MOMENTUM = "momentum_buffer"
Matrix = tuple[tuple[float, float], tuple[float, float]]


class Run(NamedTuple):
    """What consecutive steps do to one parameter.

    Attributes:
        matrix: A.
        places: int64, ascending: elements to which something is added; None: all.
        added: float64 (2, len(places)): what is added to p and to v.
    """

    matrix: Matrix
    places: torch.Tensor | None
    added: torch.Tensor


def check_linear(optimizer: torch.optim.Optimizer) -> None:
    """Whether steps of an optimizer can be merged.

    Raises:
        ConfigError: they are not linear.
    """
    kind = type(optimizer)
    if kind is not torch.optim.SGD:
        raise ConfigError(
            f"steps of {kind.__name__} cannot be merged, since they are not linear; only those of SGD are. Recover "
            "with merge=False, which replays them"
        )


class Merging:
    """Steps of SGD, taken one by one and merged at the end; a context manager.

    Args:
        subject: with an SGD optimizer, in the state before the first step; changed in place.
        threads: that merge parameters at the same time.

    Attributes:
        merges: with the full state, of the parameter that took the most.

    Raises:
        ConfigError: the optimizer's step is not linear.
    """

    def __init__(self, subject: TrainState, threads: int) -> None:
        check_linear(subject.optimizer)
        self._subject = subject
        self._threads = threads
        self._runs: dict[str, list[Run]] = {name: [] for name in subject.parameters}
        self._momentum = {name: self._buffer(name) is not None for name in subject.parameters}
        self.merges = 0

    def __enter__(self) -> Merging:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        with ThreadPoolExecutor(max(self._threads, 1), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            self.merges = max(pool.map(self._merge, self._runs), default=0)

    def step(self, hyper: Sequence[Mapping[str, Any]], gradients: Mapping[str, torch.Tensor]) -> None:
        """Take a step: hyperparameters of the groups, and flat gradients by parameter."""
        settings = [{key: from_plain(value) for key, value in group.items()} for group in hyper]
        for name, gradient in gradients.items():
            own = settings[self._subject.group_of(name)]
            self._runs[name].append(_step(own, gradient, self._momentum[name]))
            self._momentum[name] = self._momentum[name] or bool(own["momentum"])

    def _buffer(self, name: str) -> torch.Tensor | None:
        found: torch.Tensor | None = self._subject.optimizer.state[self._subject.parameters[name]].get(_MOMENTUM)
        return found

    def _merge(self, name: str) -> int:
        runs = self._runs[name]
        if not runs:
            return 0
        parameter, old = self._subject.parameters[name], self._buffer(name)
        flat = parameter.detach().cpu().double().reshape(-1)
        values = torch.stack([flat, torch.zeros_like(flat) if old is None else old.cpu().double().reshape(-1)])
        count = _merged(values, runs)
        with torch.no_grad():
            parameter.copy_(values[0].view(parameter.shape))
        buffer = torch.empty_like(parameter).copy_(values[1].view(parameter.shape)) if self._momentum[name] else None
        self._subject.optimizer.state[parameter][_MOMENTUM] = buffer
        return count


def _step(settings: Mapping[str, Any], gradient: torch.Tensor, started: bool) -> Run:
    """One step of torch.optim.SGD as a map; `started`: there is a momentum buffer."""
    rate, momentum = float(settings["lr"]), float(settings["momentum"])
    decay, sign = float(settings["weight_decay"]), -1.0 if settings["maximize"] else 1.0
    # d = sign g + decay p; v' = momentum v + kept d; the first buffer is d itself.
    kept = 1.0 - float(settings["dampening"]) if started else 1.0
    if momentum:
        carried = momentum if started else 0.0
        ahead = momentum if settings["nesterov"] else 0.0
        direct = 1.0 if settings["nesterov"] else 0.0
        scale = ahead if settings["nesterov"] else 1.0
        # p' = p - rate (direct d + scale v')
        matrix = (
            (1.0 - rate * (direct + scale * kept) * decay, -rate * scale * carried),
            (kept * decay, carried),
        )
        vector = (-rate * (direct + scale * kept) * sign, kept * sign)
    else:
        matrix = ((1.0 - rate * decay, 0.0), (0.0, 1.0))
        vector = (-rate * sign, 0.0)
    flat = gradient.double()
    places = flat.nonzero().view(-1)
    if 4 * len(places) > len(flat):
        return Run(matrix, None, torch.stack([vector[0] * flat, vector[1] * flat]))
    picked = flat[places]
    return Run(matrix, places, torch.stack([vector[0] * picked, vector[1] * picked]))


def _merged(values: torch.Tensor, runs: list[Run]) -> int:
    """Apply runs to (p, v): the first to the state, the others to each other, until none is left (figure 10)."""
    count = 0
    while runs:
        first, rest = runs[0], runs[1:]
        _apply(values, first)
        count += 1
        runs = [_pair(*rest[place : place + 2]) for place in range(0, len(rest), 2)]
    return count


def _apply(values: torch.Tensor, run: Run) -> None:
    values.copy_(torch.tensor(run.matrix, dtype=torch.float64) @ values)
    if run.places is None:
        values += run.added
    else:
        values[:, run.places] += run.added


def _pair(one: Run, other: Run | None = None) -> Run:
    """Two runs in a row as one."""
    if other is None:
        return one
    later = torch.tensor(other.matrix, dtype=torch.float64)
    product = (later @ torch.tensor(one.matrix, dtype=torch.float64)).tolist()
    matrix = ((product[0][0], product[0][1]), (product[1][0], product[1][1]))
    moved = later @ one.added
    if one.places is None or other.places is None:
        whole, part = (moved, other) if one.places is None else (other.added.clone(), Run(matrix, one.places, moved))
        if part.places is None:
            return Run(matrix, None, whole + part.added)
        whole[:, part.places] += part.added
        return Run(matrix, None, whole)
    places, back = torch.unique(torch.cat([one.places, other.places]), return_inverse=True)
    added = torch.zeros(2, len(places), dtype=torch.float64)
    added[:, back[: len(one.places)]] += moved
    added[:, back[len(one.places) :]] += other.added
    return Run(matrix, places, added)
