"""A recovery that fails leaves everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsq_ckpt.lowdiff.train_state import STRUCTURE, TrainState


@contextmanager
def unchanged_on_failure(subject: TrainState) -> Iterator[None]:
    """Put tensors, hyperparameters and states back as they were if what is done in here fails.

    That takes a copy of the subject in host memory meanwhile. What a log says can be wrong in ways that only the
    optimizer or a scheduler finds, in the middle of a step.
    """
    optimizer = subject.optimizer
    tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for _, tensor, _ in subject.tensors()]
    state = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    groups = [_hyper(group) for group in optimizer.param_groups]
    states = {name: copy.deepcopy(one.state_dict()) for name, one in subject.states.items()}
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(state)
        with torch.no_grad():
            for tensor, kept in tensors:
                tensor.copy_(kept)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for key in set(group) - set(before) - STRUCTURE:
                del group[key]
            for key, value in before.items():
                own = group.get(key)
                if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                    own.copy_(value)
                else:
                    group[key] = value
        for name, one in subject.states.items():
            one.load_state_dict(states[name])
        raise


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in STRUCTURE}
