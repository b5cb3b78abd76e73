"""The server of a replica: model and optimizer on the CPU, in the state of training (LowDiff+, section VI).

The server applies training's gradients with the same optimizer, and saves the result on request. After the training
process died it stays for some time, so that the next training process can recover the state from memory.
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
from dsq_ckpt.lowdiff import replica_transfer, segments
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed
from dsq_ckpt.lowdiff.locks import Lock
from dsq_ckpt.lowdiff.plain_data import from_plain, to_plain
from dsq_ckpt.lowdiff.server import Server, format_error
from dsq_ckpt.lowdiff.snapshots import SnapshotTensor
from dsq_ckpt.lowdiff.train_state import OPTIMIZER, dtype_name
from dsq_ckpt.lowdiff.worker_client import ArenaLayout, nbytes
from dsq_ckpt.storage.record_fields import parse_dtype


class ReplicaServer(Server):
    """A server that holds a replica of this rank's share of the model; see `Server` for the arguments.

    With several ranks the server applies a step only after the next step arrives. When training dies, ranks may differ
    by one received step, and all ranks must be able to stop at the same step.
    """

    def __init__(self, channel: Channel, begin: Mapping[str, Any], lock: Lock) -> None:
        super().__init__(channel, begin, lock)
        self._optimizer_spec: dict[str, Any] = begin["optimizer"]
        self._linger = float(begin["linger"])
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._other_tensors: dict[tuple[str, ...], torch.Tensor] = {}
        self._metadata: dict[str, Any] = {}
        self._received_steps: list[Mapping[str, Any]] = []
        self._module_path: list[str] = begin["path"]
        self._replica_lock = threading.RLock()  # serializes updates and reads of the replica after training ended
        self._copy: replica_transfer.ReplicaShard | None = None
        self._saved_step = -1
        self._problem = ""
        self.applied = 0
        """Last step that was applied to the replica."""

    @property
    def newest_step(self) -> int:
        """Last step that was received."""
        with self._replica_lock:
            return int(self._received_steps[-1]["step"]) if self._received_steps else self.applied

    def _handle(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "snapshot":
            self.wait()
            self._initialize(message)
            self._persist()
        elif message["kind"] == "step":
            self._received_steps.append(message)
            self.advance(self.newest_step - (1 if self.ranks > 1 else 0))
        elif message["kind"] == "persist":
            self.advance(int(message["step"]))  # all ranks have received this step
            self._persist()
        elif message["kind"] == "leave":
            raise ChannelClosed("the training process goes on without")
        else:
            raise ValueError(f"message {message['kind']!r}")

    def advance(self, step: int) -> None:
        """Apply the received steps up to `step`."""
        with self._replica_lock:
            while self._received_steps and int(self._received_steps[0]["step"]) <= step:
                self._apply_step(self._received_steps.pop(0))

    def shard_after(self, step: int) -> replica_transfer.ReplicaShard | None:
        """Return the replica after a step, in shared memory; None if the replica cannot be at this step."""
        with self._replica_lock:
            if self.applied <= step <= self.newest_step:
                self.advance(step)
            return None if self.applied != step else self._shared_copy()

    def _shared_copy(self) -> replica_transfer.ReplicaShard:
        """Return a copy of the replica in shared memory, which is created once per step."""
        if self._copy is None or self._copy.step != self.applied:
            snapshot_tensors = self._collect_tensors()
            layout = ArenaLayout()
            offsets = [layout.add(nbytes(item.tensor)) for item in snapshot_tensors]
            arena = Arena.create(layout.size)
            descriptions = []
            for (path, tensor), offset in zip(snapshot_tensors, offsets, strict=True):
                arena.view(offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)
                descriptions.append([list(path), dtype_name(tensor.dtype), list(tensor.shape), offset])
            self._copy = replica_transfer.ReplicaShard(self.applied, descriptions, self._log_metadata(), arena)
        return self._copy

    def _log_metadata(self) -> dict[str, Any]:
        """Return the metadata of a snapshot, with the optimizer's plain state of this rank's share."""
        assert self._optimizer is not None
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not torch.is_tensor(value):
                    plain.setdefault(name, {})[key] = to_plain(value, key)
        return {**self._metadata, "step": self.applied, "plain": plain, "state_keys": {}}

    def _initialize(self, message: Mapping[str, Any]) -> None:
        """Initialize the replica from a snapshot of training."""
        for skipped in self._received_steps:
            self._report({"kind": "free", "slot": skipped["slot"]})
        self._received_steps.clear()
        self._metadata, self.entries = dict(message["meta"]), self._logged_entries(message)
        tensors = {item.path: item.tensor.clone() for item in self._staged_tensors(message["tensors"])}
        names = {entry.name for entry in self.entries}
        parameters: dict[str, nn.Parameter] = {}
        self._other_tensors = {}
        state: defaultdict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
        for path, tensor in tensors.items():
            if path[0] == OPTIMIZER:
                continue
            if path[1] in names:
                parameters[path[1]] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            elif self._metadata["aliases"].get(path[1]) not in names:
                self._other_tensors[path] = tensor
        for path, tensor in tensors.items():
            if path[0] == OPTIMIZER:
                state[parameters[path[2]]][path[3]] = tensor
        for name, values in self._metadata["plain"].items():
            if name in parameters:
                state[parameters[name]] |= {key: from_plain(value) for key, value in values.items()}
        self._parameters = parameters
        groups: list[dict[str, Any]] = [{"params": []} for _ in self._metadata["hyper"]]
        for entry in self.entries:
            groups[entry.group]["params"].append(parameters[entry.name])
        sys.path += [entry for entry in self._module_path if entry not in sys.path]
        kind = getattr(importlib.import_module(self._optimizer_spec["module"]), self._optimizer_spec["name"])
        optimizer = kind.__new__(kind)
        optimizer.__setstate__({
            "defaults": from_plain(self._optimizer_spec["defaults"]), "state": state, "param_groups": groups,
        })
        self._optimizer = optimizer
        self._set_hyper(self._metadata["hyper"])
        self.applied = int(message["step"])

    def _apply_step(self, message: Mapping[str, Any]) -> None:
        """Apply one step, and free its slot."""
        slot = self._slots.get(message["slot"])
        assert self._optimizer is not None
        if message["stepped"]:
            assert slot is not None
            self._set_hyper(message["hyper"])
            scale = message["hints"]["scales"][0]
            gradients = {fields["param"]: fields for fields in message["dense"]}
            for number, entry in enumerate(self.entries):
                parameter = self._parameters[entry.name]
                parameter.grad = None
                if (fields := gradients.get(number)) is not None:
                    gradient = slot.view(fields["at"], entry.shape, parse_dtype(fields["dtype"]))
                    if scale != 1.0:
                        gradient = gradient * torch.tensor(scale, dtype=torch.float32)
                    parameter.grad = gradient
            self._optimizer.step()
            for parameter in self._parameters.values():
                parameter.grad = None
        for name, dtype, shape, offset in message["buffers"]:
            assert slot is not None
            self._other_tensors["model", name] = slot.view(offset, tuple(shape), parse_dtype(dtype)).clone()
        self._set_hyper(message["after"]["hyper"] or message["hyper"])
        self._metadata |= {"hyper": message["after"]["hyper"] or message["hyper"], "states": message["after"]["states"]}
        self.applied = int(message["step"])
        self._report({"kind": "free", "slot": message["slot"]})

    def _set_hyper(self, hyper: list[dict[str, Any]]) -> None:
        assert self._optimizer is not None
        for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
            group.update({key: from_plain(value) for key, value in values.items()})

    def _collect_tensors(self) -> list[SnapshotTensor]:
        """Return the tensors of a snapshot, which share memory with the replica."""
        assert self._optimizer is not None
        tensors = [SnapshotTensor(("model", name), parameter.detach()) for name, parameter in self._parameters.items()]
        tensors += [SnapshotTensor(path, tensor) for path, tensor in self._other_tensors.items()]
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):
                    tensors.append(SnapshotTensor((OPTIMIZER, "state", name, key), value))
        aliases = self._metadata["aliases"]
        return tensors + [
            SnapshotTensor(("model", alias), self._parameters[name].detach()) for alias, name in aliases.items()
            if name in self._parameters
        ]

    def _persist(self) -> None:
        """Save a copy of the current replica in the background."""
        self.wait()
        if self._copy is not None and self._copy.step == self.applied:
            snapshot_tensors = self._copy.snapshot_tensors()
        else:
            snapshot_tensors = [SnapshotTensor(item.path, item.tensor.clone()) for item in self._collect_tensors()]
        self._save_in_background(self.applied, snapshot_tensors, self._log_metadata())

    def _save(self, step: int, snapshot_tensors: list[SnapshotTensor], meta: Mapping[str, Any] | None) -> None:
        with suppress(OSError):  # a lower priority for this thread, since steps of training go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        assert meta is not None
        try:
            gathered = self._communicator().gather({"saves": step, "plain": meta["plain"]})
        except BaseException as error:
            self._report_save_failure(step, error)
            return
        if any(report.get("saves") != step for report in gathered):
            self._report_save_failure(step, SaveFailed("the training process of another rank is gone"))
            return
        merged = {**meta, "plain": {name: values for report in gathered for name, values in report["plain"].items()}}
        self._saved_step = step
        super()._save(step, snapshot_tensors, merged if self.rank == 0 else None)
        if self._saved_step == step:  # `_report_save_failure` was not called
            self._problem = ""

    def _report_save_failure(self, step: int, error: BaseException) -> None:
        self._saved_step = -1
        self._problem = self._problem or f"the state after step {step} was not saved: {format_error(error)}"
        if isinstance(error, RankUnreachable):
            super()._report_save_failure(step, error)
            return
        # The replica is intact. Later failures repeat the first text, so that training warns once.
        self._report({"kind": "unsaved", "text": self._problem})

    def _finish(self, closing: bool) -> None:
        """Save the last state, and serve it to the next training process."""
        if self._optimizer is None:
            return
        listener = None if closing else replica_transfer.listen(self.run, self.rank)
        finishing = threading.Thread(target=self._save_final_state, args=(closing,), name="finish")
        finishing.start()
        if listener is not None:
            replica_transfer.serve_state(listener, self, self._linger)
        finishing.join()
        if closing and self._saved_step != self.newest_step:
            raise SaveFailed(self._problem or f"the state after step {self.newest_step} was not saved")
        if self.closed and self.rank == 0:
            segments.mark_closed(self.run, self.session, self._saved_step, self.config.storage.fsync)

    def _save_final_state(self, closing: bool) -> None:
        """Save the last state that all ranks have, and release the lock."""
        if not closing and self.ranks == 1:
            with self._replica_lock, suppress(OSError):  # the state is saved even without memory for a copy
                self._shared_copy()  # the next training process will request it
        self.wait()
        try:
            step = self._last_common_step()
            with self._replica_lock:
                if step is not None:
                    self.advance(step)
                    if self._saved_step != step:
                        self._persist()
        except BaseException as error:  # other hosts may have failed, but this rank's replica is valid
            self._problem = self._problem or format_error(error)
        self.wait()
        if not closing:
            self._lock.release()

    def _last_common_step(self) -> int | None:
        """Return the last step that all ranks can reach, or None if there is none; collective."""
        while True:
            gathered = self._communicator().gather({"applied": self.applied, "newest": self.newest_step})
            if all("newest" in report for report in gathered):  # else another rank gathers in `_save` first
                last = min(int(report["newest"]) for report in gathered)
                return last if max(int(report["applied"]) for report in gathered) <= last else None
