"""Streaming of gradients layer by layer during the backward pass (LowDiff+, section VI-A)."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.buckets import memory_strides
from dsq_ckpt.lowdiff.ddp_hook import CommHookSlot, claim_hook_slot, find_ddp
from dsq_ckpt.lowdiff.train_state import ParameterEntry, TrainState
from dsq_ckpt.lowdiff.worker_client import ArenaLayout, ProcessGone, WorkerClient, nbytes

Hook = Any
"""The state of a communication hook of DDP, and the hook."""


class GradientStreamer:
    """A streamer that copies synchronized gradients into shared memory, with threads of its own.

    Under DDP a bucket is copied after its all-reduce. In a single process each gradient is copied when it is
    accumulated. The backward pass waits for all copies, since clipping may follow.

    Args:
        train_state: model and optimizer.
        hook: state and communication hook for DDP; None for an all-reduce.
        cores: CPUs of the threads; empty for all.

    Attributes:
        error: error of the checkpointing process during a backward pass; None without one.
        slot: slot of the current step; None before its first gradient.
        streamed_parameters: parameters whose gradients are in the slot.
    """

    def __init__(self, train_state: TrainState, hook: Hook | None, cores: Collection[int]) -> None:
        self._train_state = train_state
        self._hook = hook
        self._cores = cores
        self._pool = ThreadPoolExecutor(2, "snapshot", initializer=self._pin_to_cores)
        self._regions: dict[nn.Parameter, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._client: WorkerClient | None = None
        self._slot_bytes = 0
        self._copies: list[Future[Any]] = []
        self._pending_buckets: list[torch.futures.Future[Any]] = []
        self._graph_task = -1
        self._parameter_hooks: list[Any] = []
        self._hook_slot: CommHookSlot | None = None
        self.error: ProcessGone | OSError | None = None
        self.slot: int | None = None
        self.needs_mapping = False
        """True if the checkpointing process has not mapped the slot's memory yet."""
        self.streamed_parameters: set[nn.Parameter] = set()

    def attach(self) -> None:
        """Register the hooks on gradients.

        Raises:
            ConfigError: the model has a communication hook already.
        """
        if (ddp_model := find_ddp(self._train_state.model, "the replica")) is not None:
            self._hook_slot = claim_hook_slot(ddp_model, self, "give the other one as hook=(state, hook)")
            return
        if self._hook is not None:
            raise ConfigError("hook= is for models under DistributedDataParallel")
        self._register_parameter_hooks()

    def _register_parameter_hooks(self) -> None:
        for hook in self._parameter_hooks:
            hook.remove()
        self._parameter_hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in self._train_state.parameters.values() if parameter.requires_grad
        ]

    def detach(self) -> None:
        """Remove the hooks, and stop the threads."""
        self.stop()
        for hook in self._parameter_hooks:
            hook.remove()
        self._parameter_hooks = []
        if self._hook_slot is not None:
            self._hook_slot.release()
            self._hook_slot = None
        self._pool.shutdown()

    def start(
        self, client: WorkerClient, train_state: TrainState, entries: Sequence[ParameterEntry], buffer_bytes: int
    ) -> None:
        """Stream gradients to a checkpointing process from now on.

        Args:
            client: client of the checkpointing process.
            train_state: current model and optimizer.
            entries: parameters whose gradients this rank streams.
            buffer_bytes: bytes to reserve behind the gradients for buffers of the model.
        """
        layout = ArenaLayout()
        if self._parameter_hooks and train_state is not self._train_state:
            self._train_state = train_state
            self._register_parameter_hooks()
        self._train_state = train_state
        self._regions = {}
        for entry in entries:
            parameter = train_state.parameters[entry.name]
            self._regions[parameter] = layout.add(nbytes(parameter)), tuple(parameter.shape), parameter.dtype
        self.buffers_at = layout.add(buffer_bytes)
        self._slot_bytes = layout.size
        self._client = client
        self.slot, self.error = None, None
        self.streamed_parameters.clear()

    def stop(self) -> None:
        """Pause streaming until the next `start`."""
        self._client = self.slot = None
        self.wait()

    def view(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the tensor in the slot for the gradient of a parameter."""
        assert self._client is not None and self.slot is not None
        offset, shape, dtype = self._regions[parameter]
        return self._client.arena(self.slot).view(offset, shape, dtype)

    def offset(self, parameter: nn.Parameter) -> int:
        """Return the byte offset of a parameter's gradient in the slot."""
        return self._regions[parameter][0]

    def acquire_slot(self) -> None:
        """Acquire a slot for the current step. Wait until a slot is free."""
        if self.slot is None:
            assert self._client is not None
            slot = self._client.acquire_slot()
            arena, self.needs_mapping = self._client.ensure_arena(slot, self._slot_bytes)
            device = next((parameter.device for parameter in self._regions if parameter.is_cuda), None)
            if device is not None:
                arena.pin(device)
            self.slot = slot

    def reserve(self, buffer_bytes: int) -> None:
        """Reserve bytes for buffers in the slot. If this needs new memory, gradients in the slot are dropped."""
        self._slot_bytes = max(self._slot_bytes, self.buffers_at + buffer_bytes)
        assert self._client is not None and self.slot is not None
        if self._client.arena(self.slot).size < self._slot_bytes:
            _, self.needs_mapping = self._client.ensure_arena(self.slot, self._slot_bytes)
            self.streamed_parameters.clear()

    def discard_slot(self) -> None:
        """Release the slot without sending its gradients."""
        if self.slot is not None:
            assert self._client is not None
            self._client.release(self.slot)
            self.slot = None
        self.streamed_parameters.clear()

    def transfer_slot(self) -> tuple[int, bool]:
        """Return the slot, which the caller then owns, and whether the checkpointing process must map its memory."""
        assert self.slot is not None
        slot, self.slot = self.slot, None
        self.streamed_parameters.clear()
        return slot, self.needs_mapping

    @property
    def description(self) -> str:
        """See `ddp_hook.HookOwner`."""
        return "a replica"

    def on_bucket(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
        """Synchronize a bucket, and stream the result."""
        future = allreduce_hook(group, bucket) if self._hook is None else self._hook[1](self._hook[0], bucket)
        if self._client is None:
            return future
        self._start_backward()
        parameters = bucket.parameters()

        def stream(finished: torch.futures.Future[Any]) -> torch.Tensor:
            value = finished.value()
            mean: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
            flat, start = mean.view(-1), 0
            for parameter in parameters:
                piece = flat[start : start + parameter.numel()]
                start += parameter.numel()
                self._submit_copy(parameter, torch.as_strided(
                    piece, parameter.shape, memory_strides(parameter), piece.storage_offset()
                ))
            return mean

        streamed = future.then(stream)
        self._pending_buckets.append(streamed)
        return streamed

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._client is not None and parameter.grad is not None:
            self._start_backward()
            self._submit_copy(parameter, parameter.grad)

    def _start_backward(self) -> None:
        """Queue `wait` at the end of the backward pass, and acquire a slot."""
        # Once per backward pass, by its id, since a pass that fails runs no callback.
        if (graph := torch._C._current_graph_task_id()) != self._graph_task:
            self._graph_task = graph
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        if self.error is None:
            try:
                self.acquire_slot()
            except (ProcessGone, OSError) as error:
                self.error = error

    def _submit_copy(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.error is None and parameter in self._regions and gradient.layout is torch.strided:
            assert isinstance(parameter, nn.Parameter)
            if gradient.shape != self._regions[parameter][1]:
                return  # the parameter has changed its shape, so that the log restarts
            self.streamed_parameters.add(parameter)
            ready = None
            if gradient.is_cuda:
                ready = torch.cuda.Event()
                ready.record(torch.cuda.current_stream(gradient.device))
            self._copies.append(self._pool.submit(_copy_to_host, self.view(parameter), gradient.detach(), ready))

    def wait(self) -> None:
        """Wait for all copies; called at the end of the backward pass."""
        synchronized, self._pending_buckets = self._pending_buckets, []
        for bucket in synchronized:
            bucket.wait()
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.result()

    def _pin_to_cores(self) -> None:
        """Pin the calling thread to the configured CPUs."""
        if self._cores:
            os.sched_setaffinity(0, self._cores)


def _copy_to_host(target: torch.Tensor, gradient: torch.Tensor, ready: torch.cuda.Event | None) -> None:
    """Copy a gradient to the host, after the event `ready`."""
    if ready is None:
        target.copy_(gradient)
        return
    stream = torch.cuda.Stream(gradient.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        target.copy_(gradient, non_blocking=True)
    stream.synchronize()
