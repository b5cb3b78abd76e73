"""Transfer of bytes from a device to the host: a side stream, two pinned buffers and a thread that empties them.

Work on codes before the copy (packing, the search for changed codes) runs on the side stream too, so that the training
thread only queues work that reads the tensors themselves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from dsq_ckpt.core.aliases import flat_bytes
from dsq_ckpt.core.arrays import U8
from dsq_ckpt.core.notices import warn
from dsq_ckpt.quantization.chunk import settle_streams

_T = TypeVar("_T")

SLOT = 32 << 20
"""Bytes of each of the two pinned buffers."""
IN_FLIGHT = 256 << 20
"""Bytes that may wait on the device for their copy, besides the codes, which stay there; a larger piece goes alone."""
FREE_SHARE, MOST = 4, 1 << 30
"""Limits of further bytes that may wait: one in `FREE_SHARE` of the memory that training has not used, up to `MOST`."""
_QUEUED, QUEUED_TOGETHER = 1 << 20, 64 << 20
"""Bytes of a tensor, and of several, up to which copies from a GPU are queued; PyTorch keeps the memory it pins."""


class Transfer:
    """Queue of copies from one device to the host.

    Args:
        device: device of the tensors; on the CPU copies are made at once, by the same steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._slots: list[torch.Tensor] = []
        self._room = threading.Condition()
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsq-transfer")

    def reserve(self, size: int) -> None:
        """Wait until `size` more bytes may be in flight, and reserve them; `submit` releases them after its work."""
        with self._room:
            self._room.wait_for(lambda: not self._waiting or self._fits(self._waiting + size))
            self._waiting += size

    def _fits(self, size: int) -> bool:
        if size <= IN_FLIGHT or not self._cuda:
            return size <= IN_FLIGHT
        reserved, peak = torch.cuda.memory_reserved(self._device), torch.cuda.max_memory_allocated(self._device)
        free = torch.cuda.mem_get_info(self._device)[0] + reserved - peak
        return size <= min(free // FREE_SHARE, MOST)

    def submit(self, size: int, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` in the background, after the work queued on the current stream; release `size` reserved bytes.

        `work` may launch kernels, which run on the side stream, and call `fetch`. It must hold the tensors it reads.
        """
        try:
            ready = self._ready()
        except BaseException:
            self.release(size)
            raise

        def run() -> _T:
            try:
                with self._side(ready):
                    return work()
            finally:
                self.release(size)

        try:
            return self._thread.submit(run)
        except RuntimeError:  # at exit the interpreter starts no threads: run here
            future: Future[_T] = Future()
            future.set_result(run())
            return future

    def release(self, size: int) -> None:
        """Release reserved bytes."""
        with self._room:
            self._waiting -= size
            self._room.notify_all()

    def fetch(self, source: torch.Tensor) -> U8:
        """Return the bytes of a contiguous tensor, copied through pinned buffers; only inside submitted work."""
        target = np.empty(source.numel() * source.element_size(), np.uint8)
        if not len(target):
            return target
        raw = flat_bytes(source)
        if not self._slots:
            self._slots = [self._buffer() for _ in range(2)]
        under_way: list[tuple[Callable[[], None], torch.Tensor, slice]] = []
        for number, start in enumerate(range(0, raw.numel(), SLOT)):
            span = slice(start, min(start + SLOT, raw.numel()))
            slot = self._slots[number % 2][: span.stop - span.start]
            slot.copy_(raw[span], non_blocking=True)
            under_way.append((self._arrival(), slot, span))
            if len(under_way) == 2:  # one buffer is filled while the other is emptied
                _empty(*under_way.pop(0), target)
        for copy in under_way:
            _empty(*copy, target)
        return target

    def _buffer(self) -> torch.Tensor:
        try:
            return torch.empty(SLOT, dtype=torch.uint8, device="cpu", pin_memory=self._cuda)
        except RuntimeError as error:  # the limit of locked memory is reached
            warn(f"copies from {self._device} will be slow, without pinned memory: {error}")
            return torch.empty(SLOT, dtype=torch.uint8, device="cpu")

    def _ready(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self._device).record_event() if self._cuda else None

    @contextlib.contextmanager
    def _side(self, ready: torch.cuda.Event | None) -> Any:
        if self._stream is None or ready is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield

    def _arrival(self) -> Callable[[], None]:
        return self._stream.record_event().synchronize if self._stream is not None else lambda: None


def _empty(arrived: Callable[[], None], slot: torch.Tensor, span: slice, target: U8) -> None:
    arrived()
    target[span] = slot.numpy()


_transfers: dict[torch.device, Transfer] = {}


def transfer_from(device: torch.device) -> Transfer:
    """Return the transfer from a device, created on first use: allocation of pinned memory is slow."""
    if device not in _transfers:
        _transfers[device] = Transfer(device)
    return _transfers[device]


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors on the CPU; copies of small GPU tensors are queued together, with a single wait."""
    copies, room = [], QUEUED_TOGETHER
    for tensor in tensors:
        queued = tensor.is_cuda and tensor.nbytes <= min(room, _QUEUED)
        room -= tensor.nbytes if queued else 0
        copies.append(tensor.to("cpu", copy=True, non_blocking=queued))
    settle_streams(tensors)
    return copies
