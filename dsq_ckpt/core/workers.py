"""Threads of one rank. Kernels and coders release the GIL, so blocks of a chunk run side by side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dsq_ckpt.core.arrays import Array

_MIN_PARALLEL_ELEMENTS = 1 << 18
"""Elements that one thread is done with before another has begun, about."""
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Scratch(threading.local):
    """Memory that a thread uses again for each block, by what it is for; gone with the thread or with this object."""

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def array(self, use: str, size: int, dtype: npt.DTypeLike) -> Array:
        """Return an array of undefined content, valid until the same thread asks for the same use again."""
        wanted = size * np.dtype(dtype).itemsize
        held = self._held.get(use)
        if held is None or len(held) < wanted:
            held = self._held[use] = np.empty(wanted, np.uint8)
        return held[:wanted].view(dtype)


class Workers:
    """A bounded parallel map; a context manager, so that no thread outlives a save or a load.

    Attributes:
        scratch: memory of each thread, also of the one that asks.
        other: memory for what a thread does beside that.
    """

    def __init__(self, threads: int, block_elements: int) -> None:
        self.threads = threads
        self.block_elements = block_elements
        self.scratch, self.other = Scratch(), Scratch()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dsq") if threads > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def for_elements(self, elements: int) -> Workers:
        """Return these, or the thread that asks alone where elements are too few for others to pay."""
        return self if elements > _MIN_PARALLEL_ELEMENTS else Workers(1, self.block_elements)

    def blocks(self, elements: int) -> Iterator[slice]:
        """Yield the blocks of a flat array."""
        step = self.block_elements
        return (slice(start, min(start + step, elements)) for start in range(0, elements, step))

    def map(self, work: Callable[[_In], _Out], items: Iterable[_In], ahead: int = 2) -> Iterator[_Out]:
        """Yield `work` of every item, in order; `ahead` items per thread are taken at most, which bounds memory."""
        if self._pool is None:
            yield from map(work, items)
            return
        waiting: deque[Future[_Out]] = deque()
        for item in items:
            task = _Task(work, item)
            try:
                self._pool.submit(task.run)
            except RuntimeError:  # the interpreter is exiting, with a save still in its background thread: do it here;
                task.run()  # or there can be no more threads: those that there are may take it too
            waiting.append(task.done)
            if len(waiting) > ahead * self.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Task(Generic[_In, _Out]):
    """Work that is done once, by the thread that comes first.

    Attributes:
        done: its result.
    """

    def __init__(self, work: Callable[[_In], _Out], item: _In) -> None:
        self.done: Future[_Out] = Future()
        self._work, self._item, self._taken = work, item, threading.Lock()

    def run(self) -> None:
        """Do it, unless it is being done or was."""
        if not self._taken.acquire(blocking=False):
            return
        try:
            self.done.set_result(self._work(self._item))
        except BaseException as error:
            self.done.set_exception(error)
