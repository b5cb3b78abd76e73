"""The checkpoint dict of a Trainer as a nested state dict of ours, and back.

Model weights and the state of optimizers become tensors of the checkpoint, the latter under the names of their
parameters (see `parameter_names`), as moments are quantized with the weights that they belong to. All else, the tensors
of callbacks among it, is one object, exact, which is loaded with `weights_only=True`.
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
from dsq_ckpt.integrations.lightning.names import parameter_names

Where = tuple[Any, ...]
"""Keys of dicts and places in lists that lead to a value of Lightning's dict."""
_OWN = "lightning"
_FORMAT = 1
_WEIGHTS = ("state_dict", "current_model_state")
"""Top-level keys of models; the second is that of Lightning's `WeightAveraging`."""


def to_state(checkpoint: Mapping[str, Any], everything: bool = True) -> dict[str, Any]:
    """Return the state dict that is saved for a checkpoint dict of Lightning.

    Args:
        checkpoint: of `Trainer`; it is not changed. Optimizer state is keyed by numbers, as torch's optimizers do it,
            or by names of parameters, as `get_optimizer_state` does it.
        everything: include what is neither model nor optimizer state; one rank of a sharded save does.

    Raises:
        SaveFailed: a value cannot be stored so that it is loaded again without running code of the file.
    """
    refuse_cycles(checkpoint)
    states, weights = checkpoint.get("optimizer_states"), checkpoint.get("state_dict")
    optimizers = [
        _Optimizer(state, weights if isinstance(weights, Mapping) else {})
        for state in (states if isinstance(states, list | tuple) else ())  # in another form all of it is exact
    ]
    if optimizers:
        checkpoint = {**checkpoint, "optimizer_states": [optimizer.numbered for optimizer in optimizers]}
    names = [optimizer.names for optimizer in optimizers]
    state: dict[str, Any] = {}
    stored: list[Where] = []

    def apart(where: Where, value: Any) -> Any:
        place = _place(where, names) if type(value) in (torch.Tensor, nn.Parameter, DTensor) else None
        if place is None:
            return _by_itself(where, value)
        node = state
        for key in place[:-1]:
            node = node.setdefault(key, {})
        node[place[-1]] = value.detach()
        stored.append(where)
        return None

    rest = _mapped(checkpoint, apart)
    if everything:
        own = {"format": _FORMAT, "checkpoint": rest, "tensors": stored, "names": names}
        _check_plain(own)
        state[_OWN] = {"checkpoint": (own,)}  # a tuple: one object for DCP
    return state


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Name the checkpoint in errors of a load, and say what allows the classes that it needs.

    Raises:
        LoadFailed: the object beside tensors holds a class that is not allowed.
    """
    try:
        yield
    except DSQError as error:
        if "is more than plain data" in str(error):  # of the one object that a checkpoint has
            raise LoadFailed(
                f"'{path}': hyperparameters, or the state of a callback, are of a class that is not allowed here: "
                "allow it by torch.serialization.add_safe_globals([...]), as the program did that saved them"
            ) from error
        if str(path) not in str(error):
            raise type(error)(f"'{path}': {error}") from error
        raise


def rest_of(state: dict[str, Any]) -> Rest:
    """Return what a loaded state dict has beside tensors, which is taken out of it.

    Raises:
        LoadFailed: it is not of Lightning.
        UnsupportedFormat: a newer version saved it.
    """
    try:
        own = state.pop(_OWN)["checkpoint"][0]
        found = own["format"]
    except (KeyError, TypeError, IndexError) as error:
        raise LoadFailed(
            "the checkpoint was not saved by Lightning: it lacks the state of loops and callbacks; load it with "
            "dsq_ckpt.load, or save it through Trainer"
        ) from error
    if found != _FORMAT:
        raise UnsupportedFormat(f"the state of Lightning is in layout {found!r}, this dsq_ckpt reads {_FORMAT}")
    return Rest(own["checkpoint"], own["tensors"], own["names"])


class Rest:
    """A checkpoint dict without the tensors of model and optimizers.

    Attributes:
        names: name of each parameter by its number, for each optimizer.
    """

    def __init__(self, checkpoint: dict[str, Any], tensors: Sequence[Where], names: list[dict[Hashable, str]]) -> None:
        self._checkpoint, self._tensors, self.names = checkpoint, set(tensors), names

    def weights(self) -> set[str]:
        """Return the names of the model's tensors."""
        return {where[1] for where in self._tensors if where[0] == _WEIGHTS[0]}

    def extra_state(self) -> dict[str, Any]:
        """Return the entries of the model's state dict that are no tensors."""
        return {key: value for key, value in self._checkpoint["state_dict"].items() if key not in self.weights()}

    def moments(self, number: int) -> list[tuple[str, str]]:
        """Return parameter and name of each tensor of an optimizer's state."""
        places = (_place(where, self.names) for where in self._tensors if where[:2] == ("optimizer_states", number))
        return [(place[3], place[4]) for place in places if place is not None]

    def filled(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoint dict with the tensors of a state dict.

        Raises:
            CorruptCheckpoint: a tensor is not there.
        """

        def tensor(where: Where, value: Any) -> Any:
            if where not in self._tensors:
                return value
            node: Any = state
            try:
                for key in _place(where, self.names) or ():
                    node = node[key]
            except KeyError as error:
                raise CorruptCheckpoint(f"the checkpoint lacks the tensor '{_named(where)}'") from error
            return node

        filled: dict[str, Any] = _mapped(self._checkpoint, tensor)
        return filled

    def without_tensors(self) -> dict[str, Any]:
        """Return the checkpoint dict without model and optimizer states."""
        return {key: value for key, value in self._checkpoint.items() if key not in ("state_dict", "optimizer_states")}

    def optimizer(self, number: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of an optimizer by names of parameters, with all that it told, for `set_optimizer_state`.

        Args:
            number: of the optimizer.
            tensors: its tensors, by parameter and name.
        """
        saved, names = self._checkpoint["optimizer_states"][number], self.names[number]
        of_torch, more = split_state(saved, "Optimizer")
        state: dict[str, dict[str, Any]] = {names[key]: {} for key in of_torch["state"]}
        for key, entries in of_torch["state"].items():
            for name, value in entries.items():
                place = ("optimizer_states", number, "state", key, name)
                state[names[key]][name] = tensors[names[key]][name] if place in self._tensors else value
        groups = [{**group, "params": [names[key] for key in group["params"]]} for group in saved["param_groups"]]
        return {**more, "state": state, "param_groups": groups}

    @property
    def optimizers(self) -> int | None:
        """Number of optimizers; None: the checkpoint has weights only."""
        return len(self._checkpoint["optimizer_states"]) if "optimizer_states" in self._checkpoint else None


class _Optimizer:
    """The state of an optimizer by numbers of parameters, and the name of each."""

    def __init__(self, state: Any, weights: Mapping[str, Any]) -> None:
        self.numbered, self.names = state, dict[Hashable, str]()
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
            return  # of an optimizer that keeps it in another way: all of it is exact
        keys = [key for group in state["param_groups"] for key in group["params"]]
        if not any(isinstance(key, str) for key in keys):
            self.names = parameter_names(state, weights)
            return
        number = {name: place for place, name in enumerate(keys)}
        self.names = {place: name for name, place in number.items()}
        numbered = {
            "state": {number[name]: entries for name, entries in state["state"].items()},
            "param_groups": [
                {**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]
            ],
        }
        self.numbered = join_state(numbered, extra_entries(state))


def _place(where: Where, names: Sequence[Mapping[Hashable, str]]) -> tuple[str, ...] | None:
    """Return where a tensor is stored; None: with the rest."""
    if not all(isinstance(key, str) for key in (where[0], where[-1])):
        return None
    if len(where) == 2 and where[0] in _WEIGHTS:
        return where
    if len(where) == 5 and (where[0], where[2]) == ("optimizer_states", "state") and where[1] in range(len(names)):
        name = names[where[1]].get(where[3])
        return None if name is None else ("optimizer_states", str(where[1]), "state", name, where[4])
    return None


def _mapped(value: Any, change: Callable[[Where, Any], Any], where: Where = ()) -> Any:
    """Return a copy of nested dicts, lists and tuples, with each value replaced; attributes of dicts stay."""
    if type(value) in (dict, OrderedDict):
        found = copy(value)
        for key, inner in value.items():
            found[key] = _mapped(inner, change, (*where, key))
        return found
    if type(value) in (list, tuple):
        return type(value)(_mapped(inner, change, (*where, place)) for place, inner in enumerate(value))
    return change(where, value)


def _by_itself(where: Where, value: Any) -> Any:
    """Return a value as it is stored with the rest; a tensor on the CPU, without the memory that it is a view of.

    Raises:
        SaveFailed: it is a part of a distributed tensor.
    """
    if isinstance(value, DTensor | ShardedTensor):
        raise SaveFailed(
            f"'{_named(where)}' is distributed over ranks, and only those of the model and its optimizers are saved in "
            "parts: put full_tensor() in its place"
        )
    if type(value) in (np.float64, np.int64, np.bool_, np.str_):
        return value.item()  # such as a learning rate computed with NumPy: the same number, of Python's own class
    return value.detach().cpu().clone() if type(value) in (torch.Tensor, nn.Parameter) else value


def _check_plain(own: dict[str, Any]) -> None:
    """Check that an object is loaded again by `torch.load(weights_only=True)`.

    Raises:
        SaveFailed: it is not; the message names the value.
    """
    error = _obstacle(own)
    if error is None:
        return

    def check(where: Where, value: Any) -> Any:
        found = next((one for one in (*where, value) if _obstacle(one) is not None), None)
        if found is not None:
            kind = f"{type(found).__module__}.{type(found).__qualname__}"
            raise SaveFailed(
                f"'{_named(where)}' is of class {kind}, which a load could bring back only by running code of the "
                "checkpoint: store plain data in its place (a number, a string, a dict), leave it out, for example by "
                "save_hyperparameters(ignore=[...]), or allow the class by torch.serialization.add_safe_globals([...]) "
                "in programs that save and in those that load"
            )
        return value

    _mapped(own["checkpoint"], check)
    raise SaveFailed(f"what the checkpoint has beside tensors cannot be stored: {described(error)}") from error


def _obstacle(value: Any) -> Exception | None:
    """Return why a value cannot be saved and loaded as plain data, or None."""
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


def _named(where: Where) -> str:
    return ".".join(map(str, where))
