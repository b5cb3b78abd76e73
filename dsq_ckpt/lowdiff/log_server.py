"""The server of a gradient log, which encodes steps, batches them, and writes segments (LowDiff, section V-B)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from dsq_ckpt.kernels.scan import as_integers
from dsq_ckpt.lowdiff import segments
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.channel import Channel
from dsq_ckpt.lowdiff.encoding import encode_dense, encode_sparse
from dsq_ckpt.lowdiff.locks import Lock
from dsq_ckpt.lowdiff.segments import Step
from dsq_ckpt.lowdiff.server import IncompleteGradient, Server
from dsq_ckpt.storage.record_fields import parse_dtype


class LogServer(Server):
    """A server that writes received steps in batches. See `Server` for the arguments."""

    def __init__(self, channel: Channel, begin: Mapping[str, Any], lock: Lock) -> None:
        super().__init__(channel, begin, lock)
        self._batch = int(begin["batch"])
        self._buffered: list[Step] = []
        self._encoding = 0.0
        self._last: int | None = None

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "batch":
            self._batch = int(message["size"])
        elif message["kind"] == "step":
            started = time.perf_counter()
            step = self._encode(message)
            self._encoding += time.perf_counter() - started
            self._report({"kind": "free", "slot": message["slot"]})
            if self._buffered and step.number != self._buffered[-1].number + 1:
                self._flush()  # steps that were not logged lie between: a segment is of consecutive ones
            self._buffered.append(step)
        else:
            if (entries := self._logged_entries(message)) != self.entries:
                self._flush()  # segments name the parameters of their steps
                self.entries = entries
            meta = message["meta"] if self.rank == 0 else None
            self._save_later(message["step"], self._staged_tensors(message["tensors"]), meta)
        if len(self._buffered) >= self._batch:
            self._flush()

    def _end(self, closing: bool) -> None:
        self._flush()
        self.wait()
        if self.closed and self.rank == 0:
            segments.close(self.run, self.session, self._last, self.config.storage.fsync)

    def _encode(self, message: Mapping[str, Any]) -> Step:
        """Return an encoded step, after which its slot is free."""
        blocks: list[bytes] = []

        def add(block: bytes) -> int:
            blocks.append(block)
            return len(blocks) - 1

        slot = self._slots.get(message["slot"])
        record: dict[str, Any] = {key: message[key] for key in ("hyper", "after")}
        record["grads"] = [] if slot is None else [*self._sparse(message, slot, add), *self._dense(message, slot, add)]
        record["buffers"] = []
        for name, dtype, shape, offset in message["buffers"]:
            assert slot is not None
            buffer = slot.view(offset, tuple(shape), parse_dtype(dtype))
            raw = buffer.reshape(-1).view(torch.uint8).numpy().tobytes() if buffer.numel() else b""
            record["buffers"].append([name, dtype, shape, add(raw)])
        return Step(int(message["step"]), record, blocks)

    def _sparse(self, message: Mapping[str, Any], slot: Arena, add: Any) -> list[dict[str, Any]]:
        """Encode the sparse gradients, per dtype, with the parameters concatenated.

        Raises:
            IncompleteGradient: a gradient is non-zero outside of its support.
        """
        found = []
        for part in sorted(message["sparse"], key=lambda part: str(part["dtype"])):
            total = sum(part["counts"])
            places = slot.view(part["places"], (total,), torch.int64).clone()
            values = slot.view(part["values"], (total,), parse_dtype(part["dtype"]))
            nonzero = slot.view(part["nonzero"], (len(part["params"]),), torch.int64).tolist()
            start = 0
            for param, own, picked, expected in zip(
                part["params"], places.split(part["counts"]), values.split(part["counts"]), nonzero, strict=True
            ):
                # Each index counts once, and together they must cover all elements that are not +0, lest some be lost.
                unique = torch.zeros(self.entries[param].elements, dtype=torch.bool)
                unique[own[as_integers(picked) != 0]] = True
                if int(unique.count_nonzero()) != expected:
                    raise IncompleteGradient(self.entries[param].name)
                own += start
                start += self.entries[param].elements
            entry = encode_sparse(places, values, add)
            found.append({"params": part["params"], "dtype": part["dtype"], **entry})
        return found

    def _dense(self, message: Mapping[str, Any], slot: Arena, add: Any) -> list[dict[str, Any]]:
        found = []
        hints = message["hints"]
        half = parse_dtype(hints["half"]) if hints.get("half") else None
        # Parameters with levels of their own are stored apart: a palette has at most 256.
        apart = [[part] for part in message["dense"] if part.get("levels")]
        rest = [part for part in message["dense"] if not part.get("levels")]
        together = [[part for part in rest if part["dtype"] == dtype] for dtype in sorted({p["dtype"] for p in rest})]
        for parts in (*apart, *together):
            dtype = parse_dtype(parts[0]["dtype"])
            pieces = [slot.view(part["at"], (self.entries[part["param"]].elements,), dtype) for part in parts]
            levels = torch.tensor(parts[0]["levels"], dtype=torch.float32) if parts[0].get("levels") else None
            search = bool(hints.get("search"))
            entry = encode_dense(torch.cat(pieces), hints["scales"], half, levels, add, search)
            found.append({"params": [part["param"] for part in parts], "dtype": parts[0]["dtype"], **entry})
        return found

    def _flush(self) -> None:
        """Write the buffered steps as one segment."""
        if not self._buffered:
            return
        started = time.perf_counter()
        info = segments.write(
            self.run, self.session, self.rank, self.ranks, self.entries, self._buffered, self.config.storage.fsync
        )
        first, last = self._buffered[0].number, self._buffered[-1].number
        self._last = last
        encoding = self._encoding / len(self._buffered)
        self._buffered, self._encoding = [], 0.0
        self._report({
            "kind": "written", "first": first, "last": last, "bytes": info.size,
            "seconds": time.perf_counter() - started, "encoding": encoding,
        })
