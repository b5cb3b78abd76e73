"""Gradients handed over layer by layer, while the backward pass goes on (LowDiff+, section VI-A)."""

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
from dsq_ckpt.lowdiff.ddp import CommHookSlot, distributed, take_seat
from dsq_ckpt.lowdiff.train_state import Entry, TrainState
from dsq_ckpt.lowdiff.worker_client import Layout, ProcessGone, WorkerClient, nbytes

Hook = Any
"""A communication hook of DDP, and its state."""


class GradientStreamer:
    """Copies gradients into shared memory as they are synchronized, with threads of its own.

    Under DDP a bucket is handed over when its all-reduce is done; in a process alone each gradient when it is
    accumulated. The backward pass does not end before all of it was copied, since clipping may come next.

    Args:
        subject: whose gradients they are.
        own: the parameters that this rank hands over.
        hook: how DDP is to synchronize, as `register_comm_hook` takes it; None: by an all-reduce.
        cores: that the threads run on; empty: wherever.
    """

    def __init__(self, subject: TrainState, hook: Hook | None, cores: Collection[int]) -> None:
        self._subject = subject
        self._hook = hook
        self._cores = cores
        self._pool = ThreadPoolExecutor(2, "snapshot", initializer=self._settle)
        self._places: dict[nn.Parameter, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._handle: WorkerClient | None = None
        self._room = 0
        self._copies: list[Future[Any]] = []
        self._synchronized: list[torch.futures.Future[Any]] = []
        self._waits_in = -1
        self._removable: list[Any] = []
        self._seat: CommHookSlot | None = None
        self.failed: ProcessGone | OSError | None = None
        self.slot: int | None = None
        self.new = False
        """The slot's memory is new to the process."""
        self.handed: set[nn.Parameter] = set()

    def attach(self) -> None:
        """Hook into the synchronization of gradients.

        Raises:
            ConfigError: the model has a communication hook already.
        """
        if (under := distributed(self._subject.model, "the replica")) is not None:
            self._seat = take_seat(under, self, "give the other one as hook=(state, hook)")
            return
        if self._hook is not None:
            raise ConfigError("hook= is for models under DistributedDataParallel")
        for parameter in self._subject.parameters.values():
            if parameter.requires_grad:
                self._removable.append(parameter.register_post_accumulate_grad_hook(self._gradient))

    def detach(self) -> None:
        """Hand nothing over any more."""
        self.stop()
        for hook in self._removable:
            hook.remove()
        if self._seat is not None:
            self._seat.leave()
            self._seat = None
        self._pool.shutdown()

    def start(self, handle: WorkerClient, subject: TrainState, own: Sequence[Entry], room: int) -> None:
        """Hand over to a checkpointing process from now on.

        Args:
            handle: of the process.
            subject: whose gradients they are, as it is now.
            own: the parameters that this rank hands over.
            room: bytes for buffers of the model, behind the gradients.
        """
        layout = Layout()
        self._subject = subject
        self._places = {}
        for entry in own:
            parameter = subject.parameters[entry.name]
            self._places[parameter] = layout.add(nbytes(parameter)), tuple(parameter.shape), parameter.dtype
        self.buffers_at = layout.add(room)
        self._room = layout.size
        self._handle = handle
        self.slot, self.failed = None, None
        self.handed.clear()

    def stop(self) -> None:
        """Hand nothing over until `start`."""
        self._handle = self.slot = None
        self.wait()

    def view(self, parameter: nn.Parameter) -> torch.Tensor:
        """Where a gradient is in the slot."""
        assert self._handle is not None and self.slot is not None
        offset, shape, dtype = self._places[parameter]
        return self._handle.arena(self.slot).view(offset, shape, dtype)

    def place(self, parameter: nn.Parameter) -> int:
        """Where that is, in bytes."""
        return self._places[parameter][0]

    def take_slot(self) -> None:
        """Have a slot, waiting for one."""
        if self.slot is None:
            assert self._handle is not None
            slot = self._handle.slot()
            arena, self.new = self._handle.room(slot, self._room)
            if any(parameter.is_cuda for parameter in self._places):
                arena.pin()
            self.slot = slot

    def reserve(self, room: int) -> None:
        """Have so many bytes for buffers in the slot; where that takes other memory, nothing was handed over."""
        self._room = max(self._room, self.buffers_at + room)
        assert self._handle is not None and self.slot is not None
        if self._handle.arena(self.slot).size < self._room:
            _, self.new = self._handle.room(self.slot, self._room)
            self.handed.clear()

    def let_go(self) -> None:
        """Give the slot back: what was handed over is not used."""
        if self.slot is not None:
            assert self._handle is not None
            self._handle.release(self.slot)
            self.slot = None
        self.handed.clear()

    def give(self) -> tuple[int, bool]:
        """The slot, which is somebody else's from now on, and whether its memory is new to the process."""
        assert self.slot is not None
        slot, self.slot = self.slot, None
        self.handed.clear()
        return slot, self.new

    @property
    def tenant(self) -> str:
        """See `ddp.HookOwner`."""
        return "a replica"

    def on_bucket(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
        """Synchronize a bucket, and hand it over when that is done."""
        done = allreduce_hook(group, bucket) if self._hook is None else self._hook[1](self._hook[0], bucket)
        if self._handle is None:
            return done
        self._begin()
        parameters = bucket.parameters()

        def hand_over(finished: torch.futures.Future[Any]) -> torch.Tensor:
            value = finished.value()
            whole: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
            flat, start = whole.view(-1), 0
            for parameter in parameters:
                piece = flat[start : start + parameter.numel()]
                start += parameter.numel()
                self._copy(parameter, torch.as_strided(
                    piece, parameter.shape, memory_strides(parameter), piece.storage_offset()
                ))
            return whole

        handed = done.then(hand_over)
        self._synchronized.append(handed)
        return handed

    def _gradient(self, parameter: nn.Parameter) -> None:
        if self._handle is not None and parameter.grad is not None:
            self._begin()
            self._copy(parameter, parameter.grad)

    def _begin(self) -> None:
        # Of this backward pass: one that fails does not call back.
        if (graph := torch._C._current_graph_task_id()) != self._waits_in:
            self._waits_in = graph
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        if self.failed is None:
            try:
                self.take_slot()
            except (ProcessGone, OSError) as error:
                self.failed = error

    def _copy(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.failed is None and parameter in self._places and gradient.layout is torch.strided:
            assert isinstance(parameter, nn.Parameter)
            if gradient.shape != self._places[parameter][1]:
                return  # the parameter has another shape since, and the log begins anew for that
            self.handed.add(parameter)
            ready = None
            if gradient.is_cuda:
                ready = torch.cuda.Event()
                ready.record(torch.cuda.current_stream(gradient.device))
            self._copies.append(self._pool.submit(_copied, self.view(parameter), gradient.detach(), ready))

    def wait(self) -> None:
        """Until all that was handed over is copied; called when the backward pass is done."""
        synchronized, self._synchronized = self._synchronized, []
        for one in synchronized:
            one.wait()
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.result()

    def _settle(self) -> None:
        """A thread goes where it was told to run; Linux's call is for the thread that makes it."""
        if self._cores:
            os.sched_setaffinity(0, self._cores)


def _copied(target: torch.Tensor, gradient: torch.Tensor, ready: torch.cuda.Event | None) -> None:
    """Copy a gradient to the host, once a GPU has it ready."""
    if ready is None:
        target.copy_(gradient)
        return
    stream = torch.cuda.Stream(gradient.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        target.copy_(gradient, non_blocking=True)
    stream.synchronize()
