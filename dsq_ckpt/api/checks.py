"""Checks of the arguments of a `Compressor` and of its optimizer, and initialization of optimizer state by a step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim import Optimizer

from dsq_ckpt.api.optimizer_state import OptimizerProxy, get_parameter_states, list_nested_optimizers
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.core.interrupts import get_handler_error
from dsq_ckpt.core.notices import format_error_line
from dsq_ckpt.errors import ConfigError, DSQError, LoadFailed, described
from dsq_ckpt.search.trial import ModelChanged

_WRAPPER_LIBRARIES = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "ray.train.")
"""Prefixes of modules whose optimizers around others forward their state dicts."""


def check_search(config: DSQConfig, sharded: bool) -> None:
    """Raise an error if the search is incompatible with the rest of the configuration or with a sharded model.

    Raises:
        ConfigError: it is.
    """
    if config.search.parallel_trials and sharded:
        raise ConfigError(
            "search.parallel_trials is true, but the model is sharded (FSDP): its ranks evaluate together; leave "
            "parallel_trials out"
        )
    if config.quantize.weights.method == "bf16" and not config.quantize.groups:  # at a save the others are known
        raise ConfigError(
            "`evaluate` does not measure what rounding to bf16 (quantize.weights.method: bf16) costs: choose method "
            "quantize, for which a search finds steps within the bound, or exact; or leave out `evaluate`"
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


def check_parameters(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Raise an error if the optimizer has a parameter that is not one of the model's.

    Raises:
        ConfigError: it has.
    """
    parameter_ids = {id(parameter) for parameter in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in parameter_ids:
                raise ConfigError(
                    f"the optimizer's parameter group {number} has a parameter of shape {tuple(parameter.shape)} that "
                    "is not the model's; make the optimizer after wrapping the model, from this model's parameters, "
                    "and again after what replaces them, as load_state_dict(assign=True) does"
                )


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a wrapper of Accelerate, Lightning or Ray, whose `step` is the relevant one.

    Such a wrapper has the inner optimizer's state and state dict. An optimizer around another one with a state or a
    state dict of its own, such as Lookahead, is not a wrapper, even if its state dict has nothing more at the moment.
    """
    while (inner := _get_inner(optimizer)) is not None and not _overrides_state_dict(optimizer):
        optimizer = inner
    return optimizer


def find_stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the innermost optimizer with the same state, which updates parameters; others may have no step hooks."""
    while (inner := _get_inner(optimizer)) is not None:
        optimizer = inner
    return optimizer


def _get_inner(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer inside another one if they share their state."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and getattr(optimizer, "state", None) is inner.state:
        return inner
    return None


def _overrides_state_dict(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has methods of its own for its state dict, other than those of known wrappers."""
    kind = type(optimizer)
    if kind.__module__.startswith(_WRAPPER_LIBRARIES):  # Lightning derives a class from that of the inner optimizer
        return False
    return any(
        method is not original and not method.__module__.startswith(_WRAPPER_LIBRARIES) for method, original in
        ((kind.state_dict, Optimizer.state_dict), (kind.load_state_dict, Optimizer.load_state_dict))
    )


def check_step(optimizer: Optimizer) -> None:
    """Raise an error if the signature of the optimizer's `step` shows that torch cannot initialize its state.

    Raises:
        ConfigError: `step(closure=None)` would fail.
    """
    try:
        parameters = inspect.signature(optimizer.step).parameters
    except ValueError:  # not a Python function
        return
    closure = parameters.get("closure")
    if closure is None and len(list_nested_optimizers(optimizer)) > 1:  # its step is called without one
        fails = any(
            parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            for parameter in parameters.values()
        )
    elif closure is not None:
        fails = closure.default is inspect.Parameter.empty  # LBFGS
    else:
        fails = all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    if fails:
        raise ConfigError(_step_failure_message(optimizer))


def guard_optimizer(
    function: Callable[[], float] | None, name: str, optimizer: Optimizer
) -> Callable[[], float] | None:
    """Return `function` with a check that it leaves the optimizer unchanged, or it raises `ModelChanged`.

    An error of the function does not end training, so the optimizer is checked after one too.
    The check covers hyperparameters and the identities of tensors; `TrialModel` checks the values of tensors.
    """
    if function is None:
        return None

    def guarded() -> float:
        before = _fingerprint(optimizer)
        try:
            metric = function()
        except Exception as error:
            if error is not get_handler_error() and _fingerprint(optimizer) != before:
                effect = f"raised {described(error)}{format_error_line(error)}, and changed"
                raise ModelChanged(_optimizer_changed_message(name, effect)) from error
            raise
        if _fingerprint(optimizer) != before:
            raise ModelChanged(_optimizer_changed_message(name, "changed"))
        return metric

    return guarded


def _optimizer_changed_message(name: str, effect: str) -> str:
    return (
        f"`{name}` {effect} the optimizer, by its hyperparameters or by what is in its state: it must leave the "
        "optimizer as it is. It was not put back: load an earlier checkpoint before training goes on; this one "
        "was not written"
    )


def _fingerprint(optimizer: Optimizer) -> Any:
    """Return an optimizer's hyperparameters, and the identities of its parameters and of the tensors in its state."""
    def identity(value: Any) -> Any:
        if isinstance(value, Mapping):  # the state of a parameter
            return {key: identity(inner) for key, inner in value.items()}
        return id(value) if isinstance(value, torch.Tensor) else repr(value)

    return (
        [{key: identity(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
        {id(parameter): identity(state) for parameter, state in optimizer.state.items()},
    )


def has_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has state of a parameter; other entries may exist before the first step."""
    return bool(get_parameter_states(optimizer))


@contextmanager
def explain_step_failure(optimizer: Optimizer | None) -> Iterator[None]:
    """Raise an error that explains a failure of `step(closure=None)`, by which torch initializes optimizer state.

    Raises:
        LoadFailed: the block failed, and the optimizer had no state before.
    """
    stepped = optimizer is None or has_state(optimizer)
    try:
        yield
    except Exception as error:
        if optimizer is None or stepped or isinstance(error, DSQError):
            raise
        message = _step_failure_message(optimizer, at_load=True)
        raise LoadFailed(f"{message}. It failed: {type(error).__name__}: {error}") from error


@contextmanager
def reset_on_failure(optimizer: Optimizer) -> Iterator[None]:
    """Remove the state of an optimizer and restore its parameter groups, if a load into it fails.

    The optimizer has no state of parameters before.
    """
    groups = [dict(group) for group in optimizer.param_groups]
    optimizers = list_nested_optimizers(optimizer)
    parameterless = [
        {key: copy.deepcopy(value) for key, value in nested_optimizer.state.items() if not torch.is_tensor(key)}
        for nested_optimizer in optimizers
    ]
    try:
        yield
    except BaseException:
        for nested_optimizer, entries in zip(optimizers, parameterless, strict=True):
            nested_optimizer.state.clear()
            nested_optimizer.state.update(entries)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        raise


def initialize_state(optimizer: Optimizer) -> None:
    """Initialize the state of an optimizer as torch does it before a load: by a step that changes no parameter.

    Raises:
        LoadFailed: the step fails.
    """
    with without_gradients(optimizer), explain_step_failure(optimizer):
        _init_optim_state(OptimizerProxy(optimizer).as_torch_argument()[0])


@contextmanager
def without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Set the gradients aside, since torch initializes no state of an optimizer if a parameter has a gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            with suppress(RuntimeError):  # the block changed the parameter, which has no such gradient any more
                parameter.grad = gradient


def _step_failure_message(optimizer: Optimizer, *, at_load: bool = False) -> str:
    kind = type(optimizer).__name__
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):  # schedule-free optimizers
        return (
            f"{kind}.step() cannot be called as step(closure=None), by which a load makes the state of an optimizer "
            f"that has not stepped yet. If {kind} has to be in train mode to step, call its train() before the load; "
            "else save and load {'model': model, 'optimizer': optimizer} by dsq_ckpt.save and dsq_ckpt.load"
        )
    start = (
        f"{kind}.step() cannot be called as step(closure=None), by which a load makes the state of an optimizer that "
        "has not stepped yet"
    )
    by_keys = "load {'model': model, 'optimizer': optimizer} by dsq_ckpt.save and dsq_ckpt.load"
    if at_load:
        return f"{start}: take a step with gradients before the load, which replaces all of it, or save and {by_keys}"
    return f"{start}, so {kind} cannot be restored in another process. Save and {by_keys}"
