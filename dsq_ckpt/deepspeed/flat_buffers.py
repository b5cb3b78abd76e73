"""A map of DeepSpeed's flat buffers to slices of named parameters.

Each optimizer of DeepSpeed keeps master weights and moments in a layout of its own:

* ZeRO 1 and 2, `BF16_Optimizer`: flat partitions of parameter groups;
* ZeRO 3: flat sub-groups, in which each parameter is partitioned;
* `FP16_Optimizer`: flat parameter groups;
* `FP16_UnfusedOptimizer`: one tensor per parameter;
* others: the parameters themselves.

The tensors in a checkpoint's state dicts are views of these buffers, so the map identifies them by their memory.
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
        buffer_start: first element in the buffer.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    buffer_start: int


@dataclass
class Buffer:
    """A tensor that holds master weights, or one of their moments.

    Attributes:
        kind: `MASTER`, or the key of the moment in the optimizer's state.
        tensor: contiguous tensor of any shape.
        slices: slices of named parameters; the remaining elements are padding.
        replicated: True if all ranks of the data-parallel group hold the same values; False if each holds a partition.
    """

    kind: str
    tensor: torch.Tensor
    slices: list[ParameterSlice]
    replicated: bool

    def fqn(self, slice_: ParameterSlice) -> str:
        """Return the FQN of a slice's tensor in the checkpoint."""
        name = slice_.name
        return f"model.{name}" if self.kind == MASTER else f"optimizer.state.{name}.{self.kind}"

    def path(self, slice_: ParameterSlice) -> tuple[str, ...]:
        """Return the path of a slice's tensor in the nested state dict."""
        if self.kind == MASTER:
            return "model", slice_.name
        return "optimizer", "state", slice_.name, self.kind


def get_parameter_name(fqn: str) -> str:
    """Return the parameter's name in an FQN of `Buffer.fqn`."""
    if fqn.startswith("optimizer.state."):
        return fqn.removeprefix("optimizer.state.").rpartition(".")[0]
    return fqn.removeprefix("model.")


@dataclass
class Inventory:
    """The buffers of an engine.

    Attributes:
        buffers: buffers of this rank.
        master_shapes: shape by name of each parameter with a master copy in some buffer, on any rank.
        parameters: the module's parameters by name; empty if ZeRO partitions them.
    """

    buffers: list[Buffer] = field(default_factory=list)
    master_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def take_inventory(engine: Any) -> Inventory:
    """Return the buffers of a DeepSpeed engine; empty if parameters cannot be identified by name.

    With tensor, pipeline or expert parallelism a name denotes another tensor on every rank of the model-parallel group.
    The files of such an engine, or of an engine with an unknown optimizer, are stored uncompressed.
    """
    if get_uncompressed_reason(engine):
        return Inventory()
    inventory = Inventory()
    names: Mapping[torch.Tensor, str] = engine.param_names
    for tensor, slices, replicated in iter_masters(engine, names):
        state = _get_optimizer_state(engine).get(tensor, {})
        moment_buffers = [
            Buffer(name, value, slices, replicated) for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.numel() == tensor.numel() and value.numel() > 1
            and value.dtype in QUANTIZABLE and not hasattr(value, "__tensor_flatten__")  # e.g. torchao's
        ]
        for buffer in [Buffer(MASTER, tensor, slices, replicated), *moment_buffers]:
            if buffer.tensor.is_contiguous() and buffer.tensor.numel():
                inventory.buffers.append(buffer)
    inventory.buffers += _iter_muon_buffers(engine, names)
    if not _has_partitioned_parameters(engine):
        inventory.parameters = {names[p]: p.detach() for p in names if p.numel()}
        optimized_ids = {id(p) for group in get_base_optimizer(engine).param_groups for p in group["params"]}
        grouped_ids = {id(p) for group in _get_grouped_parameters(engine) for p in group}
        inventory.master_shapes = {
            name: tuple(p.shape) for p, name in names.items() if p.numel() and id(p) in (grouped_ids or optimized_ids)
        }
    return inventory


def _iter_muon_buffers(engine: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Buffer]:
    """Yield the momentum buffers of DeepSpeed's Muon in ZeRO 1 and 2, which concatenate whole parameters.

    Each rank has the momentum of all parameters that overlap its partition. A parameter on the border of two partitions
    has its momentum on both ranks; it is left out, and stays in DeepSpeed's files.
    """
    optimizer = engine.optimizer
    for number, flat in enumerate(getattr(optimizer, "single_partition_of_fp32_groups", ())):
        partition_parameters = optimizer.params_in_partition[number]
        momentum = _get_optimizer_state(engine).get(flat, {}).get("momentum_buffer")
        if momentum is None or momentum.dtype not in QUANTIZABLE or momentum.numel() == flat.numel():  # not Muon's
            continue
        if not momentum.is_contiguous() or momentum.numel() != sum(p.numel() for p in partition_parameters):
            continue
        size = int(optimizer.partition_size[number])
        start = dist.get_rank(optimizer.real_dp_process_group[number]) * size
        offsets = zip(_get_grouped_parameters(engine)[number], optimizer.round_robin_bit16_offsets[number], strict=True)
        inside_ids = {id(p) for p, offset in offsets if start <= offset and offset + p.numel() <= start + size}
        slices = [
            ParameterSlice(names[p], tuple(p.shape), 0, p.numel(), offset)
            for p, offset in _iter_packed_offsets(partition_parameters) if id(p) in inside_ids and p in names
        ]
        yield Buffer("momentum_buffer", momentum, slices, False)


def count_uncompressed_bytes(engine: Any, inventory: Inventory, min_elements: int) -> Counter[str]:
    """Return the bytes of the optimizer's float state outside of buffers, by key.

    Args:
        engine: DeepSpeed engine.
        inventory: buffers of the engine.
        min_elements: number of elements below which tensors are not counted.
    """
    buffer_ids, byte_counts = {id(buffer.tensor) for buffer in inventory.buffers}, Counter[str]()
    rank_writes = any(not buffer.replicated or dist.get_rank() == 0 for buffer in inventory.buffers)
    for state in _get_optimizer_state(engine).values() if rank_writes else ():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            for tensor in tree_leaves(value):  # some optimizers keep lists of matrices
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() >= min_elements:
                    byte_counts[str(key)] += 0 if id(tensor) in buffer_ids else nbytes_of(tensor)
    return +byte_counts


def get_optimizer_settings(engine: Any) -> dict[str, Any]:
    """Return the optimizer's values that are not tensors, by name in a state dict.

    Values of a parameter get names in the first parameter group, since partitions of ZeRO 3 have no names.
    """
    settings = flatten_param_groups("optimizer", getattr(get_base_optimizer(engine), "param_groups", ()))
    for state in _get_optimizer_state(engine).values() if settings else ():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if not isinstance(value, torch.Tensor):
                settings.setdefault(f"optimizer.param_groups.0.{key}", value)
    return settings


def get_uncompressed_reason(engine: Any) -> str | None:
    """Return why nothing of an engine's tags is compressed; None if its buffers can be mapped to named parameters."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    is_pipeline = isinstance(engine, PipelineEngine)  # DeepSpeed counts its ranks as model-parallel
    has_tensor_parallelism = engine.mp_world_size > 1 and not is_pipeline
    parallelism = {"pipeline": is_pipeline, "tensor": has_tensor_parallelism, "expert": engine.has_moe_layers}
    if kinds := [kind for kind, is_used in parallelism.items() if is_used]:
        return f"with {' and '.join(kinds)} parallelism one name may stand for another tensor on each rank"
    if engine.optimizer is None or engine.basic_optimizer is None:
        return "the engine has no optimizer, whose master weights and moments are what is compressed"
    if engine.zero_nvme_offload_optimizer():
        return "the optimizer's state is offloaded to NVMe"
    return None


def _has_partitioned_parameters(engine: Any) -> bool:
    return bool(engine.zero_optimization_partition_weights())


def get_base_optimizer(engine: Any) -> Any:
    """Return the optimizer that updates the masters; None if the engine has none.

    In ZeRO 1 to 3 DeepSpeed replaces torch's Adagrad by a new instance. `engine.basic_optimizer` remains the former
    instance, which does no steps.
    """
    basic = engine.basic_optimizer
    return basic if engine.optimizer is basic else getattr(engine.optimizer, "optimizer", basic)


def _get_optimizer_state(engine: Any) -> Mapping[Any, Mapping[str, Any]]:
    state: Mapping[Any, Mapping[str, Any]] = get_base_optimizer(engine).state
    return state


def _get_grouped_parameters(engine: Any) -> list[list[torch.Tensor]]:
    """Return the module's parameters of each group, in the order of its buffer."""
    optimizer = engine.optimizer
    for attribute in ("round_robin_bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(optimizer, attribute, None)
        if groups:
            return list(groups)
    return []


Master = tuple[torch.Tensor, list[ParameterSlice], bool]


def iter_masters(engine: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Master]:
    """Yield each master tensor (a parameter of the optimizer), its slices, and whether it is replicated.

    Args:
        engine: DeepSpeed engine for which `get_uncompressed_reason` returns None.
        names: names of the module's parameters.
    """
    optimizer, groups = engine.optimizer, _get_grouped_parameters(engine)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO 1 and 2
        for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            rank = dist.get_rank(optimizer.real_dp_process_group[number])
            size = int(optimizer.partition_size[number])
            offsets = zip(groups[number], optimizer.round_robin_bit16_offsets[number], strict=True)
            yield flat, list(_iter_partition_slices(offsets, names, rank * size, size)), False
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3
        for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            yield flat, list(_iter_zero3_slices(optimizer, group, names)), False
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        for number, flat in enumerate(optimizer.fp32_groups_flat_partition):
            rank = dist.get_rank(optimizer.real_dp_process_group[number])
            size = flat.numel()
            slices = list(_iter_partition_slices(_iter_packed_offsets(groups[number]), names, rank * size, size))
            yield flat, slices, False
    elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for number, flat in enumerate(optimizer.fp32_groups_flat):
            slices = list(_iter_partition_slices(_iter_packed_offsets(groups[number]), names, 0, flat.numel()))
            yield flat, slices, True
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        for group_masters, group in zip(optimizer.fp32_groups, groups, strict=True):
            for master, parameter in zip(group_masters, group, strict=True):
                if parameter in names:
                    yield master, [_create_full_slice(names[parameter], parameter)], True
    elif optimizer is engine.basic_optimizer:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in names:
                    yield parameter, [_create_full_slice(names[parameter], parameter)], True


def _create_full_slice(name: str, parameter: torch.Tensor) -> ParameterSlice:
    return ParameterSlice(name, tuple(parameter.shape), 0, parameter.numel(), 0)


def _iter_packed_offsets(group: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the parameters of a packed group with their offsets."""
    offset = 0
    for parameter in group:
        yield parameter, offset
        offset += parameter.numel()


def _iter_partition_slices(
    offsets: Iterable[tuple[torch.Tensor, int]], names: Mapping[torch.Tensor, str], start: int, length: int
) -> Iterator[ParameterSlice]:
    """Yield the slices of a flat group's parameters that lie in one partition.

    Args:
        offsets: parameters of the group with their offsets.
        names: names of the module's parameters.
        start: first element of the partition in the group.
        length: number of elements of the partition.
    """
    for parameter, offset in offsets:
        first, last = max(offset, start), min(offset + parameter.numel(), start + length)
        if first < last and parameter in names:  # values of unnamed parameters stay in DeepSpeed's files
            yield ParameterSlice(names[parameter], tuple(parameter.shape), first - offset, last - first, first - start)


def _iter_zero3_slices(
    optimizer: Any, group: Iterable[Any], names: Mapping[torch.Tensor, str]
) -> Iterator[ParameterSlice]:
    """Yield this rank's slices in ZeRO 3, where each parameter is split into equal partitions with padding."""
    rank = dist.get_rank(optimizer.dp_process_group)
    for parameter in group:
        _, buffer_start, partition_size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * partition_size
        length = min(partition_size, int(parameter.ds_numel) - start)
        if length > 0 and parameter in names:
            yield ParameterSlice(names[parameter], tuple(parameter.ds_shape), start, length, buffer_start)
