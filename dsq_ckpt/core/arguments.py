"""Checks of the types of arguments of public functions, with error messages of one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dsq_ckpt.errors import ConfigError


def expect(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Check the type of an argument.

    Args:
        name: name of the argument.
        value: value of the argument.
        kinds: classes, as for `isinstance`.
        expected: description of these classes, for the message.

    Raises:
        ConfigError: the value has another type.
    """
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} is {format_value(value)}, expected {expected}")


def expect_flags(**flags: Any) -> None:
    """Check that arguments are True or False. Any text, such as "no", would count as True.

    Args:
        flags: values of the arguments by their names.

    Raises:
        ConfigError: one has another type.
    """
    for name, value in flags.items():
        expect(name, value, bool | np.bool_, "True or False")


def expect_path(name: str, value: Any) -> None:
    """Check that an argument is a path.

    Raises:
        ConfigError: it is not a path.
    """
    expect(name, value, (str, os.PathLike), "the directory of a checkpoint, as a str or a Path")


def expect_run(run: Any) -> None:
    """Check that an argument is the path of a run.

    Raises:
        ConfigError: it is not a path.
    """
    expect("run", run, (str, os.PathLike), "the directory of a run, as a str or a Path")


def expect_on_save(on_save: Any) -> None:
    """Check the callback for committed checkpoints.

    Raises:
        ConfigError: it is not callable.
    """
    expect("on_save", on_save, Callable | None, "a function of a SaveResult")


def expect_extra(extra: Any) -> None:
    """Check the state that is saved or loaded in addition to model and optimizer.

    Raises:
        ConfigError: it is not a dict.
    """
    expect("extra", extra, Mapping | None, "a dict, such as {'step': 500}")


def expect_folds(evaluate: Any, check: Any) -> None:
    """Check the functions that evaluate a model for a search.

    Raises:
        ConfigError: one of them is not callable, or there is `check` without `evaluate`.
    """
    expect("evaluate", evaluate, Callable | None, "a function that gives the metric of the model as it is")
    expect("check", check, Callable | None, "a function that gives the same metric on other batches")
    if check is not None and evaluate is None:
        raise ConfigError("check needs evaluate: it confirms what a search chooses by `evaluate`")


def format_value(value: Any) -> str:
    """Return the text of a number or string, shortened, or the class of another value, for messages."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"of class {type(value).__name__}"
