"""A map of DeepSpeed's flat buffers to slices of named parameters.

Every optimizer of DeepSpeed keeps its master weights and moments in buffers of its own: flat partitions of groups
(ZeRO 1 and 2, `BF16_Optimizer`), of sub-groups in which each parameter is partitioned (ZeRO 3), whole flat groups
(`FP16_Optimizer`), one tensor per parameter (`FP16_UnfusedOptimizer`), or the parameters themselves. The tensors in a
checkpoint's state dicts are views of these buffers. So it suffices to know which elements of which parameter a buffer
holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from dsq_ckpt.core.tensor_subclasses import nbytes_of
from dsq_ckpt.quantization.groups import QUANTIZABLE
from dsq_ckpt.quantization.update_rules import flatten_param_groups

MASTER = "master"


@dataclass(frozen=True)
class ParameterSlice:
    """Consecutive elements of a parameter in a buffer.

    Attributes:
        name: name of the parameter in the module tree.
        shape: shape of the whole parameter.
        start: first element in the flattened parameter.
        length: number of elements.
        at: first element in the buffer.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    at: int


@dataclass
class Buffer:
    """A tensor that holds master weights, or one of their moments.

    Attributes:
        kind: `MASTER`, or the key of the optimizer's state.
        tensor: contiguous, of any shape.
        slices: slices of named parameters; the remaining elements are padding.
        replicated: True if all ranks of the data-parallel group have the same values; False if each has a partition.
    """

    kind: str
    tensor: torch.Tensor
    slices: list[ParameterSlice]
    replicated: bool

    def fqn(self, slice_: ParameterSlice) -> str:
        """Return the fully qualified name of a slice's tensor in the checkpoint."""
        return f"model.{slice_.name}" if self.kind == MASTER else f"optimizer.state.{slice_.name}.{self.kind}"

    def path(self, slice_: ParameterSlice) -> tuple[str, ...]:
        """Return the path of a slice's tensor in the nested state dict."""
        if self.kind == MASTER:
            return "model", slice_.name
        return "optimizer", "state", slice_.name, self.kind


def parameter_in(fqn: str) -> str:
    """Return the name of the parameter in a name of `Buffer.fqn`."""
    if fqn.startswith("optimizer.state."):
        return fqn.removeprefix("optimizer.state.").rpartition(".")[0]
    return fqn.removeprefix("model.")


@dataclass
class Inventory:
    """The buffers of an engine.

    Attributes:
        buffers: buffers of this rank.
        masters: shape by name of each parameter with a master copy in some buffer, on any rank.
        parameters: the module's parameters by name, if they are whole on this rank.
    """

    buffers: list[Buffer] = field(default_factory=list)
    masters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def inventory(engine: Any) -> Inventory:
    """Return the buffers of a DeepSpeed engine, or nothing if parameters of different ranks share names.

    With tensor, pipeline or expert parallelism a name denotes another tensor on every rank of the model-parallel group.
    Such engines, and engines with an unknown optimizer, have no buffers here; their files are stored uncompressed.
    """
    if why_uncompressed(engine):
        return Inventory()
    found = Inventory()
    names: Mapping[torch.Tensor, str] = engine.param_names
    for tensor, slices, replicated in masters(engine, names):
        state = _state_of(engine).get(tensor, {})
        known = [
            Buffer(name, value, slices, replicated) for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.numel() == tensor.numel() and value.numel() > 1
            and value.dtype in QUANTIZABLE and not hasattr(value, "__tensor_flatten__")  # as torchao's 8-bit moments
        ]
        for buffer in [Buffer(MASTER, tensor, slices, replicated), *known]:
            if buffer.tensor.is_contiguous() and buffer.tensor.numel():
                found.buffers.append(buffer)
    found.buffers += _muon(engine, names)
    if not _partitions_parameters(engine):
        found.parameters = {names[p]: p.detach() for p in names if p.numel()}
        optimized = {id(p) for group in base_optimizer(engine).param_groups for p in group["params"]}
        grouped = {id(p) for group in _groups(engine) for p in group}
        found.masters = {
            name: tuple(p.shape) for p, name in names.items() if p.numel() and id(p) in (grouped or optimized)
        }
    return found


def _muon(engine: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Buffer]:
    """Yield the momentum of DeepSpeed's Muon in ZeRO 1 and 2: that of whole parameters, one after another.

    Each rank has it for all parameters that lie in its partition, also in part. Those that lie in another one too have
    it on both ranks, so that no rank has it to itself; they are left out, and stay in DeepSpeed's files.
    """
    optimizer = engine.optimizer
    for number, flat in enumerate(getattr(optimizer, "single_partition_of_fp32_groups", ())):
        own = optimizer.params_in_partition[number]
        value = _state_of(engine).get(flat, {}).get("momentum_buffer")
        if value is None or value.dtype not in QUANTIZABLE or value.numel() == flat.numel():  # as that of others
            continue
        if not value.is_contiguous() or value.numel() != sum(p.numel() for p in own):
            continue
        size = int(optimizer.partition_size[number])
        start = dist.get_rank(optimizer.real_dp_process_group[number]) * size
        placed = zip(_groups(engine)[number], optimizer.round_robin_bit16_offsets[number], strict=True)
        inside = {id(p) for p, at in placed if start <= at and at + p.numel() <= start + size}
        slices = [
            ParameterSlice(names[p], tuple(p.shape), 0, p.numel(), at) for p, at in _packed(own)
            if id(p) in inside and p in names
        ]
        yield Buffer("momentum_buffer", value, slices, False)


def left_whole(engine: Any, found: Inventory, least: int) -> Counter[str]:
    """Return the bytes of the optimizer's float state that no buffer holds, by key, of tensors of `least` elements."""
    held, left = {id(buffer.tensor) for buffer in found.buffers}, Counter[str]()
    stored = any(not buffer.replicated or dist.get_rank() == 0 for buffer in found.buffers)
    for own in _state_of(engine).values() if stored else ():
        for key, value in own.items() if isinstance(own, Mapping) else ():
            for one in tree_leaves(value):  # some keep lists of matrices
                if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel() >= least:
                    left[str(key)] += 0 if id(one) in held else nbytes_of(one)
    return +left


def settings(engine: Any) -> dict[str, Any]:
    """Return what the optimizer keeps that is no tensor, by its name in a state dict.

    What it keeps for a parameter is named as if the first group had it: ZeRO 3 has no names for its partitions.
    """
    found = flatten_param_groups("optimizer", getattr(base_optimizer(engine), "param_groups", ()))
    for own in _state_of(engine).values() if found else ():
        for key, value in own.items() if isinstance(own, Mapping) else ():
            if not isinstance(value, torch.Tensor):
                found.setdefault(f"optimizer.param_groups.0.{key}", value)
    return found


def why_uncompressed(engine: Any) -> str | None:
    """Return why nothing of an engine's tags is compressed; None: its buffers are known by the parameters' names."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    staged = isinstance(engine, PipelineEngine)  # whose ranks count as model-parallel ones too
    shared = {"pipeline": staged, "tensor": engine.mp_world_size > 1 and not staged, "expert": engine.has_moe_layers}
    if kinds := [kind for kind, on in shared.items() if on]:
        return f"with {' and '.join(kinds)} parallelism one name may stand for another tensor on each rank"
    if engine.optimizer is None or engine.basic_optimizer is None:
        return "the engine has no optimizer, whose master weights and moments are what is compressed"
    if engine.zero_nvme_offload_optimizer():
        return "the optimizer's state is offloaded to NVMe"
    return None


def _partitions_parameters(engine: Any) -> bool:
    return bool(engine.zero_optimization_partition_weights())


def base_optimizer(engine: Any) -> Any:
    """Return the optimizer that updates the masters; None: the engine has none.

    In ZeRO 1 to 3 DeepSpeed replaces torch's Adagrad by a new one. `engine.basic_optimizer` stays the former, which
    does no steps.
    """
    basic = engine.basic_optimizer
    return basic if engine.optimizer is basic else getattr(engine.optimizer, "optimizer", basic)


def _state_of(engine: Any) -> Mapping[Any, Mapping[str, Any]]:
    state: Mapping[Any, Mapping[str, Any]] = base_optimizer(engine).state
    return state


def _groups(engine: Any) -> list[list[torch.Tensor]]:
    """Return the parameters of each group, in the order of its buffer."""
    optimizer = engine.optimizer
    for attribute in ("round_robin_bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(optimizer, attribute, None)
        if groups:
            return list(groups)
    return []


Master = tuple[torch.Tensor, list[ParameterSlice], bool]


def masters(engine: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Master]:
    """Yield each master tensor, which is a parameter of the optimizer, its slices, and whether it is replicated.

    Args:
        engine: DeepSpeed engine for which `why_uncompressed` is None.
        names: names of the module's parameters.
    """
    optimizer, groups = engine.optimizer, _groups(engine)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO 1 and 2
        for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            rank = dist.get_rank(optimizer.real_dp_process_group[number])
            size = int(optimizer.partition_size[number])
            placed = zip(groups[number], optimizer.round_robin_bit16_offsets[number], strict=True)
            yield flat, list(_slices_in_partition(placed, names, rank * size, size)), False
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3
        for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            yield flat, list(_partitioned(optimizer, group, names)), False
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        for number, flat in enumerate(optimizer.fp32_groups_flat_partition):
            rank = dist.get_rank(optimizer.real_dp_process_group[number])
            size = flat.numel()
            slices = list(_slices_in_partition(_packed(groups[number]), names, rank * size, size))
            yield flat, slices, False
    elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for number, flat in enumerate(optimizer.fp32_groups_flat):
            slices = list(_slices_in_partition(_packed(groups[number]), names, 0, flat.numel()))
            yield flat, slices, True
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        for masters, group in zip(optimizer.fp32_groups, groups, strict=True):
            for master, parameter in zip(masters, group, strict=True):
                if parameter in names:
                    yield master, [_whole(names[parameter], parameter)], True
    elif optimizer is engine.basic_optimizer:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in names:
                    yield parameter, [_whole(names[parameter], parameter)], True


def _whole(name: str, parameter: torch.Tensor) -> ParameterSlice:
    return ParameterSlice(name, tuple(parameter.shape), 0, parameter.numel(), 0)


def _packed(group: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield parameters with their offsets in a packed group."""
    at = 0
    for parameter in group:
        yield parameter, at
        at += parameter.numel()


def _slices_in_partition(
    placed: Iterable[tuple[torch.Tensor, int]], names: Mapping[torch.Tensor, str], start: int, length: int
) -> Iterator[ParameterSlice]:
    """Yield the slices of parameters, placed in a flat group, that lie in one partition of it."""
    for parameter, at in placed:
        first, last = max(at, start), min(at + parameter.numel(), start + length)
        if first < last and parameter in names:  # values of others, not in the module, stay in DeepSpeed's files
            yield ParameterSlice(names[parameter], tuple(parameter.shape), first - at, last - first, first - start)


def _partitioned(optimizer: Any, group: Iterable[Any], names: Mapping[torch.Tensor, str]) -> Iterator[ParameterSlice]:
    """Yield this rank's slices in ZeRO 3, where each parameter is split into equal partitions with padding."""
    rank = dist.get_rank(optimizer.dp_process_group)
    for parameter in group:
        _, at, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * part
        length = min(part, int(parameter.ds_numel) - start)
        if length > 0 and parameter in names:
            yield ParameterSlice(names[parameter], tuple(parameter.ds_shape), start, length, at)
