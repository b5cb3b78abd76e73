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
from dsq_ckpt.lowdiff.segments import EncodedStep
from dsq_ckpt.lowdiff.server import IncompleteGradient, Server
from dsq_ckpt.storage.record_fields import parse_dtype


class LogServer(Server):
    """A server that writes received steps in batches. See `Server` for the arguments."""

    def __init__(self, channel: Channel, begin: Mapping[str, Any], lock: Lock) -> None:
        super().__init__(channel, begin, lock)
        self._batch = int(begin["batch"])
        self._pending_steps: list[EncodedStep] = []
        self._encoding_seconds = 0.0
        self._last_written: int | None = None

    def _handle(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "batch":
            self._batch = int(message["size"])
        elif message["kind"] == "step":
            started = time.perf_counter()
            step = self._encode_step(message)
            self._encoding_seconds += time.perf_counter() - started
            self._report({"kind": "free", "slot": message["slot"]})
            if self._pending_steps and step.number != self._pending_steps[-1].number + 1:
                self._flush()  # a segment holds consecutive steps only
            self._pending_steps.append(step)
        else:
            if (entries := self._logged_entries(message)) != self.entries:
                self._flush()  # a segment has one list of parameters
                self.entries = entries
            meta = message["meta"] if self.rank == 0 else None
            self._save_in_background(message["step"], self._staged_tensors(message["tensors"]), meta)
        if len(self._pending_steps) >= self._batch:
            self._flush()

    def _finish(self, closing: bool) -> None:
        self._flush()
        self.wait()
        if self.closed and self.rank == 0:
            segments.mark_closed(self.run, self.session, self._last_written, self.config.storage.fsync)

    def _encode_step(self, message: Mapping[str, Any]) -> EncodedStep:
        """Encode a step; its slot is free afterwards."""
        blocks: list[bytes] = []

        def add(block: bytes) -> int:
            blocks.append(block)
            return len(blocks) - 1

        slot = self._slots.get(message["slot"])
        record: dict[str, Any] = {key: message[key] for key in ("hyper", "after")}
        record["grads"] = []
        if slot is not None:
            record["grads"] += self._encode_sparse(message, slot, add)
            record["grads"] += self._encode_dense(message, slot, add)
        record["buffers"] = []
        for name, dtype, shape, offset in message["buffers"]:
            assert slot is not None
            buffer = slot.view(offset, tuple(shape), parse_dtype(dtype))
            raw = buffer.reshape(-1).view(torch.uint8).numpy().tobytes() if buffer.numel() else b""
            record["buffers"].append([name, dtype, shape, add(raw)])
        return EncodedStep(int(message["step"]), record, blocks)

    def _encode_sparse(self, message: Mapping[str, Any], slot: Arena, add: Any) -> list[dict[str, Any]]:
        """Encode the sparse gradients. The parameters of each dtype are concatenated.

        Raises:
            IncompleteGradient: a gradient is non-zero outside of its support.
        """
        encoded = []
        for fields in sorted(message["sparse"], key=lambda fields: str(fields["dtype"])):
            total = sum(fields["counts"])
            indices = slot.view(fields["places"], (total,), torch.int64).clone()
            values = slot.view(fields["values"], (total,), parse_dtype(fields["dtype"]))
            nonzero = slot.view(fields["nonzero"], (len(fields["params"]),), torch.int64).tolist()
            start = 0
            for param, support, supported_values, expected in zip(
                fields["params"], indices.split(fields["counts"]), values.split(fields["counts"]), nonzero, strict=True
            ):
                # The support may repeat indices, and must cover all elements that are not +0.
                covered = torch.zeros(self.entries[param].elements, dtype=torch.bool)
                covered[support[as_integers(supported_values) != 0]] = True
                if int(covered.count_nonzero()) != expected:
                    raise IncompleteGradient(self.entries[param].name)
                support += start
                start += self.entries[param].elements
            entry = encode_sparse(indices, values, add)
            encoded.append({"params": fields["params"], "dtype": fields["dtype"], **entry})
        return encoded

    def _encode_dense(self, message: Mapping[str, Any], slot: Arena, add: Any) -> list[dict[str, Any]]:
        encoded = []
        hints = message["hints"]
        half = parse_dtype(hints["half"]) if hints.get("half") else None
        # Parameters with known levels are encoded one by one: a palette has at most 256 levels.
        single = [[fields] for fields in message["dense"] if fields.get("levels")]
        rest = [fields for fields in message["dense"] if not fields.get("levels")]
        by_dtype = [
            [fields for fields in rest if fields["dtype"] == dtype] for dtype in sorted({p["dtype"] for p in rest})
        ]
        for parts in (*single, *by_dtype):
            dtype = parse_dtype(parts[0]["dtype"])
            pieces = [slot.view(fields["at"], (self.entries[fields["param"]].elements,), dtype) for fields in parts]
            levels = torch.tensor(parts[0]["levels"], dtype=torch.float32) if parts[0].get("levels") else None
            search = bool(hints.get("search"))
            entry = encode_dense(torch.cat(pieces), hints["scales"], half, levels, add, search)
            encoded.append({"params": [fields["param"] for fields in parts], "dtype": parts[0]["dtype"], **entry})
        return encoded

    def _flush(self) -> None:
        """Write the buffered steps as one segment."""
        if not self._pending_steps:
            return
        started = time.perf_counter()
        info = segments.write_segment(
            self.run, self.session, self.rank, self.ranks, self.entries, self._pending_steps, self.config.storage.fsync
        )
        first, last = self._pending_steps[0].number, self._pending_steps[-1].number
        self._last_written = last
        encoding = self._encoding_seconds / len(self._pending_steps)
        self._pending_steps, self._encoding_seconds = [], 0.0
        self._report({
            "kind": "written", "first": first, "last": last, "bytes": info.size,
            "seconds": time.perf_counter() - started, "encoding": encoding,
        })
