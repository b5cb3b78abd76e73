"""What is logged and recovered: a model, its optimizer and states beside them, all by names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.lowdiff.plain import from_plain, to_plain
from dsq_ckpt.quantization.groups import unwrapped
from dsq_ckpt.storage.checkpoint import dtype_of

MODEL, OPTIMIZER = "model", "optim"
STRUCTURE = frozenset({"params", "param_names"})
_UNLOGGABLE = {
    "LBFGS": "it calls the model several times in a step",
    "SparseAdam": "sparse gradients are not logged",
    "DeepSpeedCPUAdam": "it keeps products of its betas outside of its state; use torch's Adam",
}


class Stateful(Protocol):
    """A scheduler, a gradient scaler, a data loader: what has a state of plain data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Entry(NamedTuple):
    """A parameter that the optimizer updates: name, shape, torch's name of its dtype, group, the rank that logs it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    owner: int

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


class TrainState:
    """A model and its optimizer by names.

    Args:
        model: plain, or wrapped by DDP or torch.compile.
        optimizer: of parameters of the model.
        states: by name; what is logged with every step besides.

    Attributes:
        layout: what decides which tensors there are on each rank, in words.
        partitioned: each rank has parameters of its own, rather than all having the same.
        parameters: by name, those that the optimizer updates on this rank, in its order.

    Raises:
        ConfigError: the optimizer updates what is no parameter of the model, or a step of it cannot be repeated from
            gradients.
    """

    layout: str = "a model that is the same on all ranks"
    partitioned: bool = False

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Stateful] | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.states = dict(states or {})
        for name, value in self.states.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(
                    f"state={{{name!r}: ...}} is {value!r}; expected something with state_dict() and "
                    "load_state_dict(), such as a scheduler"
                )
        self._check_optimizer()
        self._names: dict[nn.Parameter, str] = {}
        self.aliases: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = self._names.setdefault(parameter, unwrapped(name))
            if first != unwrapped(name):
                self.aliases[unwrapped(name)] = first
        self.parameters: dict[str, nn.Parameter] = {}
        self._groups: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            names = []
            for place, parameter in enumerate(group["params"]):
                if parameter not in self._names:
                    raise ConfigError(
                        f"parameter {place} of the optimizer's group {number} is no parameter of the model; make the "
                        "optimizer from the parameters of the model that is given here"
                    )
                name = self._names[parameter]
                if isinstance(parameter, DTensor):
                    raise ConfigError(
                        f"'{name}' is sharded (DTensor); gradients are logged under DDP or in one process. For FSDP "
                        "save checkpoints with dsq_ckpt.Compressor"
                    )
                self.parameters[name] = parameter
                names.append(name)
            self._groups.append(names)
        self._forms = {name: _form(parameter) for name, parameter in self.parameters.items()}

    def _check_optimizer(self) -> None:
        name = type(self.optimizer).__name__
        if why := _UNLOGGABLE.get(name):
            raise ConfigError(f"{name} cannot be logged: {why}")
        if foreign := [key for key in self.optimizer.state if not torch.is_tensor(key)]:
            raise ConfigError(
                f"{name} cannot be logged: its state has {foreign[0]!r}, which belongs to no parameter, and would be "
                "lost"
            )

    def entries(self, ranks: int) -> list[Entry]:
        """The parameters, dealt to ranks, the largest first, so that all log about as much."""
        loads = [0] * ranks
        owners: dict[str, int] = {}
        for name, parameter in sorted(self.parameters.items(), key=lambda pair: -pair[1].nbytes):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += parameter.nbytes + 1
        found = []
        for group, names in enumerate(self._groups):
            for name in names:
                parameter = self.parameters[name]
                found.append(Entry(name, tuple(parameter.shape), dtype_name(parameter.dtype), group, owners[name]))
        return found

    def group_of(self, name: str) -> int:
        """The number of the group that a parameter is in."""
        return next(number for number, names in enumerate(self._groups) if name in names)

    def calls(self) -> list[list[str]]:
        """The parameters that the optimizer updates in each call of a step."""
        return [list(self.parameters)]

    def changed(self) -> bool:
        """Whether the optimizer has other parameters than when this was made, or they have another shape or dtype, or
        are elsewhere.
        """
        groups = self.optimizer.param_groups
        return [len(group["params"]) for group in groups] != [len(names) for names in self._groups] or any(
            parameter is not self.parameters[name] or _form(parameter) != self._forms[name]
            for group, names in zip(groups, self._groups, strict=True)
            for parameter, name in zip(group["params"], names, strict=True)
        )

    def hyper(self) -> list[dict[str, Any]]:
        """Hyperparameters of each group, as plain data."""
        return [
            {key: to_plain(value, f"'{key}' of the optimizer's group {number}")
             for key, value in group.items() if key not in STRUCTURE}
            for number, group in enumerate(self.optimizer.param_groups)
        ]

    def set_hyper(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Set the hyperparameters of each group; tensors, as a learning rate may be, are filled in place."""
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            for key, plain in values.items():
                value = from_plain(plain)
                own = group.get(key)
                if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                    own.copy_(value)
                else:
                    group[key] = value

    def states_now(self) -> dict[str, Any]:
        """States of schedulers and the like, as plain data."""
        return {name: to_plain(state.state_dict(), f"the state of '{name}'") for name, state in self.states.items()}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Give schedulers and the like their states back.

        Raises:
            LoadFailed: others were logged.
        """
        if set(states) != set(self.states):
            raise LoadFailed(
                f"states of {sorted(states)} were logged, {sorted(self.states)} are to be recovered: pass the same "
                "names in state= as to GradientLog"
            )
        for name, state in self.states.items():
            state.load_state_dict(from_plain(states[name]))

    def watched(self) -> list[torch.Tensor]:
        """What nothing but the optimizer may change, if gradients are to tell it: also parameters that it does not
        have, such as those of a teacher that follows the model.
        """
        return list(self._names)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Persistent buffers, by name."""
        for prefix, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield unwrapped(f"{prefix}.{key}" if prefix else key), buffer

    def tensors(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor, str | None]]:
        """All tensors of a snapshot: path, tensor, and the parameter they belong to (None: to none that is logged)."""
        for parameter, name in self._names.items():
            yield (MODEL, name), parameter.detach(), name if name in self.parameters else None
        for alias, name in self.aliases.items():
            yield (MODEL, alias), self._by_name(name).detach(), name if name in self.parameters else None
        for name, buffer in self.buffers():
            yield (MODEL, name), buffer.detach(), None
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):
                    yield (OPTIMIZER, "state", name, key), value.detach(), name

    def plain_state(self) -> dict[str, dict[str, Any]]:
        """What of the optimizer's state is no tensor, by parameter."""
        found: dict[str, dict[str, Any]] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not torch.is_tensor(value):
                    found.setdefault(name, {})[key] = to_plain(value, f"'{key}' of the optimizer's state of '{name}'")
        return found

    def replace_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the optimizer this state, and no other."""
        self.optimizer.state.clear()
        self.set_state(state)

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Give parameters their state in the optimizer, of tensors and plain data; where it belongs and as laid out."""
        for name, values in state.items():
            parameter = self.parameters[name]
            group = self.optimizer.param_groups[self.group_of(name)]
            own: dict[str, Any] = {}
            for key, value in values.items():
                # Adam's count of steps stays on the CPU unless a kernel on the device wants it.
                there = key != "step" or group.get("fused") or group.get("capturable")
                if torch.is_tensor(value) and there:
                    value = value.to(parameter.device)
                    if value.shape == parameter.shape and not parameter.is_contiguous():
                        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                own[key] = _alone(value) if torch.is_tensor(value) else value
            self.optimizer.state[parameter] = own

    def state_keys(self) -> dict[str, list[str]]:
        """Keys of the optimizer's state in their order, by parameter."""
        state = self.optimizer.state
        return {name: list(state[parameter]) for name, parameter in self.parameters.items() if parameter in state}

    def _by_name(self, name: str) -> nn.Parameter:
        return next(parameter for parameter, own in self._names.items() if own == name)


def _form(parameter: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return parameter.shape, parameter.dtype, parameter.device


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without others in its memory; a copy where there are."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def dtype_name(dtype: torch.dtype) -> str:
    """As torch names it, without "torch."."""
    return str(dtype).removeprefix("torch.")


def entries_from(tree: Iterable[Iterable[Any]]) -> list[Entry]:
    """Entries as a file has them.

    Raises:
        CorruptCheckpoint: a dtype is unknown.
    """
    entries = [Entry(name, tuple(shape), dtype, group, owner) for name, shape, dtype, group, owner in tree]
    for entry in entries:
        dtype_of(entry.dtype)
    return entries
