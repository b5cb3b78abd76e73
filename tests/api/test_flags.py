"""Every flag of a public function is True or False: any text, such as "no", would count as True."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import ConfigError
from dsq_ckpt.storage.manifest import Manifest

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

MODULES = {  # by the package that each needs
    "dsq_ckpt": "torch", "dsq_ckpt.lowdiff": "torch", "dsq_ckpt.convert.export": "torch",
    "dsq_ckpt.deepspeed": "deepspeed", "dsq_ckpt.deepspeed.export": "deepspeed",
    "dsq_ckpt.integrations.accelerate": "accelerate", "dsq_ckpt.integrations.huggingface": "transformers",
    "dsq_ckpt.integrations.lightning": "lightning", "dsq_ckpt.integrations.torchft": "torchft",
    "dsq_ckpt.integrations.torchtitan": "torchtitan",
}
KNOWN = {
    "dsq_ckpt": {
        "save.overwrite", "save.pinned", "save.no_dist", "async_save.processes", "load.allow_cast", "load.no_dist",
        "Compressor.frozen", "Compressor.save.background", "Compressor.load.allow_cast", "DSQStorageWriter.pinned",
        "DSQStorageReader.allow_cast", "compress.overwrite", "explore.overwrite", "merge.keyframe",
    },
    "dsq_ckpt.lowdiff": {"recover.replay_log", "recover.partial", "recover.memory", "recover.merge"},
    "dsq_ckpt.convert.export": {"export_torch.allow_pickle", "export_dcp.overwrite"},
    "dsq_ckpt.deepspeed": {"recover.replay_log"},
    "dsq_ckpt.deepspeed.export": {"export_deepspeed.overwrite"},
    "dsq_ckpt.integrations.huggingface": {"attach.asynchronous"},
    "dsq_ckpt.integrations.lightning": {"DSQCheckpointIO.pinned", "DSQModelParallelStrategy.pinned"},
    "dsq_ckpt.integrations.torchtitan": {"DSQCheckpointManager.Config.pinned"},
}
"""Flags that an inspection has to find, by module."""


def find_flags(module: Any) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield the name of each flag, the function or class that takes it, and its name there."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", own):
        value = getattr(module, name)
        if callable(value) and not name.startswith("_"):
            yield from find_flags_of_class(name, value) if inspect.isclass(value) else find_flags_of_call(name, value)


def find_flags_of_call(name: str, call: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any], str]]:
    for flag, parameter in inspect.signature(call).parameters.items():
        if parameter.annotation in (bool, "bool") and parameter.default is not parameter.empty:
            yield f"{name}.{flag}", call, flag


def find_flags_of_class(name: str, kind: type) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield the flags of a constructor and of methods, without those that classes of other packages define."""
    foreign = [base for base in kind.__mro__[1:] if not base.__module__.startswith("dsq_ckpt")]
    if dataclasses.is_dataclass(kind):
        if kind.__name__ == "Config":  # others are results
            own = vars(kind)["__annotations__"]
            yield from (found for found in find_flags_of_call(name, kind) if found[2] in own)
        return
    for method, value in vars(kind).items():
        if method == "__init__":
            yield from ((found, kind, flag) for found, _, flag in find_flags_of_call(name, value))
        elif method == "Config":
            yield from find_flags_of_class(f"{name}.Config", value)
        elif inspect.isfunction(value) and method[0] != "_" and not any(hasattr(base, method) for base in foreign):
            for found, _, flag in find_flags_of_call(f"{name}.{method}", value):
                yield found, partial(call_method, kind, method), flag


def call_method(kind: type, method: str, path: Any, **flags: Any) -> Any:
    return getattr(kind(nn.Linear(2, 2)), method)(path, **flags)


def make_arguments(call: Callable[..., Any], path: Any) -> dict[str, Any]:
    """Return valid arguments for all parameters without a default."""
    model = nn.Linear(2, 2)
    values = {
        "state_dict": {"w": torch.ones(3)}, "path": path / "new", "source": path / "saved", "target": path / "new",
        "file": path / "new.pt", "directory": path / "new", "evaluate": lambda: 1.0, "model": model, "engine": None,
        "optimizer": torch.optim.SGD(model.parameters()), "run": path / "run",
    }
    signature = inspect.signature(call).parameters
    if "trainer" in signature:
        trainer = importlib.import_module("transformers").Trainer
        values["trainer"] = trainer.__new__(trainer)
    return {
        name: values[name] for name, parameter in signature.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }


@pytest.mark.filterwarnings("ignore")  # of the other packages
@pytest.mark.parametrize("module", MODULES)
def test_a_flag_that_is_no_bool_is_refused_before_anything_is_done(tmp_path, module):
    pytest.importorskip(MODULES[module])
    dsq_ckpt.save({"w": torch.ones(3)}, tmp_path / "saved")
    before = sorted(tmp_path.rglob("*"))
    flags = list(find_flags(importlib.import_module(module)))
    assert {name for name, *_ in flags} >= KNOWN.get(module, set())
    for name, call, flag in flags:
        for value in ("no", None, 2):
            with pytest.raises(ConfigError) as caught:
                call(**make_arguments(call, tmp_path), **{flag: value})
            assert str(caught.value) == f"{flag} is {value!r}, expected True or False", name
        assert sorted(tmp_path.rglob("*")) == before, name


def test_flags_of_numpy_are_bools(tmp_path):
    state = {"w": torch.ones(3)}
    for _ in range(2):
        dsq_ckpt.save(state, tmp_path / "a", overwrite=np.True_, pinned=np.True_, no_dist=np.False_)
    assert Manifest.read(tmp_path / "a").pinned is True
    dsq_ckpt.load({"w": torch.ones(3, dtype=torch.float64)}, tmp_path / "a", allow_cast=np.True_)
