"""The train state of a DeepSpeed engine: its master weights, which its basic optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from dsq_ckpt.deepspeed.flat_buffers import get_base_optimizer, get_uncompressed_reason, iter_masters
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.lowdiff.replay import updates_independently
from dsq_ckpt.lowdiff.train_state import MODEL, OPTIMIZER, ParameterEntry, Stateful, TrainState, dtype_name

ENGINE = "deepspeed"
"""Name of the engine's own state in the log."""
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_PLAIN_TYPES = (bool, int, float, type(None))


class EngineState:
    """The counters, scheduler and loss scaler of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is plain data apart from the scheduler's state."""
        engine = self._engine
        return {
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
            "scaler": {key: value for key, value in self._get_scaler_values().items() if type(value) in _PLAIN_TYPES},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            LoadFailed: only one of the two engines has a scheduler. Nothing has changed.
        """
        engine, scheduler = self._engine, state["scheduler"]
        if (scheduler is None) != (engine.lr_scheduler is None):
            has = "without a scheduler, and this engine has one" if scheduler is None else "with a scheduler"
            raise LoadFailed(f"the run was logged {has}; make the engine from the same configuration")
        if scheduler is not None:
            engine.lr_scheduler.load_state_dict(scheduler)
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        self._get_scaler_values().update(state["scaler"])

    def _get_scaler_values(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
        return {} if scaler is None else vars(scaler)


class MasterState(TrainState):
    """The train state of an engine: its master weights by name, the optimizer's state and the engine's own state.

    In ZeRO stage 0 all ranks have the same masters, with the names of their parameters. In stages 1 to 3 each rank has
    its own flat partitions, with names such as "group0.rank1". The module's weights are not included, since they are
    cast from the masters. Buffers and frozen weights are included for each rank, since DeepSpeed does not synchronize
    them.

    Args:
        engine: DeepSpeed engine.
        states: further objects whose states are logged with every step, by name.

    Raises:
        ConfigError: a step of the engine cannot be replayed from gradients.
    """

    def __init__(self, engine: Any, states: Mapping[str, Stateful] | None = None) -> None:
        self.model = engine.module
        self.optimizer = get_base_optimizer(engine)
        self.states = {ENGINE: EngineState(engine), **(states or {})}
        self.aliases = {}
        self._engine = engine
        check_replayable(engine)
        self._check_optimizer()
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._names = {}
        self.parameters = {}
        self.partitioned = False
        master_tensors = list(iter_masters(engine, engine.param_names))
        self._groups = [[] for _ in self.optimizer.param_groups]
        for number, (tensor, slices, replicated) in enumerate(master_tensors):
            self.partitioned = not replicated
            if replicated and len(slices) == 1 and slices[0].length == tensor.numel():
                name = slices[0].name
            else:
                name = f"group{number}" if replicated else f"group{number}.rank{self._rank}"
            self.parameters[name] = cast(nn.Parameter, tensor)
            self._groups[self._get_group_index(number, tensor)].append(name)
        self._hyper = super().hyper()
        stage = engine.zero_optimization_stage()
        kind = type(engine.optimizer).__name__
        self.layout = f"DeepSpeed's ZeRO stage {stage} ({kind}) on {self._world_size} rank(s)"

    def entries(self, ranks: int) -> list[ParameterEntry]:
        """Return the masters of all ranks: partitions with their ranks, or replicated masters with balanced owners."""
        if not self.partitioned:
            return super().entries(ranks)
        return [
            ParameterEntry(
                _rename_for_rank(name, rank), tuple(tensor.shape), dtype_name(tensor.dtype), self.group_of(name), rank
            )
            for rank in range(self._world_size) for name, tensor in self.parameters.items()
        ]

    def is_rank_local(self, path: tuple[str, ...]) -> bool:
        """Return whether the tensor at a path exists on this rank only."""
        return path[0] == MODEL and path[1].endswith(f".rank{self._rank}")

    def optimizer_calls(self) -> list[list[str]]:
        """See `TrainState.optimizer_calls`; DeepSpeed lets the optimizer update one partition at a time."""
        return [[name] for name in self.parameters] if self.partitioned else super().optimizer_calls()

    def get_master_names(self, groups: list[dict[str, Any]]) -> set[str]:
        """Return the names of the masters in `groups`, which are parameter groups of the optimizer within a step."""
        names = {id(tensor): name for name, tensor in self.parameters.items()}
        return {names[id(tensor)] for group in groups for tensor in group["params"] if id(tensor) in names}

    def describe_change(self) -> str | None:
        """Return a message if the engine's masters were replaced since construction, else None."""
        if len(self.optimizer.param_groups) != len(self._groups):
            return None  # within a step, DeepSpeed exposes one group at a time
        tensor_ids = [id(tensor) for tensor, *_ in iter_masters(self._engine, self._engine.param_names)]
        is_unchanged = tensor_ids == [id(tensor) for tensor in self.parameters.values()]
        return None if is_unchanged else "the engine's master weights were replaced"

    def hyper(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of each parameter group.

        Within a step DeepSpeed may expose one group at a time; the other groups keep their last known values.
        """
        exposed = super().hyper()
        if len(exposed) == len(self._groups):
            self._hyper = exposed
        else:
            groups = list(self._hyper)
            for group, values in zip(self.optimizer.param_groups, exposed, strict=True):
                for name in self.get_master_names([group]):
                    groups[self.group_of(name)] = values
            self._hyper = groups
        return self._hyper

    def monitored_tensors(self) -> list[torch.Tensor]:
        """Return the masters; the module's weights are not included, since the engine writes them after each step."""
        return list(self.parameters.values())

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the persistent buffers, with this rank in their names."""
        for name, buffer in super().buffers():
            yield f"{name}.rank{self._rank}", buffer

    def tensors(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor, str | None]]:
        """See `TrainState.tensors`; partitions of other ranks are not included."""
        for name, tensor in self.parameters.items():
            yield (MODEL, name), tensor.detach(), name
        for parameter, name in self._engine.param_names.items():
            if parameter.requires_grad or name in self.parameters:
                continue
            if hasattr(parameter, "ds_tensor"):  # partitioned by ZeRO 3
                yield (MODEL, f"{name}.rank{self._rank}"), parameter.ds_tensor.detach(), None
            else:
                yield (MODEL, name), parameter.detach(), None
        for name, buffer in self.buffers():
            yield (MODEL, name), buffer.detach(), None
        for name, tensor in self.parameters.items():
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if torch.is_tensor(value):
                    yield (OPTIMIZER, "state", name, key), value.detach(), name

    def plain_state(self) -> dict[str, dict[str, Any]]:
        """See `TrainState.plain_state`; all ranks do the same steps, so the values of one rank hold for all ranks."""
        return self._expand_to_all_ranks(super().plain_state())

    def state_keys(self) -> dict[str, list[str]]:
        """See `TrainState.state_keys`; includes the partitions of all ranks."""
        return self._expand_to_all_ranks(super().state_keys())

    def replace_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer's state; tensors are filled in place, since DeepSpeed has views of them."""
        before = {name: dict(self.optimizer.state.get(tensor, {})) for name, tensor in self.parameters.items()}
        super().replace_state(state)
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                entries = self.optimizer.state.get(tensor, {})
                for key, value in entries.items():
                    old = before[name].get(key)
                    if torch.is_tensor(old) and torch.is_tensor(value) and _has_same_layout(old, value):
                        entries[key] = old.copy_(value)

    @contextmanager
    def expose_masters(self) -> Iterator[None]:
        """Fill the optimizer's parameter groups with their masters in this context; then restore groups and gradients.

        Outside of a step, ZeRO 3 keeps the groups empty. An offloaded optimizer has preallocated gradients.
        """
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        gradients = [tensor.grad for tensor in self.parameters.values()]
        for group, names in zip(groups, self._groups, strict=True):
            group["params"] = [self.parameters[name] for name in names]
        try:
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters
            for tensor, gradient in zip(self.parameters.values(), gradients, strict=True):
                tensor.grad = gradient

    def _get_group_index(self, number: int, tensor: torch.Tensor) -> int:
        """Return the index of the optimizer's group that updates a master."""
        group_ids = getattr(self._engine.optimizer, "sub_group_to_group_id", None)
        if group_ids is not None:
            return int(group_ids[number])
        for group, values in enumerate(self.optimizer.param_groups):
            if any(parameter is tensor for parameter in values["params"]):
                return group
        raise ConfigError(f"master {number} of the engine is in no group of its optimizer")

    def _expand_to_all_ranks(self, values_by_name: dict[str, Any]) -> dict[str, Any]:
        if not self.partitioned:
            return values_by_name
        ranks = range(self._world_size)
        return {_rename_for_rank(name, rank): value for rank in ranks for name, value in values_by_name.items()}


def check_replayable(engine: Any) -> None:
    """Check that the steps of an engine can be replayed from gradients.

    Raises:
        ConfigError: they cannot be replayed; the message names every reason.
    """
    optimizer, basic = engine.optimizer, get_base_optimizer(engine)
    reasons = []
    if get_uncompressed_reason(engine):
        reasons.append("it has tensor, pipeline or expert parallelism, no optimizer, or one that is offloaded to NVMe")
    elif not updates_independently(basic) and type(basic).__name__ != "FusedAdam":
        name = type(basic).__name__
        reason = " keeps products of its betas outside of its state" if name == "DeepSpeedCPUAdam" else ""
        reasons.append(
            f"{name}{reason or ' is not known to do the same step again from the same state'}; use \"torch_adam\": true"
        )
    if getattr(engine, "zenflow", False) or type(optimizer).__name__.startswith(("MiCS", "SuperOffload", "ZenFlow")):
        reasons.append(f"{type(optimizer).__name__} updates weights outside of its optimizer's step")
    for scaler in ("torch_autocast_z0_gradscaler", "torch_autocast_gradscaler"):
        if getattr(engine, scaler, None) is not None or getattr(optimizer, scaler, None) is not None:
            reasons.append("torch_autocast in float16 scales the loss, and skips steps within the optimizer")
    for legacy in ("fused_adam_legacy", "fused_lamb_legacy"):
        if getattr(optimizer, legacy, False):
            reasons.append("its fused optimizer is the legacy one, which is not given gradients by the parameters")
    devices = getattr(optimizer, "subgroup_to_device", None) or {}
    if getattr(optimizer, "offload_optimizer", False) and set(devices.values()) - {"cpu"}:
        reasons.append("offload_optimizer.ratio is below 1, so two optimizers take turns")
    if reasons:
        causes = "; ".join(dict.fromkeys(reasons))
        raise ConfigError(f"gradients of this engine of DeepSpeed cannot be logged: {causes}")


def _rename_for_rank(name: str, rank: int) -> str:
    return f"{name.rpartition('.')[0]}.rank{rank}"


def _has_same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
