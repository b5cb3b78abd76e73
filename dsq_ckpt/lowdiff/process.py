"""The main module of the checkpointing process, which writes the steps and snapshots of a training process.

The process runs in its own session, so that signals to the training process do not reach it. After the training process
ended, it writes everything received and ends. Messages contain no pickles.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.lowdiff import locks
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed
from dsq_ckpt.lowdiff.log_server import LogServer
from dsq_ckpt.lowdiff.replica_server import ReplicaServer
from dsq_ckpt.lowdiff.server import Server, format_error
from dsq_ckpt.quantization.restored_values import record_load_counts


def main(descriptor: int) -> int:
    """Serve the training process at the other end of a socket; return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the training process gets them too, and this process ends after it
    channel = Channel(socket.socket(fileno=descriptor))
    server: Server | None = None
    lock: locks.Lock | None = None
    try:
        received = channel.receive()
        assert received is not None
        begin, _ = received
        if begin["cores"]:
            os.sched_setaffinity(0, begin["cores"])
        torch.set_num_threads(int(begin["threads"]))
        record_load_counts(begin["loads"])
        path = locks.lock_path(Path(begin["run"]), begin["session"], int(begin["rank"]))
        if not path.parent.is_dir():  # tested in this process, since a file system that hangs must not stop training
            raise SaveFailed(
                f"'{path.parent}' is not there any more: its run was moved or removed, or a link to it was changed; "
                "nothing is logged until it is there again"
            )
        lock = locks.Lock(path)
        server = (ReplicaServer if "optimizer" in begin else LogServer)(channel, begin, lock)
        server.serve()
    except ChannelClosed:
        return 0
    except BaseException as error:  # report every error to the training process
        last = traceback.extract_tb(error.__traceback__)[-1]
        with suppress(ChannelClosed):
            location = f"{Path(last.filename).name}:{last.lineno}"
            channel.send({"kind": "failed", "text": f"{format_error(error)} ({location})"})
        if server is not None:
            server.wait()
        return 1
    finally:
        if lock is not None:
            lock.release()
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    # os._exit, since gloo's threads whose peers are gone would keep the process alive.
    os._exit(status)
