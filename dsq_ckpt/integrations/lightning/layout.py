"""Conversion of a Trainer's checkpoint dict to a nested state dict of this package, and back.

Model weights and optimizer state become tensors of the checkpoint. Optimizer state is stored under the names of its
parameters (see `parameter_names`), since moments are quantized with their weights. All other values, including tensors
of callbacks, become one exact object, the skeleton, which is loaded with `weights_only=True`.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from dsq_ckpt.api.optimizer_state import extra_entries, join_state, split_state
from dsq_ckpt.core.tensor_subclasses import refuse_cycles
from dsq_ckpt.errors import CorruptCheckpoint, DSQError, LoadFailed, SaveFailed, UnsupportedFormat, described
from dsq_ckpt.integrations.lightning.parameter_names import infer_parameter_names

ValuePath = tuple[Any, ...]
"""Dict keys and list indices that lead to a value of Lightning's dict."""
_KEY = "lightning"
_FORMAT = 1
_MODEL_STATE_KEYS = ("state_dict", "current_model_state")
"""Top-level keys of models; the second is that of Lightning's `WeightAveraging`."""


def to_state_dict(checkpoint: Mapping[str, Any], include_skeleton: bool = True) -> dict[str, Any]:
    """Return the state dict to save for a checkpoint dict of Lightning.

    Args:
        checkpoint: checkpoint dict of `Trainer`; it is not changed. Optimizer state has numbers of parameters as keys,
            as in torch's optimizers, or names, as from `get_optimizer_state`.
        include_skeleton: include the skeleton; True on one rank of a sharded save.

    Raises:
        SaveFailed: a value cannot be loaded without running code of the file.
    """
    refuse_cycles(checkpoint)
    states, model_state = checkpoint.get("optimizer_states"), checkpoint.get("state_dict")
    optimizers = [
        _NumberedOptimizerState(state, model_state if isinstance(model_state, Mapping) else {})
        for state in (states if isinstance(states, list | tuple) else ())  # another form becomes part of the skeleton
    ]
    if optimizers:
        checkpoint = {**checkpoint, "optimizer_states": [optimizer.numbered_state for optimizer in optimizers]}
    names = [optimizer.names for optimizer in optimizers]
    state: dict[str, Any] = {}
    stored_paths: list[ValuePath] = []

    def move_tensor_to_state(path: ValuePath, value: Any) -> Any:
        storage_path = _get_storage_path(path, names) if type(value) in (torch.Tensor, nn.Parameter, DTensor) else None
        if storage_path is None:
            return _to_plain_value(path, value)
        node = state
        for key in storage_path[:-1]:
            node = node.setdefault(key, {})
        node[storage_path[-1]] = value.detach()
        stored_paths.append(path)
        return None

    values = _map_values(checkpoint, move_tensor_to_state)
    if include_skeleton:
        skeleton = {"format": _FORMAT, "checkpoint": values, "tensors": stored_paths, "names": names}
        _check_loadable(skeleton)
        state[_KEY] = {"checkpoint": (skeleton,)}  # a tuple: one object for DCP
    return state


@contextmanager
def explain_load_errors(checkpoint_path: Path) -> Iterator[None]:
    """Add the checkpoint's path to load errors in this context; explain how to allow a class that the skeleton needs.

    Raises:
        LoadFailed: the skeleton holds a class that is not allowed.
    """
    try:
        yield
    except DSQError as error:
        if "is more than plain data" in str(error):  # about the skeleton, the only object
            raise LoadFailed(
                f"'{checkpoint_path}': hyperparameters, or the state of a callback, are of a class that is not allowed "
                "here: allow it by torch.serialization.add_safe_globals([...]), as the program did that saved them"
            ) from error
        if str(checkpoint_path) not in str(error):
            raise type(error)(f"'{checkpoint_path}': {error}") from error
        raise


def pop_skeleton(state: dict[str, Any]) -> CheckpointSkeleton:
    """Remove and return the skeleton of a loaded state dict.

    Raises:
        LoadFailed: Lightning did not save the checkpoint.
        UnsupportedFormat: a newer version of this package saved the checkpoint.
    """
    try:
        content = state.pop(_KEY)["checkpoint"][0]
        version = content["format"]
    except (KeyError, TypeError, IndexError) as error:
        raise LoadFailed(
            "the checkpoint was not saved by Lightning: it lacks the state of loops and callbacks; load it with "
            "dsq_ckpt.load, or save it through Trainer"
        ) from error
    if version != _FORMAT:
        raise UnsupportedFormat(f"the state of Lightning is in layout {version!r}, this dsq_ckpt reads {_FORMAT}")
    return CheckpointSkeleton(content["checkpoint"], content["tensors"], content["names"])


class CheckpointSkeleton:
    """A checkpoint dict without the tensors of model and optimizers.

    Attributes:
        names: for each optimizer, the name of each parameter by its number.
    """

    def __init__(
        self, checkpoint: dict[str, Any], tensor_paths: Sequence[ValuePath], names: list[dict[Hashable, str]]
    ) -> None:
        self._checkpoint, self._tensor_paths, self.names = checkpoint, set(tensor_paths), names

    def weight_names(self) -> set[str]:
        """Return the names of the model's tensors."""
        return {path[1] for path in self._tensor_paths if path[0] == _MODEL_STATE_KEYS[0]}

    def extra_state(self) -> dict[str, Any]:
        """Return the entries of the model's state dict that are not tensors."""
        return {key: value for key, value in self._checkpoint["state_dict"].items() if key not in self.weight_names()}

    def moment_keys(self, number: int) -> list[tuple[str, str]]:
        """Return the parameter's name and the key of each tensor of an optimizer's state."""
        own_paths = (path for path in self._tensor_paths if path[:2] == ("optimizer_states", number))
        storage_paths = (_get_storage_path(path, self.names) for path in own_paths)
        return [(path[3], path[4]) for path in storage_paths if path is not None]

    def fill(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoint dict, filled with the tensors of a state dict.

        Raises:
            CorruptCheckpoint: a tensor is missing.
        """

        def get_tensor(path: ValuePath, value: Any) -> Any:
            if path not in self._tensor_paths:
                return value
            node: Any = state
            try:
                for key in _get_storage_path(path, self.names) or ():
                    node = node[key]
            except KeyError as error:
                raise CorruptCheckpoint(f"the checkpoint lacks the tensor '{_format_path(path)}'") from error
            return node

        filled: dict[str, Any] = _map_values(self._checkpoint, get_tensor)
        return filled

    def get_other_entries(self) -> dict[str, Any]:
        """Return the entries of the checkpoint dict besides model and optimizer states."""
        return {key: value for key, value in self._checkpoint.items() if key not in ("state_dict", "optimizer_states")}

    def build_optimizer_state(self, number: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete state of an optimizer by parameter name, for `set_optimizer_state`.

        Args:
            number: index of the optimizer.
            tensors: tensors of its state, by parameter name and key.
        """
        saved_state, names = self._checkpoint["optimizer_states"][number], self.names[number]
        torch_state, extra_state = split_state(saved_state, "Optimizer")
        state: dict[str, dict[str, Any]] = {names[key]: {} for key in torch_state["state"]}
        for key, entries in torch_state["state"].items():
            for name, value in entries.items():
                tensor_path = ("optimizer_states", number, "state", key, name)
                state[names[key]][name] = tensors[names[key]][name] if tensor_path in self._tensor_paths else value
        groups = [{**group, "params": [names[key] for key in group["params"]]} for group in saved_state["param_groups"]]
        return {**extra_state, "state": state, "param_groups": groups}

    @property
    def optimizer_count(self) -> int | None:
        """Number of optimizers; None if the checkpoint has weights only."""
        return len(self._checkpoint["optimizer_states"]) if "optimizer_states" in self._checkpoint else None


class _NumberedOptimizerState:
    """An optimizer's state with numbers of parameters as keys, and the name of each parameter."""

    def __init__(self, state: Any, model_state: Mapping[str, Any]) -> None:
        self.numbered_state, self.names = state, dict[Hashable, str]()
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
            return  # a state of another form becomes part of the skeleton
        keys = [key for group in state["param_groups"] for key in group["params"]]
        if not any(isinstance(key, str) for key in keys):
            self.names = infer_parameter_names(state, model_state)
            return
        numbers = {name: number for number, name in enumerate(keys)}
        self.names = {number: name for name, number in numbers.items()}
        numbered = {
            "state": {numbers[name]: entries for name, entries in state["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
            ],
        }
        self.numbered_state = join_state(numbered, extra_entries(state))


def _get_storage_path(path: ValuePath, names: Sequence[Mapping[Hashable, str]]) -> tuple[str, ...] | None:
    """Return the path of a tensor in the saved state dict; None if it is stored in the skeleton."""
    if not all(isinstance(key, str) for key in (path[0], path[-1])):
        return None
    if len(path) == 2 and path[0] in _MODEL_STATE_KEYS:
        return path
    if len(path) == 5 and (path[0], path[2]) == ("optimizer_states", "state") and path[1] in range(len(names)):
        name = names[path[1]].get(path[3])
        return None if name is None else ("optimizer_states", str(path[1]), "state", name, path[4])
    return None


def _map_values(value: Any, map_value: Callable[[ValuePath, Any], Any], path: ValuePath = ()) -> Any:
    """Return a copy of nested dicts, lists and tuples with each value mapped; attributes of dicts are kept."""
    if type(value) in (dict, OrderedDict):
        mapped = copy(value)
        for key, inner in value.items():
            mapped[key] = _map_values(inner, map_value, (*path, key))
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_map_values(inner, map_value, (*path, index)) for index, inner in enumerate(value))
    return map_value(path, value)


def _to_plain_value(path: ValuePath, value: Any) -> Any:
    """Return a value for the skeleton: tensors are copied to the CPU, and NumPy scalars become Python scalars.

    Raises:
        SaveFailed: the value is a distributed tensor.
    """
    if isinstance(value, DTensor | ShardedTensor):
        raise SaveFailed(
            f"'{_format_path(path)}' is distributed over ranks, and only those of the model and its optimizers are "
            "saved in parts: put full_tensor() in its place"
        )
    if type(value) in (np.float64, np.int64, np.bool_, np.str_):
        return value.item()  # such as a learning rate that was computed with NumPy
    return value.detach().cpu().clone() if type(value) in (torch.Tensor, nn.Parameter) else value


def _check_loadable(content: dict[str, Any]) -> None:
    """Check that `torch.load(weights_only=True)` can load the skeleton.

    Raises:
        SaveFailed: it cannot; the message names the value.
    """
    error = _find_pickle_error(content)
    if error is None:
        return

    def check_value(path: ValuePath, value: Any) -> Any:
        unsupported = next((item for item in (*path, value) if _find_pickle_error(item) is not None), None)
        if unsupported is not None:
            kind = f"{type(unsupported).__module__}.{type(unsupported).__qualname__}"
            raise SaveFailed(
                f"'{_format_path(path)}' is of class {kind}, which a load could bring back only by running code of the "
                "checkpoint: store plain data in its place (a number, a string, a dict), leave it out, for example by "
                "save_hyperparameters(ignore=[...]), or allow the class by torch.serialization.add_safe_globals([...]) "
                "in programs that save and in those that load"
            )
        return value

    _map_values(content["checkpoint"], check_value)
    raise SaveFailed(f"what the checkpoint has beside tensors cannot be stored: {described(error)}") from error


def _find_pickle_error(value: Any) -> Exception | None:
    """Return the error of saving and loading a value as plain data, or None."""
    if value is None or type(value) in (str, bool, float):
        return None
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        return error
    return None


def _format_path(path: ValuePath) -> str:
    return ".".join(map(str, path))
