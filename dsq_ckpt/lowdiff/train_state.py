"""The state that is logged and recovered: a model, its optimizer, and further states, all by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dsq_ckpt.core.arguments import expect
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.errors import ConfigError, LoadFailed, described
from dsq_ckpt.lowdiff.plain_data import NotLoggable, from_plain, to_plain
from dsq_ckpt.storage.record_fields import parse_dtype

MODEL, OPTIMIZER = "model", "optim"
STRUCTURE = frozenset({"params", "param_names"})
_UNLOGGABLE = {
    "LBFGS": "it calls the model several times in a step",
    "SparseAdam": "sparse gradients are not logged",
    "DeepSpeedCPUAdam": "it keeps products of its betas outside of its state; use torch's Adam",
}


class Stateful(Protocol):
    """An object with a state of plain data, such as a scheduler, a gradient scaler or a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class ParameterEntry(NamedTuple):
    """A parameter that the optimizer updates.

    Attributes:
        name: name in the model.
        shape: shape of the parameter.
        dtype: name of the dtype without "torch.".
        group: number of the optimizer's group.
        owner: rank that logs the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    owner: int

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


class TrainState:
    """The state of a training loop, by names.

    Args:
        model: model, possibly wrapped by DDP or torch.compile.
        optimizer: optimizer of parameters of the model.
        states: further objects whose states are logged with every step, by name.

    Attributes:
        layout: description of the distribution of tensors over ranks.
        partitioned: True if each rank has its own parameters; False if all ranks have the same.
        parameters: parameters that the optimizer updates on this rank by name, in its order.

    Raises:
        ConfigError: the optimizer updates a tensor outside of the model, or cannot be replayed from gradients.
    """

    layout: str = "a model that is the same on all ranks"
    partitioned: bool = False

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, states: Mapping[str, Stateful] | None = None
    ) -> None:
        expect("model", model, nn.Module, "a module")
        expect("optimizer", optimizer, Optimizer, "an optimizer of its parameters")
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
            first = self._names.setdefault(parameter, strip_wrappers(name))
            if first != strip_wrappers(name):
                self.aliases[strip_wrappers(name)] = first
        self.parameters: dict[str, nn.Parameter] = {}
        self._groups: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            names = []
            for index, parameter in enumerate(group["params"]):
                if parameter not in self._names:
                    raise ConfigError(
                        f"parameter {index} of the optimizer's group {number} is no parameter of the model; make the "
                        "optimizer from the parameters of the model that is given here"
                    )
                name = self._names[parameter]
                if isinstance(parameter, DTensor):
                    raise ConfigError(
                        f"'{name}' is sharded (DTensor); gradients are logged under DDP or in one process. For FSDP "
                        "save checkpoints with dsq_ckpt.Compressor"
                    )
                if is_traceable_wrapper_subclass(parameter):
                    raise ConfigError(
                        f"'{name}' is a {type(parameter).__name__}, which has no memory of its own; logs hold plain "
                        "tensors. Save checkpoints with dsq_ckpt.Compressor"
                    )
                self.parameters[name] = parameter
                names.append(name)
            self._groups.append(names)
        self._initial = self._group_ids(), self._parameter_properties()

    def _check_optimizer(self) -> None:
        name = type(self.optimizer).__name__
        if reason := _UNLOGGABLE.get(name):
            raise ConfigError(f"{name} cannot be logged: {reason}")
        inner = [type(value).__name__ for value in vars(self.optimizer).values() if isinstance(value, Optimizer)]
        if inner:  # it would be replayed without the inner one's state and groups
            raise ConfigError(
                f"{name} cannot be logged: it is an optimizer around {inner[0]}, and logs see the state of one alone. "
                "If it adds nothing to the state, as wrappers of Accelerate and Lightning, pass the optimizer in it; "
                "else save checkpoints by dsq_ckpt.Compressor"
            )
        check_optimizer_state(self.optimizer)

    def entries(self, ranks: int) -> list[ParameterEntry]:
        """Return the parameters, assigned to ranks: from the largest, each to the rank with the fewest bytes."""
        loads = [0] * ranks
        owners: dict[str, int] = {}
        for name, parameter in sorted(self.parameters.items(), key=lambda pair: -pair[1].nbytes):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += parameter.nbytes + 1
        entries = []
        for group, names in enumerate(self._groups):
            for name in names:
                parameter = self.parameters[name]
                shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
                entries.append(ParameterEntry(name, shape, dtype, group, owners[name]))
        return entries

    def group_of(self, name: str) -> int:
        """Return the number of the optimizer's group of a parameter."""
        return next(number for number, names in enumerate(self._groups) if name in names)

    def optimizer_calls(self) -> list[list[str]]:
        """Return the names of the parameters that each call of the optimizer in a step updates."""
        return [list(self.parameters)]

    def describe_change(self) -> str | None:
        """Describe changes of the model's and the optimizer's parameters since construction, for a warning.

        Only identities, names, shapes, dtypes and devices are compared, not values. Return None if nothing has changed.
        """
        groups, model = self._group_ids(), self._parameter_properties()
        if groups != self._initial[0]:
            names = {values[0]: name for state in (self._initial[1], model) for name, values in state.items()}
            before, after = (
                {names.get(id_, "one outside of the model"): number for number, ids in enumerate(state) for id_ in ids}
                for state in (self._initial[0], groups)
            )
            return f"parameters of the optimizer were added, removed or moved{format_differing_names(before, after)}"
        if model != self._initial[1]:
            differing = format_differing_names(self._initial[1], model)
            return f"parameters of the model were added, removed, replaced or cast{differing}"
        return None

    def _group_ids(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]

    def _parameter_properties(self) -> dict[str, tuple[Any, ...]]:
        return {
            name: (id(parameter), parameter.shape, parameter.dtype, parameter.device)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }

    def hyper(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of each group as plain data."""
        return [
            {key: to_plain(value, f"'{key}' of the optimizer's group {number}")
             for key, value in group.items() if key not in STRUCTURE}
            for number, group in enumerate(self.optimizer.param_groups)
        ]

    def set_hyper(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Set the hyperparameters of each group. Tensors, such as a learning rate, are updated in place."""
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            for key, plain in values.items():
                value = from_plain(plain)
                target = group.get(key)
                if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor) and target.shape == value.shape:
                    target.copy_(value)
                else:
                    group[key] = value

    def states_to_plain(self) -> dict[str, Any]:
        """Return the states of schedulers and the like as plain data."""
        return {name: to_plain(state, f"the state of '{name}'") for name, state in self.collect_states().items()}

    def collect_states(self) -> dict[str, dict[str, Any]]:
        """Return the state dicts of schedulers and the like."""
        with in_user_code():
            return {name: state.state_dict() for name, state in self.states.items()}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Load the states of schedulers and the like.

        Raises:
            LoadFailed: the names differ from those in the log.
        """
        if set(states) != set(self.states):
            raise LoadFailed(
                f"states of {sorted(states)} were logged, {sorted(self.states)} are to be recovered: pass the same "
                "names in state= as to GradientLog"
            )
        for name, state in self.states.items():
            loaded = from_plain(states[name])
            with in_user_code():
                state.load_state_dict(loaded)

    def monitored_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that only the optimizer's step may change, so that gradients reproduce them.

        They include parameters that the optimizer does not update, such as those of a teacher that follows the model.
        """
        return list(self._names)

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of the optimizer's state, which only the optimizer's step may change."""
        for values in self.optimizer.state.values():
            if isinstance(values, Mapping):  # some optimizers store a step count beside the states of parameters
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each persistent buffer."""
        for prefix, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield strip_wrappers(f"{prefix}.{key}" if prefix else key), buffer

    def tensors(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor, str | None]]:
        """Yield path, tensor and parameter name (None without a parameter) of each tensor of a snapshot."""
        for parameter, name in self._names.items():
            yield (MODEL, name), parameter.detach(), name if name in self.parameters else None
        for alias, name in self.aliases.items():
            yield (MODEL, alias), self._find_parameter(name).detach(), name if name in self.parameters else None
        for name, buffer in self.buffers():
            yield (MODEL, name), buffer.detach(), None
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):
                    yield (OPTIMIZER, "state", name, key), value.detach(), name

    def plain_state(self) -> dict[str, dict[str, Any]]:
        """Return the non-tensor part of the optimizer's state as plain data, by parameter.

        Raises:
            NotLoggable: a log cannot hold it, or the optimizer has state that belongs to no parameter.
        """
        check_optimizer_state(self.optimizer)  # it may have come with the first step
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not torch.is_tensor(value):
                    plain.setdefault(name, {})[key] = to_plain(value, f"'{key}' of the optimizer's state of '{name}'")
        return plain

    def replace_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer's whole state."""
        self.optimizer.state.clear()
        self.set_state(state)

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the optimizer's state of some parameters, on the device and in the layout that the optimizer expects."""
        for name, values in state.items():
            parameter = self.parameters[name]
            group = self.optimizer.param_groups[self.group_of(name)]
            converted: dict[str, Any] = {}
            for key, value in values.items():
                # Adam's step count stays on the CPU unless a kernel on the device needs it.
                on_device = key != "step" or group.get("fused") or group.get("capturable")
                if torch.is_tensor(value) and on_device:
                    value = value.to(parameter.device)
                    if value.shape == parameter.shape and not parameter.is_contiguous():
                        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                converted[key] = _with_own_storage(value) if torch.is_tensor(value) else value
            self.optimizer.state[parameter] = converted

    def state_keys(self) -> dict[str, list[str]]:
        """Return the ordered keys of the optimizer's state, by parameter."""
        state = self.optimizer.state
        return {name: list(state[parameter]) for name, parameter in self.parameters.items() if parameter in state}

    def _find_parameter(self, name: str) -> nn.Parameter:
        return next(parameter for parameter, parameter_name in self._names.items() if parameter_name == name)


def check_optimizer_state(optimizer: Optimizer) -> None:
    """Check that the whole state of an optimizer is in the states and groups of its parameters.

    Raises:
        NotLoggable: it has other state, which would be lost.
    """
    check_state_keys(optimizer)
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if hooks or getattr(optimizer.state_dict, "__func__", None) is not Optimizer.state_dict:  # they may add keys
        try:
            with in_user_code():
                keys = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
        except Exception as error:
            raise NotLoggable(
                f"{type(optimizer).__name__} cannot be logged: its state_dict() fails ({described(error)}); a log "
                "needs it to tell whether there is more than the states and groups of parameters"
            ) from error
        if keys:
            _refuse_state(optimizer, f"its state_dict() has {keys[0]!r} beside 'state' and 'param_groups'")


def check_state_keys(optimizer: Optimizer) -> None:
    """Check that the state of an optimizer belongs to its parameters; takes no time, unlike `check_optimizer_state`.

    Raises:
        NotLoggable: it has other state, which would be lost.
    """
    foreign = next((key for key in optimizer.state if not torch.is_tensor(key)), None)
    if foreign is not None:
        _refuse_state(optimizer, f"its state has {foreign!r}, which belongs to no parameter")


def _refuse_state(optimizer: Optimizer, reason: str) -> NoReturn:
    raise NotLoggable(
        f"{type(optimizer).__name__} cannot be logged: {reason}, and would be lost. Save checkpoints by "
        "dsq_ckpt.Compressor"
    )


def format_differing_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the names whose values differ in parentheses, for a warning; empty without differences."""
    names = [strip_wrappers(name) for name in {**before, **after} if before.get(name) != after.get(name)]
    return f" ({quote(names)})" if names else ""


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is the only view of its storage; a copy if it is not."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def entries_from(tree: Iterable[Iterable[Any]]) -> list[ParameterEntry]:
    """Convert entries from their JSON representation.

    Raises:
        CorruptCheckpoint: a dtype is unknown.
    """
    entries = [ParameterEntry(name, tuple(shape), dtype, group, owner) for name, shape, dtype, group, owner in tree]
    for entry in entries:
        parse_dtype(entry.dtype)
    return entries
