"""Ahead-of-time compilation of Numba's kernels, in a background thread, once for all ranks of a host.

Saves and loads need them where there is no compiled library (`native`). Compilation starts when a save is prepared. It
takes about 20 s for the kernels of a first save, and they are cached in files. The processes of a host divide the work
by locks on a file beside the cache.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from dsq_ckpt import kernels, native
from dsq_ckpt.codebooks.algorithms.exact_kmeans import exact_kmeans
from dsq_ckpt.codebooks.algorithms.greedy_range import adaptive_range
from dsq_ckpt.coding import ChangesCoder, HuffmanCoder, RansCoder, huffman_bits
from dsq_ckpt.coding.pairs import count_pairs
from dsq_ckpt.core.interrupts import hold_signals, run_pending_handlers
from dsq_ckpt.kernels import jit
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.codebook.table import OccupiedBins, rate_distortion_table
from dsq_ckpt.quantization.matrix_scales import SHARED, MatrixScales
from dsq_ckpt.quantization.moments import UpdateFrame, multiply_by_octave_units, multiply_by_roots
from dsq_ckpt.quantization.restored_values import measure_part_waves
from dsq_ckpt.quantization.step_lengths import sum_step_lengths

logger = logging.getLogger(__name__)
KernelGroup = Literal["save", "load", "more"]

SECONDS = 20
"""Approximate time to compile the kernels of a save."""
_QUIET_SECONDS = 1.0  # of waiting without a message
_LOCK_TIMEOUT = 120.0  # seconds to wait for kernels that another process compiles
_LOCK = "dsq_ckpt.lock"

_X = np.linspace(-1.0, 1.0, 64, dtype=np.float32)
_CODES = np.tile(np.arange(4, dtype=np.uint8), 16)
_CELLS, _JOINT = np.ones(256), np.ones((5, 4), np.int64)
_SPAN = (FULL.lo, FULL.hi, 0.5)


def _run_sketch(elements: int) -> None:
    kernels.sketch(np.ones(elements, np.float32), *_SPAN, np.zeros(FULL.size, np.int64))


def _run_joint_sketch() -> None:
    kernels.joint_sketch(_X, _CODES, 4, *_SPAN, np.zeros((5, FULL.size), np.int64))
    kernels.count_octaves(_X, np.zeros(512, np.int64))


def _run_quantize(rows: int) -> None:
    parent = _CODES if rows > 1 else None
    kernels.quantize(_X, parent, rows - 1, *_SPAN, np.zeros((rows, FULL.size), np.uint8), np.empty(64, np.uint8))


def _run_refine(log: bool) -> None:
    kernels.refine(_X, _CODES, 0.5, _CELLS, _CELLS, 4, log, np.empty(64, np.uint8))


def _run_restored() -> None:
    measure_part_waves(_X, _CODES, 1.0, _CELLS, _CELLS, 4, np.ones((2, 4)))


def _scale_moments() -> None:
    squares = torch.from_numpy(_X * _X)
    MatrixScales.fit(squares.expand(SHARED, -1)).divide(squares, 0)
    sum_step_lengths(_X, _CODES, np.ones(4), MatrixScales(1, np.empty(0, np.int16), np.empty(0, np.int16)), 0)
    UpdateFrame("", squares).coded(torch.from_numpy(_X), slice(None))


def _unscale_moments() -> None:
    read = np.frombuffer(bytes(2), np.int16)  # read-only, as from a file
    MatrixScales(1, read, read).multiply(_X[:1].copy(), 0)
    multiply_by_roots(_X.copy(), _X * _X)
    multiply_by_octave_units(_X.copy(), _X * _X)


def _run_kmeans() -> None:
    exact_kmeans(np.arange(4.0), np.ones(4), 2)


def _run_table() -> None:
    points, movable = np.linspace(0.0, 1.0, 4), np.ones(4, np.bool_)
    rate_distortion_table(OccupiedBins.from_joint(_JOINT), 5, points, _CODES[:4], movable, points, _CODES[:4], 0.1)


def _run_encode() -> None:
    coder = RansCoder.fit(_JOINT)
    coder.to_bytes()
    coder.encode(_CODES, None)
    ChangesCoder.fit(_JOINT).encode(_CODES, _CODES)


def _run_decode() -> None:
    coder, changes = RansCoder.fit(_JOINT), ChangesCoder.fit(_JOINT)
    model, data = coder.to_bytes(), coder.encode(_CODES, None)
    RansCoder.from_bytes(model).decode(data, None, np.empty(64, np.uint8))
    changes.update(changes.encode(_CODES, _CODES), _CODES.copy())


def _run_unpack(readonly: bool) -> None:
    packed = kernels.pack(_CODES, 2)
    kernels.unpack(np.frombuffer(packed.tobytes(), np.uint8) if readonly else packed, 2, np.empty(64, np.uint8))


def _run_dequantize() -> None:
    kernels.dequantize(_CODES, np.ones(5, np.float32), 1.0, 4, _X[:0], np.empty(64, np.float32))


def _run_dequantize_refined() -> None:
    kernels.dequantize_refined(
        _CODES, _CODES, 2, _CELLS, _CELLS, _CELLS, np.ones(5, np.float32), 1.0, 4, _X[:0], False,
        np.empty(64, np.float32),
    )


def _run_huffman() -> None:
    coder = HuffmanCoder.fit(_JOINT)
    model = coder.to_bytes()
    for parent in (None, _CODES):
        HuffmanCoder.from_bytes(model).decode(coder.encode(_CODES, parent), parent, np.empty(64, np.uint8))
    huffman_bits(_CODES.astype(np.int64))


def _run_importance() -> None:
    kernels.classify(kernels.compute_importance(_X, _X), 0.1, 0.2)


def _run_compensate() -> None:
    factors, table = np.eye(8, dtype=np.float32), np.zeros(FULL.size, np.uint8)
    kernels.compensate(_X.reshape(8, 8).copy(), factors, *_SPAN, table, np.ones(5, np.float32))


def _run_scan() -> None:
    from dsq_ckpt.kernels import scan  # only the gradient log needs it

    offset, nonzero, ones = torch.zeros(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64), torch.ones(128)
    for dtype in (torch.float32, torch.bfloat16):
        scan.gather_elements([ones.to(dtype)], offset, [1], torch.empty(1, dtype=dtype), nonzero)
    scan.find_scale([ones], [1.0, 2.0], [2 * ones])
    scan.Samples([ones], 2).take()


_TASKS: dict[KernelGroup, list[Callable[[], object]]] = {
    "save": [
        _scale_moments, lambda: _run_sketch(64), lambda: _run_sketch(1 << 18), _run_joint_sketch, _run_kmeans,
        _run_table, _run_encode, lambda: _run_quantize(1), lambda: _run_quantize(5), lambda: _run_refine(False),
        lambda: _run_refine(True), lambda: kernels.pack(_CODES, 2), lambda: count_pairs(_CODES, _CODES), _run_restored,
        lambda: kernels.gather_protected(_X, _CODES, 3), lambda: kernels.to_bf16(_X.view(np.uint32)),
    ],
    "load": [
        _run_decode, _unscale_moments, lambda: _run_unpack(True), lambda: _run_unpack(False), _run_dequantize,
        _run_dequantize_refined, lambda: kernels.from_bf16(np.zeros(4, np.uint16)),
    ],
    "more": [
        _run_huffman, _run_scan, lambda: adaptive_range(_X.astype(np.float64), np.ones(64, np.int64), 4, 10, 0.5),
        _run_importance, _run_compensate,
    ],
}
ALL: tuple[KernelGroup, ...] = ("save", "load", "more")


def _tasks(group: KernelGroup) -> list[Callable[[], object]]:
    """Return what compiles the kernels of a group; nothing where the compiled library has all that the group needs."""
    return _TASKS[group] if group == "more" or native.path() == "numba" else []


class _Background:
    """The background thread that compiles kernels, with a queue of kernel groups."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.queue: list[KernelGroup] = []
        self.done: set[KernelGroup] = set()
        self.stopped = self.begun = False

    def enqueue(self, groups: Sequence[KernelGroup]) -> None:
        with self.changed:
            self.queue = [*groups, *(group for group in self.queue if group not in groups)]
            self.queue = [group for group in self.queue if group not in self.done]
            # Handlers that are registered while the interpreter exits do not run, nor would `_join_thread`.
            stopped = self.stopped or not threading.main_thread().is_alive()
            if self.queue and self.thread is None and not stopped:
                thread = threading.Thread(target=self.run, name="dsq_ckpt-compile", daemon=True)
                thread.start()
                self.thread = thread

    def run(self) -> None:
        try:
            while (group := self.next_group()) is not None:
                try:
                    compile_group(group, lambda: self.stopped)
                finally:  # after a failure nothing must wait for the group: calls compile the kernels they need
                    with self.changed:
                        self.done.add(group)
                        self.changed.notify_all()
        finally:
            with self.changed:
                if self.thread is threading.current_thread():  # it failed; the next request starts another thread
                    self.thread = None
                self.changed.notify_all()

    def is_pending(self, group: KernelGroup) -> bool:
        """Wait at most a second for a group, and return whether the thread still has to compile it."""
        with self.changed:
            def waits() -> bool:
                return group not in self.done and self.thread is not None and self.thread.is_alive()

            return not self.changed.wait_for(lambda: not waits(), _QUIET_SECONDS)

    def next_group(self) -> KernelGroup | None:
        with self.changed:
            self.queue = [group for group in self.queue if group not in self.done]
            if self.queue and not self.stopped:
                return self.queue[0]
            self.thread = None
            return None


_background = _Background()


def start() -> None:
    """Start to compile the kernels of saves and loads in the background, unless already started.

    The first call takes half a second, or waits until another thread has compiled with Numba. Numba is imported
    and its registries are loaded here: they consist of many objects, and a thread must not pause the garbage collector.
    """
    if not _tasks("save"):
        return
    if not _background.begun:
        _background.begun = True
        # The handler of a signal may save, and wait for the thread, which would wait for this import of Numba.
        with hold_signals(), suppress(Exception):  # the thread raises it too
            jit.load_registries()
    _background.enqueue(("save", "load"))


def wait(group: KernelGroup) -> None:
    """Wait until the kernels of a group are compiled; after a second, log a message on rank 0.

    Exceptions of a signal handler are raised here.
    """
    if group in _background.done or not _tasks(group):
        return
    with suppress(Exception):  # other kernels are compiled when they are called
        _background.enqueue((group,))
    began = time.monotonic()
    announced = False
    while _background.is_pending(group):
        run_pending_handlers()
        if not announced and time.monotonic() - began >= _QUIET_SECONDS and jit.count_compilations():
            announced = True
            with suppress(Exception):
                _log_wait()


def _log_wait() -> None:
    """Log that kernels are being compiled, since the program may seem to hang."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0") or 0)
    if rank:
        return
    frequency = "once on this machine"
    if not jit.cache_directories():
        frequency = "in every process, as no directory for caches can be written (set NUMBA_CACHE_DIR)"
    text = f"dsq_ckpt compiles its kernels, {frequency}; this takes about {SECONDS} s (`dsq warmup` does it ahead)"
    logger.warning(text)  # on stderr where logging is not set up


def compile_group(group: KernelGroup, stopped: Callable[[], bool] = lambda: False) -> list[Exception]:
    """Compile the kernels of a group, or read them from files; kernels that other processes compile come last.

    Returns:
        The exceptions of failed kernels; the call that needs such a kernel raises them again.
    """
    numbers = {task: number for number, task in enumerate(task for name in ALL for task in _TASKS[name])}
    failed: list[Exception] = []
    pending, deadline = list(_tasks(group)), time.monotonic() + _LOCK_TIMEOUT
    while pending and not stopped():
        remaining = []
        for task in pending:
            if stopped():
                break
            with _try_lock(numbers[task]) as acquired:
                if not acquired and time.monotonic() < deadline:
                    remaining.append(task)
                    continue
                try:
                    with jit.block_forks():  # import locks held during a fork stay locked in the child
                        task()
                except Exception as error:
                    failed.append(error)
                    logger.debug("a kernel could not be compiled ahead: %s", error)
        if len(remaining) == len(pending):
            time.sleep(0.05)
        pending = remaining
    return failed


@contextmanager
def _try_lock(number: int) -> Iterator[bool]:
    """Yield whether this process compiles a kernel: True unless another process does.

    Locks of `lockf` are not inherited by forked processes, and end with the process that holds them.
    """
    directories = jit.cache_directories()
    try:
        file = os.open(directories[0] / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except (OSError, IndexError):
        yield True
        return
    try:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            acquired = True
        except BlockingIOError:
            acquired = False
        except OSError:  # a file system without locks
            acquired = True
        yield acquired
    finally:
        os.close(file)


def _reset_after_fork() -> None:
    """Replace the state of the thread, which does not exist in a forked child."""
    global _background
    _background = _Background()


@atexit.register
def _join_thread() -> None:
    """Wait for the thread at exit, since LLVM must not run while the interpreter shuts down."""
    _background.stopped = True
    thread = _background.thread
    if thread is not None:
        thread.join()


os.register_at_fork(after_in_child=_reset_after_fork)
