"""`--evaluate MODULE:FUNCTION`: the model and the metric that a search of the command line goes by."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from dsq_ckpt.errors import ConfigError, described


def judge(given: str) -> tuple[nn.Module, Callable[[], float]]:
    """Call a function of the user's, which returns a model and what gives its metric.

    Args:
        given: `package.module:function`; modules of the working directory are found too.

    Raises:
        ConfigError: there is no such function, or it fails, or returns anything else.
    """
    module, _, name = given.partition(":")
    if not module or not name:
        raise ConfigError(f"--evaluate is '{given}'; expected MODULE:FUNCTION, such as my_model:judge")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the module is the user's, and may raise anything
        raise ConfigError(f"--evaluate {given}: cannot be imported: {described(error)}") from error
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--evaluate {given}: the function raised {described(error)}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ConfigError(
            f"--evaluate {given}: the function returned {type(made).__name__}; expected the model and a function "
            "without arguments that returns its metric: `return model, lambda: loss(model)`"
        )
    return made
