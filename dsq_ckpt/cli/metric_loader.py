"""Loading of the model and its metric for the option `--evaluate MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from dsq_ckpt.errors import ConfigError, described


def load_metric(spec: str) -> tuple[nn.Module, Callable[[], float]]:
    """Call a user's function that returns a model and a function without arguments that evaluates its metric.

    Args:
        spec: `package.module:function`; modules of the working directory are found too.

    Raises:
        ConfigError: the function does not exist, raises an error, or returns anything else.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ConfigError(f"--evaluate is '{spec}'; expected MODULE:FUNCTION, such as my_model:judge")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the module is the user's, and may raise anything
        raise ConfigError(f"--evaluate {spec}: cannot be imported: {described(error)}") from error
    try:
        returned = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--evaluate {spec}: the function raised {described(error)}") from error
    pair = isinstance(returned, tuple) and len(returned) == 2
    if not (pair and isinstance(returned[0], nn.Module) and callable(returned[1])):
        raise ConfigError(
            f"--evaluate {spec}: the function returned {type(returned).__name__}; expected the model and a function "
            "without arguments that returns its metric: `return model, lambda: loss(model)`"
        )
    model, metric = returned
    return model, metric
