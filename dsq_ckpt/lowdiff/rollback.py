"""Rollback of a failed recovery."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.lowdiff.train_state import STRUCTURE, TrainState


@contextmanager
def rollback_on_failure(train_state: TrainState) -> Iterator[None]:
    """Restore tensors, hyperparameters and states if the body of the context raises.

    The context keeps a copy of the train state in host memory. Some errors in a log are detected only by the optimizer
    or a scheduler, in the middle of a step.
    """
    optimizer = train_state.optimizer
    tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for _, tensor, _ in train_state.tensors()]
    state = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    groups = [_copy_hyper(group) for group in optimizer.param_groups]
    states = copy.deepcopy(train_state.collect_states())
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(state)
        with torch.no_grad():
            for tensor, backup in tensors:
                tensor.copy_(backup)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for key in set(group) - set(before) - STRUCTURE:
                del group[key]
            for key, value in before.items():
                target = group.get(key)
                if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor) and target.shape == value.shape:
                    target.copy_(value)
                else:
                    group[key] = value
        for name, stateful in train_state.states.items():
            with suppress(Exception), in_user_code():  # it may have caused the error, which is raised below
                stateful.load_state_dict(states[name])
        raise


def _copy_hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in STRUCTURE}
