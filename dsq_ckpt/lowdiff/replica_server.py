"""The server of a replica: model and optimizer on the CPU, kept as training has them (LowDiff+, section VI).

It applies the gradients that training applied, with the same optimizer, and saves the result as often as it is told.
When the training process dies it stays a while, so that the next one gets the state from memory.
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
from dsq_ckpt.lowdiff.snapshots import Piece
from dsq_ckpt.lowdiff.train_state import OPTIMIZER, dtype_name
from dsq_ckpt.lowdiff.worker_client import Layout, nbytes
from dsq_ckpt.storage.checkpoint import dtype_of


class ReplicaServer(Server):
    """Keeps a replica of this rank's share of the model; see `Server` for the arguments.

    With several ranks it is one step behind what it was handed: when training dies, ranks may have handed over one step
    more or less than others, and then all must be able to stop at the same.
    """

    def __init__(self, channel: Channel, begin: Mapping[str, Any], lock: Lock) -> None:
        super().__init__(channel, begin, lock)
        self._about_optimizer: dict[str, Any] = begin["optimizer"]
        self._linger = float(begin["linger"])
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._others: dict[tuple[str, ...], torch.Tensor] = {}
        self._meta: dict[str, Any] = {}
        self._waiting: list[Mapping[str, Any]] = []
        self._path: list[str] = begin["path"]
        self._turn = threading.RLock()  # of those who change or read the replica, once training is gone
        self._copy: memory.Share | None = None
        self._persisted = -1
        self._problem = ""
        self.applied = 0
        """Steps that the replica has done."""

    @property
    def newest(self) -> int:
        """Steps that it was handed."""
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
            self.advance(int(message["step"]))  # all ranks were handed it
            self._persist()
        elif message["kind"] == "leave":
            raise ChannelClosed("the training process goes on without")
        else:
            raise ValueError(f"message {message['kind']!r}")

    def advance(self, step: int) -> None:
        """Do the steps up to this one, of those that were handed over."""
        with self._turn:
            while self._waiting and int(self._waiting[0]["step"]) <= step:
                self._apply(self._waiting.pop(0))

    def after(self, step: int) -> memory.Share | None:
        """The replica after a step, in shared memory; None if it is not that far, or was left behind."""
        with self._turn:
            if self.applied <= step <= self.newest:
                self.advance(step)
            return None if self.applied != step else self._shared()

    def _shared(self) -> memory.Share:
        """A copy of the replica, in shared memory; one for each step."""
        if self._copy is None or self._copy.step != self.applied:
            pieces = self._replica()
            layout = Layout()
            places = [layout.add(nbytes(piece.tensor)) for piece in pieces]
            arena = Arena.create(layout.size)
            told = []
            for (path, tensor), at in zip(pieces, places, strict=True):
                arena.view(at, tuple(tensor.shape), tensor.dtype).copy_(tensor)
                told.append([list(path), dtype_name(tensor.dtype), list(tensor.shape), at])
            self._copy = memory.Share(self.applied, told, self._about(), arena)
        return self._copy

    def _about(self) -> dict[str, Any]:
        """What a snapshot of it says of the log; the optimizer's plain state is that of this rank's share."""
        assert self._optimizer is not None
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not torch.is_tensor(value):
                    plain.setdefault(name, {})[key] = to_plain(value, key)
        return {**self._meta, "step": self.applied, "plain": plain, "state_keys": {}}

    def _become(self, message: Mapping[str, Any]) -> None:
        """Take over the state of training as the replica."""
        for left_out in self._waiting:
            self._tell({"kind": "free", "slot": left_out["slot"]})
        self._waiting.clear()
        self._meta = dict(message["meta"])
        tensors = {piece.path: piece.tensor.clone() for piece in self._pieces(message["tensors"])}
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
        kind = getattr(importlib.import_module(self._about_optimizer["module"]), self._about_optimizer["name"])
        optimizer = kind.__new__(kind)
        optimizer.__setstate__({
            "defaults": from_plain(self._about_optimizer["defaults"]), "state": state, "param_groups": groups,
        })
        self._optimizer = optimizer
        self._set_hyper(self._meta["hyper"])
        self.applied = int(message["step"])

    def _apply(self, message: Mapping[str, Any]) -> None:
        """Do one step as training did; its slot is free afterwards."""
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
                    gradient = slot.view(part["at"], entry.shape, dtype_of(part["dtype"]))
                    if scale != 1.0:
                        gradient = gradient * torch.tensor(scale, dtype=torch.float32)
                    parameter.grad = gradient
            self._optimizer.step()
            for parameter in self._parameters.values():
                parameter.grad = None
        for name, dtype, shape, offset in message["buffers"]:
            assert slot is not None
            self._others["model", name] = slot.view(offset, tuple(shape), dtype_of(dtype)).clone()
        self._set_hyper(message["after"]["hyper"] or message["hyper"])
        self._meta |= {"hyper": message["after"]["hyper"] or message["hyper"], "states": message["after"]["states"]}
        self.applied = int(message["step"])
        self._tell({"kind": "free", "slot": message["slot"]})

    def _set_hyper(self, hyper: list[dict[str, Any]]) -> None:
        assert self._optimizer is not None
        for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
            group.update({key: from_plain(value) for key, value in values.items()})

    def _replica(self) -> list[Piece]:
        assert self._optimizer is not None
        found = [Piece(("model", name), parameter.detach()) for name, parameter in self._parameters.items()]
        found += [Piece(path, tensor) for path, tensor in self._others.items()]
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):
                    found.append(Piece((OPTIMIZER, "state", name, key), value))
        aliases = self._meta["aliases"]
        return found + [
            Piece(("model", alias), self._parameters[name].detach()) for alias, name in aliases.items()
            if name in self._parameters
        ]

    def _persist(self) -> None:
        """Save the replica as it is now, from a copy, in the background."""
        self.wait()
        if self._copy is not None and self._copy.step == self.applied:
            pieces = self._copy.pieces()
        else:
            pieces = [Piece(piece.path, piece.tensor.clone()) for piece in self._replica()]
        self._save_later(self.applied, pieces, self._about())

    def _save(self, step: int, pieces: list[Piece], meta: Mapping[str, Any] | None) -> None:
        with suppress(OSError):  # of this thread: what training hands over goes first
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
        super()._save(step, pieces, whole if self.rank == 0 else None)
        if self._persisted == step:  # it did not fail
            self._problem = ""

    def _failed(self, step: int, error: BaseException) -> None:
        self._persisted = -1
        self._problem = self._problem or f"the state after step {step} was not saved: {describe(error)}"
        if isinstance(error, RankUnreachable):
            super()._failed(step, error)
            return
        # The replica is there all the same. The next failure is told in the same words, which are a warning once.
        self._tell({"kind": "unsaved", "text": self._problem})

    def _end(self, closing: bool) -> None:
        """Save the last state, and give it to the next training process if that asks for it."""
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
        """Save the last state that all ranks have; then nothing is written any more."""
        if not closing and self.ranks == 1:
            with self._turn, suppress(OSError):  # no memory: it is saved all the same
                self._shared()  # the next training process will ask for it
        self.wait()
        try:
            step = self._last_of_all()
            with self._turn:
                if step is not None:
                    self.advance(step)
                    if self._persisted != step:
                        self._persist()
        except BaseException as error:  # other hosts may be gone; what this one has is good all the same
            self._problem = self._problem or describe(error)
        self.wait()
        if not closing:
            self._lock.release()

    def _last_of_all(self) -> int | None:
        """The last step that all ranks have, and can go to; None if there is none. Collective."""
        while True:
            everybody = self._communicator().gather({"applied": self.applied, "newest": self.newest})
            if all("newest" in other for other in everybody):  # else somebody began to save when this rank had ended
                last = min(int(other["newest"]) for other in everybody)
                return last if max(int(other["applied"]) for other in everybody) <= last else None
