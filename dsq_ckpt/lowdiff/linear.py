"""Pairwise merging of logged steps where the optimizer is linear: SGD, with momentum, weight decay and Nesterov's step.

LowDiff (section VII-A, figure 10) merges differentials with each other in pairs, and so with the full state about
log2 n times instead of n. That is possible where a step is an affine map of the state: per element, with parameter p,
momentum buffer v and gradient g,

    (p', v') = A (p, v) + b g

with a 2 x 2 matrix A and a vector b that are the same for all elements of a group. A sequence of steps is such a map
too: one matrix, and an offset of p and v, which is zero where all gradients of the sequence are zero. Two consecutive
maps merge into one: A2 A1, and A2 (dp1, dv1) + (dp2, dv2).

The result equals a replay up to rounding, not bit for bit: sums are taken in another order, and in float64.
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


class StepMap(NamedTuple):
    """The affine map of consecutive steps of one parameter.

    Attributes:
        matrix: matrix A.
        places: ascending int64 indices of the elements with an offset; None for all elements.
        added: float64[2, len(places)], offsets of p and of v.
    """

    matrix: Matrix
    places: torch.Tensor | None
    added: torch.Tensor


def check_linear(optimizer: torch.optim.Optimizer) -> None:
    """Check that steps of an optimizer can be merged.

    Raises:
        ConfigError: its steps are not linear.
    """
    kind = type(optimizer)
    if kind is not torch.optim.SGD:
        raise ConfigError(
            f"steps of {kind.__name__} cannot be merged, since they are not linear; only those of SGD are. Recover "
            "with merge=False, which replays them"
        )


class Merging:
    """A context manager that collects steps of SGD, and merges them on exit.

    Args:
        train_state: model with an SGD optimizer, in the state before the first step; changed in place.
        threads: number of threads over which parameters are distributed.

    Attributes:
        merges: largest number of merges with the full state of any parameter.

    Raises:
        ConfigError: the optimizer's step is not linear.
    """

    def __init__(self, train_state: TrainState, threads: int) -> None:
        check_linear(train_state.optimizer)
        self._train_state = train_state
        self._threads = threads
        self._maps: dict[str, list[StepMap]] = {name: [] for name in train_state.parameters}
        self._momentum = {name: self._buffer(name) is not None for name in train_state.parameters}
        self.merges = 0

    def __enter__(self) -> Merging:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        with ThreadPoolExecutor(max(self._threads, 1), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            self.merges = max(pool.map(self._merge, self._maps), default=0)

    def step(self, hyper: Sequence[Mapping[str, Any]], gradients: Mapping[str, torch.Tensor]) -> None:
        """Add a step, given the hyperparameters of each group and the flat gradients by parameter."""
        settings = [{key: from_plain(value) for key, value in group.items()} for group in hyper]
        for name, gradient in gradients.items():
            own = settings[self._train_state.group_of(name)]
            self._maps[name].append(_step(own, gradient, self._momentum[name]))
            self._momentum[name] = self._momentum[name] or bool(own["momentum"])

    def _buffer(self, name: str) -> torch.Tensor | None:
        state = self._train_state.optimizer.state[self._train_state.parameters[name]]
        found: torch.Tensor | None = state.get(_MOMENTUM)
        return found

    def _merge(self, name: str) -> int:
        maps = self._maps[name]
        if not maps:
            return 0
        parameter, old = self._train_state.parameters[name], self._buffer(name)
        flat = parameter.detach().cpu().double().reshape(-1)
        values = torch.stack([flat, torch.zeros_like(flat) if old is None else old.cpu().double().reshape(-1)])
        count = _merged(values, maps)
        with torch.no_grad():
            parameter.copy_(values[0].view(parameter.shape))
        buffer = torch.empty_like(parameter).copy_(values[1].view(parameter.shape)) if self._momentum[name] else None
        self._train_state.optimizer.state[parameter][_MOMENTUM] = buffer
        return count


def _step(settings: Mapping[str, Any], gradient: torch.Tensor, started: bool) -> StepMap:
    """Return one step of torch.optim.SGD as a map; `started` says whether there is a momentum buffer."""
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
        return StepMap(matrix, None, torch.stack([vector[0] * flat, vector[1] * flat]))
    picked = flat[places]
    return StepMap(matrix, places, torch.stack([vector[0] * picked, vector[1] * picked]))


def _merged(values: torch.Tensor, maps: list[StepMap]) -> int:
    """Apply maps to (p, v): in each round, merge the first into the state and the others in pairs (figure 10)."""
    count = 0
    while maps:
        first, rest = maps[0], maps[1:]
        _apply(values, first)
        count += 1
        maps = [_pair(*rest[place : place + 2]) for place in range(0, len(rest), 2)]
    return count


def _apply(values: torch.Tensor, step_map: StepMap) -> None:
    values.copy_(torch.tensor(step_map.matrix, dtype=torch.float64) @ values)
    if step_map.places is None:
        values += step_map.added
    else:
        values[:, step_map.places] += step_map.added


def _pair(one: StepMap, other: StepMap | None = None) -> StepMap:
    """Return the composition of two consecutive maps."""
    if other is None:
        return one
    later = torch.tensor(other.matrix, dtype=torch.float64)
    product = (later @ torch.tensor(one.matrix, dtype=torch.float64)).tolist()
    matrix = ((product[0][0], product[0][1]), (product[1][0], product[1][1]))
    moved = later @ one.added
    if one.places is None or other.places is None:
        if one.places is None:
            whole, places, part = moved, other.places, other.added
        else:
            whole, places, part = other.added.clone(), one.places, moved
        if places is None:
            return StepMap(matrix, None, whole + part)
        whole[:, places] += part
        return StepMap(matrix, None, whole)
    places, back = torch.unique(torch.cat([one.places, other.places]), return_inverse=True)
    added = torch.zeros(2, len(places), dtype=torch.float64)
    added[:, back[: len(one.places)]] += moved
    added[:, back[len(one.places) :]] += other.added
    return StepMap(matrix, places, added)
