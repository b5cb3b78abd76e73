"""The checkpointing process: takes steps and snapshots from a training process, and writes them.

It has a session of its own, so that what kills the training process leaves it alone: it then writes what it was given
and ends. It never sees a pickle, and holds no gradient longer than until it is on disk.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsq_ckpt.checkpoint import dtype_of
from dsq_ckpt.comm import Communicator, SingleProcess, TorchCommunicator
from dsq_ckpt.config import DSQConfig
from dsq_ckpt.lowdiff import locks, segments, snapshots
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed
from dsq_ckpt.lowdiff.encoding import encode_dense, encode_sparse
from dsq_ckpt.lowdiff.segments import Step
from dsq_ckpt.lowdiff.subject import entries_from


class Unfaithful(Exception):
    """What was handed over is not all of a gradient."""


class Server:
    """What a checkpointing process does with what it is told.

    Args:
        channel: to the training process.
        begin: the first message: run, session, rank, ranks, parameters, batch, config, keep, timeout.
    """

    def __init__(self, channel: Channel, begin: Mapping[str, Any]) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self.run = Path(begin["run"])
        self.session: str = begin["session"]
        self.rank, self.ranks = int(begin["rank"]), int(begin["ranks"])
        self.entries = entries_from(begin["parameters"])
        self.config = DSQConfig.create(begin["config"])
        self._batch = int(begin["batch"])
        self._keep = int(begin["keep"])
        self._timeout = timedelta(seconds=float(begin["timeout"]))
        self._slots: dict[int, Arena] = {}
        self._staging: Arena | None = None
        self._buffered: list[Step] = []
        self._encoding = 0.0
        self._saving: threading.Thread | None = None
        self._store: dist.TCPStore | None = None
        self._comm: Communicator | None = SingleProcess() if self.ranks == 1 else None
        self._address: tuple[str, int] | None = None

    def serve(self) -> None:
        """Do what messages say until the training process is gone, or wants this one to end."""
        ready: dict[str, Any] = {"kind": "ready"}
        if self.rank == 0 and self.ranks > 1:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            self._store = dist.TCPStore(host, 0, self.ranks, is_master=True, wait_for_workers=False)
            ready |= {"host": host, "port": self._store.port}
        self._tell(ready)
        closing = False
        try:
            while not closing:
                received = self._channel.receive()
                assert received is not None
                message, arena = received
                closing = message["kind"] == "close"
                if not closing:
                    self._handle(message, arena)
        except ChannelClosed:
            pass  # the training process is gone; what it had handed over is written all the same
        except Unfaithful as error:
            with suppress(ChannelClosed):
                self._tell({"kind": "unfaithful", "name": str(error)})
        self._flush()
        self.wait()
        if closing and self.rank == 0:
            segments.end_of(self.run, self.session).touch()

    def wait(self) -> None:
        """Wait for the snapshot that is being written."""
        if self._saving is not None:
            self._saving.join()

    def _handle(self, message: dict[str, Any], arena: Arena | None) -> None:
        kind = message["kind"]
        if kind == "step":
            if arena is not None:
                self._slots[message["slot"]] = arena
            started = time.perf_counter()
            step = self._encode(message)
            self._encoding += time.perf_counter() - started
            self._tell({"kind": "free", "slot": message["slot"]})
            self._buffered.append(step)
            if len(self._buffered) >= self._batch:
                self._flush()
        elif kind == "snapshot":
            if arena is not None:
                self._staging = arena
            # Steps before the snapshot are not needed once it is there, but until then they are.
            self._saving = threading.Thread(target=self._save, args=(message,), name="snapshot")
            self._saving.start()
        elif kind == "batch":
            self._batch = int(message["size"])
            if len(self._buffered) >= self._batch:
                self._flush()
        elif kind == "join":
            self._address = message["host"], int(message["port"])
        else:
            raise ValueError(f"message {kind!r}")

    def _encode(self, message: Mapping[str, Any]) -> Step:
        """A step with its gradients as bytes; its slot is free afterwards."""
        blocks: list[bytes] = []

        def add(block: bytes) -> int:
            blocks.append(block)
            return len(blocks) - 1

        slot = self._slots.get(message["slot"])
        about: dict[str, Any] = {key: message[key] for key in ("hyper", "after")}
        about["grads"] = [] if slot is None else [*self._sparse(message, slot, add), *self._dense(message, slot, add)]
        about["buffers"] = []
        for name, dtype, shape, offset in message["buffers"]:
            assert slot is not None
            buffer = slot.view(offset, tuple(shape), dtype_of(dtype))
            raw = buffer.reshape(-1).view(torch.uint8).numpy().tobytes() if buffer.numel() else b""
            about["buffers"].append([name, dtype, shape, add(raw)])
        return Step(int(message["step"]), about, blocks)

    def _sparse(self, message: Mapping[str, Any], slot: Arena, add: Any) -> list[dict[str, Any]]:
        """Gradients whose places are known, each dtype by itself, the parameters end to end."""
        found = []
        for dtype in sorted({part["dtype"] for part in message["sparse"]}):
            parts = [part for part in message["sparse"] if part["dtype"] == dtype]
            places, values, start = [], [], 0
            for part in parts:
                own = slot.view(part["places"], (part["count"],), torch.int64)
                picked = slot.view(part["values"], (part["count"],), dtype_of(dtype))
                # Each place once, and together they must be all that is not zero: what is not logged is lost.
                nonzero = int(slot.view(part["nonzero"], (1,), torch.int64))
                unique = torch.zeros(self.entries[part["param"]].elements, dtype=torch.bool)
                unique[own[picked != 0]] = True
                if int(unique.count_nonzero()) != nonzero:
                    raise Unfaithful(self.entries[part["param"]].name)
                places.append(own + start)
                values.append(picked)
                start += self.entries[part["param"]].elements
            entry = encode_sparse(torch.cat(places), torch.cat(values), add)
            found.append({"params": [part["param"] for part in parts], "dtype": dtype, **entry})
        return found

    def _dense(self, message: Mapping[str, Any], slot: Arena, add: Any) -> list[dict[str, Any]]:
        found = []
        hints = message["hints"]
        half = dtype_of(hints["half"]) if hints.get("half") else None
        # Parameters with levels of their own are stored apart: a palette has at most 256.
        apart = [[part] for part in message["dense"] if part.get("levels")]
        rest = [part for part in message["dense"] if not part.get("levels")]
        together = [[part for part in rest if part["dtype"] == dtype] for dtype in sorted({p["dtype"] for p in rest})]
        for parts in (*apart, *together):
            dtype = dtype_of(parts[0]["dtype"])
            pieces = [slot.view(part["at"], (self.entries[part["param"]].elements,), dtype) for part in parts]
            levels = torch.tensor(parts[0]["levels"], dtype=torch.float32) if parts[0].get("levels") else None
            entry = encode_dense(torch.cat(pieces), hints["scales"], half, levels, add)
            found.append({"params": [part["param"] for part in parts], "dtype": parts[0]["dtype"], **entry})
        return found

    def _flush(self) -> None:
        """Write the steps that are buffered as one segment."""
        if not self._buffered:
            return
        started = time.perf_counter()
        info = segments.write(
            self.run, self.session, self.rank, self.ranks, self.entries, self._buffered, self.config.storage.fsync
        )
        first, last = self._buffered[0].number, self._buffered[-1].number
        encoding = self._encoding / len(self._buffered)
        self._buffered, self._encoding = [], 0.0
        with suppress(ChannelClosed):
            self._tell({"kind": "written", "first": first, "last": last, "bytes": info.size,
                        "seconds": time.perf_counter() - started, "encoding": encoding})

    def _save(self, message: Mapping[str, Any]) -> None:
        """Write a snapshot, in a thread of its own: the log goes on meanwhile."""
        started = time.perf_counter()
        try:
            comm = self._communicator()
            pieces = []
            for path, dtype, shape, offset in message["tensors"]:
                if self._staging is None:
                    tensor = torch.empty(shape, dtype=dtype_of(dtype))
                else:
                    tensor = self._staging.view(offset, tuple(shape), dtype_of(dtype))
                pieces.append(snapshots.Piece(tuple(path), tensor))
            manifest = snapshots.save(self.run, message["step"], pieces, message.get("meta"), self.config, comm)
            if self.rank == 0:
                snapshots.retire(self.run, self._keep)
            size = manifest.bytes_in("own", "refinement", "index")
            self._tell({"kind": "snapshot", "step": message["step"], "bytes": size,
                        "seconds": time.perf_counter() - started})
        except ChannelClosed:
            pass
        except Exception as error:
            self._fail(f"the snapshot after step {message['step']} was not saved: {describe(error)}")

    def _communicator(self) -> Communicator:
        """Of the checkpointing processes; made when the first snapshot is saved, which all of them do."""
        if self._comm is None:
            assert self._address is not None
            host, port = self._address
            store = self._store or dist.TCPStore(host, port, self.ranks, is_master=False, timeout=self._timeout)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=self._timeout
            )
            self._comm = TorchCommunicator()
        return self._comm

    def _fail(self, text: str) -> None:
        with suppress(ChannelClosed):
            self._tell({"kind": "failed", "text": text})

    def _tell(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._channel.send(message)


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def main(descriptor: int) -> int:
    """Serve the training process at the other end of a socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the training process gets them too, and this one ends after it
    channel = Channel(socket.socket(fileno=descriptor))
    server: Server | None = None
    lock: Path | None = None
    try:
        received = channel.receive()
        assert received is not None
        begin, _ = received
        if begin["cores"]:
            os.sched_setaffinity(0, begin["cores"])
        torch.set_num_threads(int(begin["threads"]))
        lock = locks.path_of(Path(begin["run"]), begin["session"], int(begin["rank"]))
        locks.hold(lock)
        server = Server(channel, begin)
        server.serve()
    except ChannelClosed:
        return 0
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        with suppress(ChannelClosed):
            channel.send({"kind": "failed", "text": f"{describe(error)} ({Path(last.filename).name}:{last.lineno})"})
        if server is not None:
            server.wait()
        return 1
    finally:
        if lock is not None:
            lock.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    # Threads of gloo whose peers are gone must not keep this process.
    os._exit(status)
