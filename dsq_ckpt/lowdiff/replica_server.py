"""The server of a replica: model and optimizer on the CPU, in the state of training (LowDiff+, section VI).

It applies training's gradients with the same optimizer, and saves the result on request. When the training process
dies it stays for some time, so that the next training process can recover the state from memory.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from dsq_ckpt.distributed.comm import RankUnreachable
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.lowdiff import memory, segments
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed
from dsq_ckpt.lowdiff.locks import Lock
from dsq_ckpt.lowdiff.plain import from_plain, to_plain
from dsq_ckpt.lowdiff.server import Server, describe
from dsq_ckpt.lowdiff.snapshots import SnapshotTensor
from dsq_ckpt.lowdiff.train_state import OPTIMIZER, dtype_name
from dsq_ckpt.lowdiff.worker_client import ArenaLayout, nbytes
from dsq_ckpt.storage.record_fields import parse_dtype


class ReplicaServer(Server):
    """A server that holds a replica of this rank's share of the model; see `Server` for the arguments.

    With several ranks it applies a step only when the next one arrives: when training dies, ranks may differ by one
    received step, and all must be able to stop at the same step.
    """

    def __init__(self, channel: Channel, begin: Mapping[str, Any], lock: Lock) -> None:
        super().__init__(channel, begin, lock)
        self._optimizer_spec: dict[str, Any] = begin["optimizer"]
        self._linger = float(begin["linger"])
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._others: dict[tuple[str, ...], torch.Tensor] = {}
        self._meta: dict[str, Any] = {}
        self._waiting: list[Mapping[str, Any]] = []
        self._path: list[str] = begin["path"]
        self._turn = threading.RLock()  # serializes changes and reads of the replica after training has ended
        self._copy: memory.ReplicaShard | None = None
        self._persisted = -1
        self._problem = ""
        self.applied = 0
        """Last step that was applied to the replica."""

    @property
    def newest(self) -> int:
        """Last step that was received."""
        with self._turn:
            return int(self._waiting[-1]["step"]) if self._waiting else self.applied

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "snapshot":
            self.wait()
            self._become(message)
            self._persist()
        elif message["kind"] == "step":
            self._waiting.append(message)
            self.advance(self.newest - (1 if self.ranks > 1 else 0))
        elif message["kind"] == "persist":
            self.advance(int(message["step"]))  # all ranks have received it
            self._persist()
        elif message["kind"] == "leave":
            raise ChannelClosed("the training process goes on without")
        else:
            raise ValueError(f"message {message['kind']!r}")

    def advance(self, step: int) -> None:
        """Apply the received steps up to `step`."""
        with self._turn:
            while self._waiting and int(self._waiting[0]["step"]) <= step:
                self._apply(self._waiting.pop(0))

    def after(self, step: int) -> memory.ReplicaShard | None:
        """Return the replica after a step, in shared memory; None if it is at an earlier or a later step."""
        with self._turn:
            if self.applied <= step <= self.newest:
                self.advance(step)
            return None if self.applied != step else self._shared()

    def _shared(self) -> memory.ReplicaShard:
        """Return a copy of the replica in shared memory, made once per step."""
        if self._copy is None or self._copy.step != self.applied:
            snapshot_tensors = self._replica()
            layout = ArenaLayout()
            places = [layout.add(nbytes(item.tensor)) for item in snapshot_tensors]
            arena = Arena.create(layout.size)
            listed = []
            for (path, tensor), at in zip(snapshot_tensors, places, strict=True):
                arena.view(at, tuple(tensor.shape), tensor.dtype).copy_(tensor)
                listed.append([list(path), dtype_name(tensor.dtype), list(tensor.shape), at])
            self._copy = memory.ReplicaShard(self.applied, listed, self._log_metadata(), arena)
        return self._copy

    def _log_metadata(self) -> dict[str, Any]:
        """Return the metadata of a snapshot; the optimizer's plain state is that of this rank's share."""
        assert self._optimizer is not None
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not torch.is_tensor(value):
                    plain.setdefault(name, {})[key] = to_plain(value, key)
        return {**self._meta, "step": self.applied, "plain": plain, "state_keys": {}}

    def _become(self, message: Mapping[str, Any]) -> None:
        """Initialize the replica from a snapshot of training."""
        for left_out in self._waiting:
            self._report({"kind": "free", "slot": left_out["slot"]})
        self._waiting.clear()
        self._meta, self.entries = dict(message["meta"]), self._logged_entries(message)
        tensors = {item.path: item.tensor.clone() for item in self._staged_tensors(message["tensors"])}
        names = {entry.name for entry in self.entries}
        own: dict[str, nn.Parameter] = {}
        self._others = {}
        state: defaultdict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
        for path, tensor in tensors.items():
            if path[0] == OPTIMIZER:
                continue
            if path[1] in names:
                own[path[1]] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            elif self._meta["aliases"].get(path[1]) not in names:
                self._others[path] = tensor
        for path, tensor in tensors.items():
            if path[0] == OPTIMIZER:
                state[own[path[2]]][path[3]] = tensor
        for name, values in self._meta["plain"].items():
            if name in own:
                state[own[name]] |= {key: from_plain(value) for key, value in values.items()}
        self._parameters = own
        groups: list[dict[str, Any]] = [{"params": []} for _ in self._meta["hyper"]]
        for entry in self.entries:
            groups[entry.group]["params"].append(own[entry.name])
        sys.path += [place for place in self._path if place not in sys.path]
        kind = getattr(importlib.import_module(self._optimizer_spec["module"]), self._optimizer_spec["name"])
        optimizer = kind.__new__(kind)
        optimizer.__setstate__({
            "defaults": from_plain(self._optimizer_spec["defaults"]), "state": state, "param_groups": groups,
        })
        self._optimizer = optimizer
        self._set_hyper(self._meta["hyper"])
        self.applied = int(message["step"])

    def _apply(self, message: Mapping[str, Any]) -> None:
        """Apply one step, after which its slot is free."""
        slot = self._slots.get(message["slot"])
        assert self._optimizer is not None
        if message["stepped"]:
            assert slot is not None
            self._set_hyper(message["hyper"])
            scale = message["hints"]["scales"][0]
            gradients = {part["param"]: part for part in message["dense"]}
            for place, entry in enumerate(self.entries):
                parameter = self._parameters[entry.name]
                parameter.grad = None
                if (part := gradients.get(place)) is not None:
                    gradient = slot.view(part["at"], entry.shape, parse_dtype(part["dtype"]))
                    if scale != 1.0:
                        gradient = gradient * torch.tensor(scale, dtype=torch.float32)
                    parameter.grad = gradient
            self._optimizer.step()
            for parameter in self._parameters.values():
                parameter.grad = None
        for name, dtype, shape, offset in message["buffers"]:
            assert slot is not None
            self._others["model", name] = slot.view(offset, tuple(shape), parse_dtype(dtype)).clone()
        self._set_hyper(message["after"]["hyper"] or message["hyper"])
        self._meta |= {"hyper": message["after"]["hyper"] or message["hyper"], "states": message["after"]["states"]}
        self.applied = int(message["step"])
        self._report({"kind": "free", "slot": message["slot"]})

    def _set_hyper(self, hyper: list[dict[str, Any]]) -> None:
        assert self._optimizer is not None
        for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
            group.update({key: from_plain(value) for key, value in values.items()})

    def _replica(self) -> list[SnapshotTensor]:
        assert self._optimizer is not None
        found = [SnapshotTensor(("model", name), parameter.detach()) for name, parameter in self._parameters.items()]
        found += [SnapshotTensor(path, tensor) for path, tensor in self._others.items()]
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):
                    found.append(SnapshotTensor((OPTIMIZER, "state", name, key), value))
        aliases = self._meta["aliases"]
        return found + [
            SnapshotTensor(("model", alias), self._parameters[name].detach()) for alias, name in aliases.items()
            if name in self._parameters
        ]

    def _persist(self) -> None:
        """Save a copy of the current replica in the background."""
        self.wait()
        if self._copy is not None and self._copy.step == self.applied:
            snapshot_tensors = self._copy.snapshot_tensors()
        else:
            snapshot_tensors = [SnapshotTensor(item.path, item.tensor.clone()) for item in self._replica()]
        self._save_later(self.applied, snapshot_tensors, self._log_metadata())

    def _save(self, step: int, snapshot_tensors: list[SnapshotTensor], meta: Mapping[str, Any] | None) -> None:
        with suppress(OSError):  # lower this thread's priority: steps of training go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        assert meta is not None
        try:
            everybody = self._communicator().gather({"saves": step, "plain": meta["plain"]})
        except BaseException as error:
            self._failed(step, error)
            return
        if any(other.get("saves") != step for other in everybody):
            self._failed(step, SaveFailed("the training process of another rank is gone"))
            return
        whole = {**meta, "plain": {name: values for other in everybody for name, values in other["plain"].items()}}
        self._persisted = step
        super()._save(step, snapshot_tensors, whole if self.rank == 0 else None)
        if self._persisted == step:  # it did not fail
            self._problem = ""

    def _failed(self, step: int, error: BaseException) -> None:
        self._persisted = -1
        self._problem = self._problem or f"the state after step {step} was not saved: {describe(error)}"
        if isinstance(error, RankUnreachable):
            super()._failed(step, error)
            return
        # The replica is still intact. Later failures repeat the text, so that training warns once.
        self._report({"kind": "unsaved", "text": self._problem})

    def _end(self, closing: bool) -> None:
        """Save the last state, and offer it to the next training process."""
        if self._optimizer is None:
            return
        listener = None if closing else memory.listen(self.run, self.rank)
        finishing = threading.Thread(target=self._finish, args=(closing,), name="finish")
        finishing.start()
        if listener is not None:
            memory.serve(listener, self, self._linger)
        finishing.join()
        if closing and self._persisted != self.newest:
            raise SaveFailed(self._problem or f"the state after step {self.newest} was not saved")
        if self.closed and self.rank == 0:
            segments.close(self.run, self.session, self._persisted, self.config.storage.fsync)

    def _finish(self, closing: bool) -> None:
        """Save the last state that all ranks have, and release the lock."""
        if not closing and self.ranks == 1:
            with self._turn, suppress(OSError):  # without enough memory the state is still saved
                self._shared()  # the next training process will request it
        self.wait()
        try:
            step = self._last_of_all()
            with self._turn:
                if step is not None:
                    self.advance(step)
                    if self._persisted != step:
                        self._persist()
        except BaseException as error:  # other hosts may have failed; this rank's replica is still valid
            self._problem = self._problem or describe(error)
        self.wait()
        if not closing:
            self._lock.release()

    def _last_of_all(self) -> int | None:
        """Return the last step that all ranks can reach, or None if there is none; collective."""
        while True:
            everybody = self._communicator().gather({"applied": self.applied, "newest": self.newest})
            if all("newest" in other for other in everybody):  # else somebody began to save when this rank had ended
                last = min(int(other["newest"]) for other in everybody)
                return last if max(int(other["applied"]) for other in everybody) <= last else None
