"""Arguments of the public calls that are of another type than they must be, each said in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from dsq_ckpt.errors import ConfigError


def expect(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Check the type of an argument.

    Args:
        name: name of the argument.
        value: value of the argument.
        kinds: classes, as for `isinstance`.
        expected: what these are, in words.

    Raises:
        ConfigError: it is of another type.
    """
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} is {format_value(value)}, expected {expected}")


def expect_path(name: str, value: Any) -> None:
    """Check that an argument is a path.

    Raises:
        ConfigError: it is not.
    """
    expect(name, value, (str, os.PathLike), "the directory of a checkpoint, as a str or a Path")


def expect_on_save(on_save: Any) -> None:
    """Check what is to be told of each checkpoint.

    Raises:
        ConfigError: it is no function.
    """
    expect("on_save", on_save, Callable | None, "a function of a SaveResult")


def expect_extra(extra: Any) -> None:
    """Check what is to be saved or loaded beside model and optimizer.

    Raises:
        ConfigError: it is no dict.
    """
    expect("extra", extra, Mapping | None, "a dict, such as {'step': 500}")


def expect_folds(evaluate: Any, check: Any) -> None:
    """Check the functions by which a search judges a model.

    Raises:
        ConfigError: one of them is no function, or `check` has nothing to confirm.
    """
    expect("evaluate", evaluate, Callable | None, "a function that gives the metric of the model as it is")
    expect("check", check, Callable | None, "a function that gives the same metric on other batches")
    if check is not None and evaluate is None:
        raise ConfigError("check needs evaluate: it confirms what a search chooses by `evaluate`")


def format_value(value: Any) -> str:
    """Return a short value itself, or the class of a longer one, for messages."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"of class {type(value).__name__}"
