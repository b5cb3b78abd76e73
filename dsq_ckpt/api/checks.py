"""Refusals of a `Compressor` (searches, optimizers and models that do not go together), and state made by a step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim import Optimizer

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.errors import ConfigError, DSQError, LoadFailed


def check_search(config: DSQConfig, sharded: bool) -> None:
    """Refuse a search that does not fit the rest of the configuration, or a sharded model."""
    if config.search.parallel_trials and sharded:
        raise ConfigError(
            "search.parallel_trials is true, but the model is sharded (FSDP): its ranks evaluate together; leave "
            "parallel_trials out"
        )
    space = SYSTEMS[config.system].space
    if space is None:
        return
    try:
        config.with_values(**space.values(space.most_conservative, space.variants[0]))
    except ConfigError as error:
        raise ConfigError(
            f"the search of system '{config.system}' does not fit the configuration: {error}; choose the system whose "
            "codebook this is, or leave out `evaluate` to take the configuration as it is"
        ) from None


def check_owner(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse an optimizer of parameters that are not the model's."""
    own = {id(parameter) for parameter in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ConfigError(
                    f"the optimizer's parameter group {number} has a parameter of shape {tuple(parameter.shape)} that "
                    "is not the model's; make the optimizer after wrapping the model, from this model's parameters"
                )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer in Accelerate's or Lightning's, which has the hooks and the `step` that count.

    These have its state, and tell no other; an optimizer with a state of its own, such as Lookahead, is not only a
    wrapper.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        if getattr(optimizer, "state", None) is not inner.state:
            break
        tells = type(optimizer).state_dict is not Optimizer.state_dict
        if tells and optimizer.state_dict().keys() != inner.state_dict().keys():
            break
        optimizer = inner
    return optimizer


def check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer that `made_by_step` could not make the state of, as far as its signature tells."""
    try:
        parameters = inspect.signature(optimizer.step).parameters
    except ValueError:  # it is not written in Python
        return
    closure = parameters.get("closure")
    if closure is not None:
        fails = closure.default is inspect.Parameter.empty  # LBFGS
    else:
        fails = all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    if fails:
        raise ConfigError(_without_state(optimizer))


def has_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has state of a parameter; entries of none may be there before the first step."""
    return any(isinstance(key, torch.Tensor) for key in optimizer.state)


@contextmanager
def made_by_step(optimizer: Optimizer | None) -> Iterator[None]:
    """Say what failed where torch makes the state of an optimizer that has none yet, by `step(closure=None)`.

    Raises:
        LoadFailed: it failed.
    """
    stepped = optimizer is None or has_state(optimizer)
    try:
        yield
    except Exception as error:
        if optimizer is None or stepped or isinstance(error, DSQError):
            raise
        raise LoadFailed(f"{_without_state(optimizer)}. It failed: {type(error).__name__}: {error}") from error


@contextmanager
def as_before(optimizer: Optimizer) -> Iterator[None]:
    """Take back the state of an optimizer that has none yet, and what a step changes in its groups, if a load fails."""
    groups = [dict(group) for group in optimizer.param_groups]
    of_none = {key: copy.deepcopy(value) for key, value in optimizer.state.items() if not torch.is_tensor(key)}
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(of_none)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        raise


def make_state(optimizer: Optimizer) -> None:
    """Make the state of an optimizer that has none, as torch does it before a load: by a step that changes nothing.

    Raises:
        LoadFailed: the step fails.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with made_by_step(optimizer):
            _init_optim_state(optimizer)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _without_state(optimizer: Optimizer) -> str:
    kind = type(optimizer).__name__
    return (
        f"{kind}.step() cannot be called as step(closure=None), by which a load makes the state of an optimizer that "
        f"has not stepped yet, so {kind} cannot be restored in another process. Save and load "
        "{'model': model, 'optimizer': optimizer} by dsq_ckpt.save and dsq_ckpt.load"
    )
