"""Pairwise merging of logged steps of a linear optimizer: SGD with momentum, weight decay and Nesterov momentum.

LowDiff (section VII-A, figure 10) merges differentials with each other in pairs, so that about log2 n instead of n
merges involve the full state. This requires that a step is an affine map of the state: per element, with parameter p,
momentum buffer v and gradient g,

    (p', v') = A (p, v) + b g

with a 2 x 2 matrix A and a vector b that are the same for all elements of a group. A sequence of steps is an affine map
too: one matrix, and an offset of (p, v) that is zero where all gradients of the sequence are zero. Two consecutive maps
merge into the matrix A2 A1 and the offset A2 (dp1, dv1) + (dp2, dv2).

The result equals a replay up to rounding, not bit for bit: sums are computed in another order, and in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from dsq_ckpt.core.workers import submit
from dsq_ckpt.engine.tied import share_memory
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.plain_data import from_plain
from dsq_ckpt.lowdiff.train_state import TrainState

_MOMENTUM_KEY = "momentum_buffer"
Matrix = tuple[tuple[float, float], tuple[float, float]]


class StepMap(NamedTuple):
    """The affine map of consecutive steps of one parameter.

    Attributes:
        matrix: matrix A.
        indices: ascending int64 indices of the elements with an offset; None for all elements.
        offsets: float64[2, len(indices)], offsets of p and of v.
    """

    matrix: Matrix
    indices: torch.Tensor | None
    offsets: torch.Tensor


def check_linear(optimizer: torch.optim.Optimizer) -> None:
    """Check that steps of an optimizer can be merged.

    Raises:
        ConfigError: steps of the optimizer are not linear, or one parameter lies in the memory of another.
    """
    kind = type(optimizer)
    if kind is not torch.optim.SGD:
        raise ConfigError(
            f"steps of {kind.__name__} cannot be merged, since they are not linear; only those of SGD are. Recover "
            "with merge=False, which replays them"
        )
    if share_memory(parameter for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "steps cannot be merged, since two parameters of the optimizer share memory, and each moves the other. "
            "Recover with merge=False, which replays them"
        )


class StepMerger:
    """A context manager that collects steps of SGD, and applies them to the train state on exit.

    Args:
        train_state: model with an SGD optimizer, in the state before the first step; changed in place.
        threads: number of threads over which parameters are distributed.

    Attributes:
        merges: largest number of merges with the full state of a parameter.

    Raises:
        ConfigError: steps of the optimizer are not linear.
    """

    def __init__(self, train_state: TrainState, threads: int) -> None:
        check_linear(train_state.optimizer)
        self._train_state = train_state
        self._threads = threads
        self._maps: dict[str, list[StepMap]] = {name: [] for name in train_state.parameters}
        self._momentum = {name: self._momentum_buffer(name) is not None for name in train_state.parameters}
        self.merges = 0

    def __enter__(self) -> StepMerger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        with ThreadPoolExecutor(max(self._threads, 1), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            merges = [submit(pool, self._merge, name) for name in self._maps]
            self.merges = max((future.result() for future in merges), default=0)

    def step(self, hyper: Sequence[Mapping[str, Any]], gradients: Mapping[str, torch.Tensor]) -> None:
        """Add a step.

        Args:
            hyper: hyperparameters of each group.
            gradients: flat gradient of each parameter.
        """
        groups = [{key: from_plain(value) for key, value in group.items()} for group in hyper]
        for name, gradient in gradients.items():
            group = groups[self._train_state.group_of(name)]
            self._maps[name].append(_sgd_step_map(group, gradient, self._momentum[name]))
            self._momentum[name] = self._momentum[name] or bool(group["momentum"])

    def _momentum_buffer(self, name: str) -> torch.Tensor | None:
        state = self._train_state.optimizer.state[self._train_state.parameters[name]]
        buffer: torch.Tensor | None = state.get(_MOMENTUM_KEY)
        return buffer

    def _merge(self, name: str) -> int:
        """Apply the collected steps to one parameter; return the number of merges with its full state."""
        maps = self._maps[name]
        if not maps:
            return 0
        parameter, old = self._train_state.parameters[name], self._momentum_buffer(name)
        flat = parameter.detach().cpu().double().reshape(-1)
        values = torch.stack([flat, torch.zeros_like(flat) if old is None else old.cpu().double().reshape(-1)])
        count = _merge_maps(values, maps)
        with torch.no_grad():
            parameter.copy_(values[0].view(parameter.shape))
        buffer = torch.empty_like(parameter).copy_(values[1].view(parameter.shape)) if self._momentum[name] else None
        self._train_state.optimizer.state[parameter][_MOMENTUM_KEY] = buffer
        return count


def _sgd_step_map(settings: Mapping[str, Any], gradient: torch.Tensor, has_momentum: bool) -> StepMap:
    """Return one step of torch.optim.SGD as a map.

    Args:
        settings: hyperparameters of the parameter's group.
        gradient: flat gradient.
        has_momentum: True if the parameter has a momentum buffer before the step.
    """
    rate, momentum = float(settings["lr"]), float(settings["momentum"])
    decay, sign = float(settings["weight_decay"]), -1.0 if settings["maximize"] else 1.0
    # d = sign g + decay p; v' = momentum v + undamped d; the first buffer is d itself.
    undamped = 1.0 - float(settings["dampening"]) if has_momentum else 1.0
    if momentum:
        carried = momentum if has_momentum else 0.0
        ahead = momentum if settings["nesterov"] else 0.0
        direct = 1.0 if settings["nesterov"] else 0.0
        scale = ahead if settings["nesterov"] else 1.0
        # p' = p - rate (direct d + scale v')
        matrix = (
            (1.0 - rate * (direct + scale * undamped) * decay, -rate * scale * carried),
            (undamped * decay, carried),
        )
        vector = (-rate * (direct + scale * undamped) * sign, undamped * sign)
    else:
        matrix = ((1.0 - rate * decay, 0.0), (0.0, 1.0))
        vector = (-rate * sign, 0.0)
    flat = gradient.double()
    indices = flat.nonzero().view(-1)
    if 4 * len(indices) > len(flat):
        return StepMap(matrix, None, torch.stack([vector[0] * flat, vector[1] * flat]))
    nonzero = flat[indices]
    return StepMap(matrix, indices, torch.stack([vector[0] * nonzero, vector[1] * nonzero]))


def _merge_maps(values: torch.Tensor, maps: list[StepMap]) -> int:
    """Apply maps to (p, v), float64[2, n]; return the number of rounds.

    Each round merges the first map into the state, and the others in pairs (figure 10).
    """
    count = 0
    while maps:
        first, rest = maps[0], maps[1:]
        _apply_map(values, first)
        count += 1
        maps = [_compose(*rest[start : start + 2]) for start in range(0, len(rest), 2)]
    return count


def _apply_map(values: torch.Tensor, step_map: StepMap) -> None:
    values.copy_(torch.tensor(step_map.matrix, dtype=torch.float64) @ values)
    if step_map.indices is None:
        values += step_map.offsets
    else:
        values[:, step_map.indices] += step_map.offsets


def _compose(first: StepMap, second: StepMap | None = None) -> StepMap:
    """Return the composition of two consecutive maps."""
    if second is None:
        return first
    second_matrix = torch.tensor(second.matrix, dtype=torch.float64)
    product = (second_matrix @ torch.tensor(first.matrix, dtype=torch.float64)).tolist()
    matrix = ((product[0][0], product[0][1]), (product[1][0], product[1][1]))
    mapped = second_matrix @ first.offsets
    if first.indices is None or second.indices is None:
        if first.indices is None:
            dense, indices, sparse = mapped, second.indices, second.offsets
        else:
            dense, indices, sparse = second.offsets.clone(), first.indices, mapped
        if indices is None:
            return StepMap(matrix, None, dense + sparse)
        dense[:, indices] += sparse
        return StepMap(matrix, None, dense)
    indices, inverse = torch.unique(torch.cat([first.indices, second.indices]), return_inverse=True)
    offsets = torch.zeros(2, len(indices), dtype=torch.float64)
    offsets[:, inverse[: len(first.indices)]] += mapped
    offsets[:, inverse[len(first.indices) :]] += second.offsets
    return StepMap(matrix, indices, offsets)
