"""Trials of a search: evaluation of the model with the weights that a checkpoint would restore."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dsq_ckpt.core.checksums import checksums, quote
from dsq_ckpt.core.interrupts import in_user_code, run_pending_handlers
from dsq_ckpt.core.notices import format_error_line
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.distributed.comm import Communicator, SingleProcess, run_on_all_ranks
from dsq_ckpt.errors import ConfigError, described
from dsq_ckpt.quantization import device
from dsq_ckpt.quantization.analysis import Analysis
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey, QuantizingChunk, protected_bf16
from dsq_ckpt.quantization.codebook import GroupFit
from dsq_ckpt.quantization.compensation import Compensation
from dsq_ckpt.quantization.dequantizer import Dequantizer, add_residual
from dsq_ckpt.quantization.device.coding import DeviceTableCache, decode_chunk
from dsq_ckpt.search.evaluation_state import (
    EvaluationState,
    clone,
    get_local_tensors,
    get_place,
    get_storage_addresses,
    get_versions,
    restore_registry,
    synchronize_buffers,
    write,
)
from dsq_ckpt.search.input_recording import record_inputs
from dsq_ckpt.search.recount import recount_codes


class Probe(Enum):
    """Trial without a configuration, to check the metric or to record inputs."""

    AGAIN = "the model as it is, with other random numbers"
    RUINED = "the model with random signs of its weights"
    INPUTS = "the model as it is; the inputs of its weights are recorded"


class EvaluationRaised(Exception):
    """The user's function raised an error."""


class ModelChanged(Exception):
    """`evaluate` or `check` changed the model."""


class TrialModel:
    """Model whose weights can be replaced by decoded ones and restored bit for bit.

    A context manager: on exit, also by an exception, parameters, buffers, training flags and the random state of torch,
    NumPy and Python are restored to their state on entry. Memory: a copy of the local parameters and buffers.

    Args:
        model: the model.
        chunks: all local chunks of weights; those that are views of the model's parameters take part.
        workers: threads.
        refresh: copies master weights to the model if chunks are of master weights; collective over `comm`.
        comm: communicator of the ranks that evaluate.

    Raises:
        ConfigError: no chunk's tensor belongs to the model, so its metric would not depend on the trials.
    """

    def __init__(
        self, model: nn.Module, chunks: Sequence[Chunk], workers: Workers, refresh: Callable[[], None] | None = None,
        comm: Communicator | None = None,
    ) -> None:
        self._model = model
        self.workers = workers
        self._refresh = refresh
        self._comm = comm or SingleProcess()
        owned = get_storage_addresses(*model.parameters(), *model.buffers())
        needed = [
            chunk for chunk in chunks
            if chunk.key.elements and (refresh or get_storage_addresses(chunk.tensor) & owned)
        ]
        if any(chunk.key.elements for chunk in chunks) and not needed:  # a rank may have empty shards alone
            raise ConfigError(
                f"'{chunks[0].key.fqn}' is not a tensor of the model that is evaluated; save the state of that model, "
                "without copies (no cpu_offload, no full_state_dict)"
            )
        own_keys = {chunk.key for chunk in needed}
        self._mixed = {chunk.group for chunk in chunks if chunk.key.elements and chunk.key not in own_keys}
        chunks = needed  # others, such as an average of the weights, do not affect the metric
        self.groups = {chunk.group for chunk in needed}
        """Groups with chunks of the model."""
        self._targets = [chunk.tensor for chunk in chunks]
        self._chunks = list(chunks)
        self._tables = DeviceTableCache()
        self._compensations: dict[ChunkKey, Compensation] = {}
        # Other targets are also written by refresh, FSDP or ZeRO, so their contents are not tracked.
        plain = refresh is None and not any(isinstance(module, FSDPModule) for module in model.modules())
        parameters = get_storage_addresses(*(p for p in model.parameters() if plain and not _is_partitioned(p)))
        self._lasting = [bool(get_storage_addresses(tensor) & parameters) for tensor in self._targets]
        self._held: dict[int, tuple[object, bool]] = {}
        """Contents of the targets by index: a fit, and whether it was refined, or a trial without fits."""

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Chunks of the model, with their values on entry."""
        return self._chunks

    def __enter__(self) -> TrialModel:
        self._shard()
        # Parameters may differ from what their masters give; `refresh` would make them the same. Without it, those
        # that are not quantized are only put back if `evaluate` changes them.
        targets = {get_place(target) for target in self._targets} if self._refresh is None else set()
        self._parameters = [
            (p, p.data, [] if get_place(p) in targets else clone(_get_parts(p))) for p in self._model.parameters()
        ]
        self._registered = [
            (m, dict(m._parameters.items()), dict(m._modules.items())) for m in self._model.modules()  # of scripts too
        ]
        self._entry_state = self._state = EvaluationState(self._model)
        self._chunks = [replace(chunk, tensor=chunk.tensor.detach().clone()) for chunk in self._chunks]
        return self

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for chunk, target in zip(self._chunks, self._targets, strict=True):
                write(target, chunk.tensor)
            self._drop_cached_weights()
            for module, parameters, modules in self._registered:  # after FSDP2 put its own ones back
                restore_registry(module._parameters, parameters)
                restore_registry(module._modules, modules)
            for parameter, data, originals in self._parameters:
                if not _is_partitioned(parameter) and get_place(parameter) != get_place(data):
                    parameter.data = data
                for part, original in zip(_get_parts(parameter), originals, strict=False):
                    if part.shape == original.shape:  # ZeRO 3 gathers some, and lets go of them, as it likes
                        part.copy_(original)
        self._entry_state.restore()

    def evaluate(
        self, evaluate: Callable[[], float], trial: Analysis | Probe | None = None, refined: bool = False,
        name: str = "evaluate",
    ) -> float:
        """Return the metric of the model with decoded weights, or (`trial` None) with its own.

        Args:
            evaluate: returns the metric of the model in its current state.
            trial: fits, where groups without one keep their values; or a probe.
            refined: decode with the refinement layer of the fits. False: the base layer.
            name: name of `evaluate`, for errors.

        Raises:
            EvaluationRaised: `evaluate` raised an error or returned no number.
            ModelChanged: `evaluate` changed values, memory or gradients of parameters, even if it raised an error.
        """
        if synchronize_buffers(self._model, self._comm.size):  # all ranks evaluate together at first
            self._state = EvaluationState(self._model)
        self._write_trial(trial, refined)
        before = self._fingerprint()
        if trial is Probe.AGAIN:
            self._state.reseed()
        raised: Exception | None = None
        try:
            with in_user_code():
                metric = self._evaluate_with_inputs(evaluate) if trial is Probe.INPUTS else float(evaluate())
        except ModelChanged:
            raise
        except Exception as error:
            raised = error
        finally:
            self._state.restore()
        effect = ""
        if raised is not None:
            self._held.clear()  # it may have changed them
            self._end_forward()
            run_pending_handlers()  # what a handler raised is no failure of the function
            traceback.clear_frames(raised.__traceback__)  # what they hold may be all of a GPU's memory
            effect = f"raised {described(raised)}{format_error_line(raised)}"
        self._shard()
        after = self._fingerprint()
        changed = [name for name in (*before, *(name for name in after if name not in before))
                   if before.get(name) != after.get(name)]
        if changed:
            raise ModelChanged(
                f"`{name}` {effect and f'{effect}, and '}changed {quote(changed)}: it must leave the model as it is; "
                "evaluate without optimizer steps and changes in place, or a copy. The model's parameters were put "
                "back, optimizer and gradients were not; the checkpoint was not written"
            ) from raised
        if raised is not None:
            raise EvaluationRaised(f"`{name}` {effect}") from raised
        return metric

    def _evaluate_with_inputs(self, evaluate: Callable[[], float]) -> float:
        """Evaluate and record inputs, so that codes of later trials compensate each other's errors.

        Groups that also have chunks outside of the model are excluded: their codes are counted in sketches alone.
        """
        with record_inputs(self._targets) as recorder:
            metric = float(evaluate())
        self._compensations = {
            chunk.key: compensation for chunk, target in zip(self._chunks, self._targets, strict=True)
            if chunk.group not in self._mixed and (compensation := recorder.get_compensation(target)) is not None
        }
        self.compensate(True)
        return metric

    def compensate(self, on: bool) -> None:
        """Choose compensated codes in later trials, if inputs were recorded, or (`on` False) nearest codes."""
        self._held.clear()
        self._chunks = [
            replace(chunk, compensation=self._compensations.get(chunk.key) if on else None) for chunk in self._chunks
        ]

    @property
    def compensations(self) -> dict[ChunkKey, Compensation]:
        """Compensations in use, by chunk."""
        return {chunk.key: chunk.compensation for chunk in self._chunks if chunk.compensation is not None}

    @property
    def compensated_share(self) -> float:
        """Share of the compensated elements."""
        elements = sum(chunk.key.elements for chunk in self._chunks)
        return sum(compensation.elements for compensation in self.compensations.values()) / max(elements, 1)

    def recount(self, fitted: Mapping[str, GroupFit]) -> dict[str, GroupFit]:
        """Return fits by group with the counts and errors of the stored codes."""
        return recount_codes(fitted, self._chunks, self.workers)

    def _fingerprint(self) -> dict[str, Hashable]:
        """Return the address, the version of the gradient and a checksum of the values of each parameter, by name.

        For a parameter that ZeRO 3 partitions, and gathers and releases, only the partition counts.
        """
        parameters = {strip_wrappers(name): p for name, p in self._model.named_parameters()}
        values = {name: (lambda p=p: getattr(p, "ds_tensor", p).data) for name, p in parameters.items()}
        if self._refresh is not None:
            values |= {f"master of {chunk.key}": (lambda t=target: t)
                       for chunk, target in zip(self._chunks, self._targets, strict=True)}
        marks: dict[str, Hashable] = dict(checksums(values, self.workers))
        for name, p in parameters.items():
            memory = None if _is_partitioned(p) else (id(p), get_place(p))
            marks[name] = marks[name], memory
            if p.grad is not None:
                marks[f"{name}.grad"] = get_place(p.grad), get_versions(p.grad)
        return marks

    def _write_trial(self, trial: Analysis | Probe | None, refined: bool) -> None:
        def values(chunk: Chunk) -> torch.Tensor:
            if trial is Probe.RUINED:
                return _randomize_signs(chunk.tensor)
            fitted = content(chunk)
            return self._decode_chunk(chunk, fitted, refined) if isinstance(fitted, GroupFit) else chunk.tensor

        def content(chunk: Chunk) -> object:
            return trial.fitted.get(chunk.group) if isinstance(trial, Analysis) else trial

        def store() -> None:
            for index, (chunk, target) in enumerate(zip(self._chunks, self._targets, strict=True)):
                fitted, previous = content(chunk), self._held.get(index)
                if previous is not None and previous[0] is fitted and previous[1] == refined:
                    continue  # as in most probes of steps, which move one class of tensors
                with torch.no_grad():
                    write(target, values(chunk))
                if self._lasting[index]:
                    self._held[index] = fitted, refined

        if self._refresh is None:
            store()
        else:
            run_on_all_ranks(self._comm, store)  # what fails on one rank must not leave the others waiting in `refresh`
        self._drop_cached_weights()

    def _drop_cached_weights(self) -> None:
        """Drop copies of the previous weights: autocast's cached casts, and gathered parameters of FSDP2's root."""
        torch.clear_autocast_cache()
        if self._refresh is not None:
            self._refresh()
        self._shard()

    def _end_forward(self) -> None:
        """End a forward pass that raised an error: until its end, FSDP2 does not release the root's parameters."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
                if group is not None:
                    group._training_state = type(group._training_state).IDLE

    def _shard(self) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _decode_chunk(self, chunk: Chunk, fitted: GroupFit, refined: bool) -> torch.Tensor:
        """Return the restored values of a chunk, float32, clamped to the range of its dtype."""
        bits = fitted.refinement_bits if refined else 0
        if device.is_supported(chunk) and fitted.partition_turn is None:
            values = decode_chunk(chunk, self._tables.get(fitted, chunk.tensor.device), bits).view(chunk.tensor.shape)
            return _clamp_to_dtype(values, chunk.tensor.dtype)
        source = QuantizingChunk(replace(chunk, refinement_bits=bits), fitted, self.workers)
        dequantizer = Dequantizer(fitted.codebook, chunk.exponent, bits)
        out = np.empty(chunk.key.elements, np.float32)

        def work(span: slice) -> None:
            data, codes = source.block(span), source.codes[span]  # in this order: the former sets the latter
            if bits:
                symbols = np.frombuffer(data.refinement, np.uint8)
                dequantizer.block(codes, data.protected, symbols, out[span], packed=True)
            else:
                exact = protected_bf16(data.protected).astype(np.uint32) << np.uint32(16)
                dequantizer.block(codes, exact, None, out[span])
            if chunk.base_values is not None:
                add_residual(chunk.base_values[span], out[span], out[span])

        for _ in self.workers.map(work, self.workers.blocks(chunk.key.elements)):
            pass
        return _clamp_to_dtype(torch.from_numpy(out).view(chunk.tensor.shape), chunk.tensor.dtype)


def _randomize_signs(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values with random signs, the same in each call, which destroy what was learned.

    Unlike zeros, they do not improve an untrained model.
    """
    generator = torch.Generator(tensor.device)
    generator.manual_seed(0)
    signs = torch.randint(2, tensor.shape, generator=generator, device=tensor.device, dtype=torch.int8) * 2 - 1
    return tensor * signs


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_tensor")


def _get_parts(parameter: nn.Parameter) -> list[torch.Tensor]:
    """Return the data of a parameter, which a refresh may change, and its partition under ZeRO 3."""
    partition = getattr(parameter, "ds_tensor", None)
    return get_local_tensors(parameter.data) + ([] if partition is None else [partition.data])


def _clamp_to_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values, clamped so that they stay finite in a dtype."""
    if dtype in (torch.float32, torch.float64):
        return values
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit)
