"""Worker threads of one rank. Kernels and coders release the GIL, so blocks of a chunk run in parallel."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dsq_ckpt.core.arrays import Array

_MIN_PARALLEL_ELEMENTS = 1 << 18
"""About the number of elements that one thread processes before a second one has started."""
_ITEM_OVERHEAD = 1 << 12
"""Work for an item without elements, in elements."""
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Scratch(threading.local):
    """Scratch memory of a thread by its use, which blocks reuse; freed with the thread or with this object."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def array(self, use: str, size: int, dtype: npt.DTypeLike) -> Array:
        """Return an uninitialized array, valid until the same thread calls this for the same use again."""
        nbytes = size * np.dtype(dtype).itemsize
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype)


class Workers:
    """A bounded parallel map; a context manager, so that no thread outlives a save or a load.

    Attributes:
        scratch: scratch memory of each thread, also of the calling one.
        other: further scratch memory, for work of a thread while `scratch` is in use.
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
        """Return these workers, or only the calling thread if there are too few elements for several threads."""
        return self if elements > _MIN_PARALLEL_ELEMENTS else Workers(1, self.block_elements)

    def blocks(self, elements: int) -> Iterator[slice]:
        """Yield the blocks of a flat array."""
        step = self.block_elements
        return (slice(start, min(start + step, elements)) for start in range(0, elements, step))

    def map(self, work: Callable[[_In], _Out], items: Iterable[_In], ahead: int = 2) -> Iterator[_Out]:
        """Yield `work(item)` of every item, in order; at most `ahead` items per thread are pending (bounds memory).

        A single item needs no other thread: to pass it on takes longer than to work on a small one.
        """
        items = iter(items)
        first = [] if self._pool is None else list(islice(items, 2))
        if self._pool is None or len(first) < 2:
            for item in chain(first, items):
                yield work(item)  # not by `map`, which a StopIteration of the work would end without an error
            return
        waiting: deque[Future[_Out]] = deque()
        for item in chain(first, items):
            waiting.append(submit(self._pool, work, item))
            if len(waiting) > ahead * self.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def map_batches(
        self, work: Callable[[_In], _Out], items: Iterable[_In], count_elements: Callable[[_In], int]
    ) -> Iterator[_Out]:
        """Yield `work(item)` of every item, in order, as `map` does; small items are passed to a thread together.

        Args:
            work: function.
            items: its arguments.
            count_elements: function that returns the number of elements of an item.
        """
        batches = _make_batches(items, count_elements, _MIN_PARALLEL_ELEMENTS if self.threads > 1 else 0)
        return chain.from_iterable(self.map(lambda batch: [work(item) for item in batch], batches))


def _make_batches(
    items: Iterable[_In], count_elements: Callable[[_In], int], min_elements: int
) -> Iterator[list[_In]]:
    """Yield batches of items, in order, each as soon as it has `min_elements` elements."""
    batch: list[_In] = []
    elements = 0
    for item in items:
        batch.append(item)
        elements += count_elements(item) + _ITEM_OVERHEAD
        if elements >= min_elements:
            yield batch
            batch, elements = [], 0
    if batch:
        yield batch


def map_concurrently(work: Callable[[_In], _Out], items: Iterable[_In], threads: int) -> list[_Out]:
    """Return `work(item)` of every item, in order; by at most `threads` threads, which end before this returns."""
    items = list(items)
    with Workers(min(threads, len(items)), 1) as workers:
        return list(workers.map(work, items))


def submit(
    pool: ThreadPoolExecutor, work: Callable[[_In], _Out], item: _In, after: Iterable[Future[Any]] = ()
) -> Future[_Out]:
    """Submit `work(item)` to a pool, or do it here where no thread can be started.

    Threads cannot be started if they are exhausted, or once the interpreter exits: in functions registered by `atexit`,
    and in threads that outlive the main thread.

    Args:
        pool: the pool.
        work: function.
        item: its argument.
        after: work that the pool does before, since it has one thread.
    """
    task = _Task(work, item)
    try:
        pool.submit(task.run)
    except RuntimeError:
        wait(after)
        task.run()  # unless a thread of the pool has taken it
    return task.done


class _Task(Generic[_In, _Out]):
    """Work that the first thread to call `run` does.

    Attributes:
        done: future of its result.
    """

    def __init__(self, work: Callable[[_In], _Out], item: _In) -> None:
        self.done: Future[_Out] = Future()
        self._work, self._item, self._taken = work, item, threading.Lock()

    def run(self) -> None:
        """Do the work, unless a thread has started it before."""
        if not self._taken.acquire(blocking=False):
            return
        try:
            self.done.set_result(self._work(self._item))
        except BaseException as error:
            self.done.set_exception(error)
