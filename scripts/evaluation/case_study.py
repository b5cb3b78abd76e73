"""A run that fails once, with frequent lossy checkpoints and with rare exact ones: LC-Checkpoint, Figure 6.

Chen et al., ICML 2020, section 4.5. An iteration is a pass over the training data. LC-Checkpoint writes after every
one, the full checkpoint after every tenth. The run fails at the end of the seventh, before its checkpoint: with the one
it goes back to the sixth, with the other to the start. Losses are those of held-out data after each iteration.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import dsq_ckpt
from evaluation.recording import one_thread
from evaluation.report import Column, Row, digits, percent
from evaluation.rework import Experiment, Method
from evaluation.workloads import Workload

FULL = Method("full", "exact")
MORE = 2
"""Times the iterations that a failure can cost, after which a run is given up."""


def compare(plan: Experiment, bits: int, iterations: int, failure: int, interval: int) -> Iterator[Row]:
    """Yield a row for the run without a failure, for LC-Checkpoint, and for full checkpoints.

    Args:
        plan: The run; `every` is the number of steps of an iteration.
        bits: Of LC-Checkpoint.
        iterations: Of the run without a failure.
        failure: The iteration at whose end the other runs fail.
        interval: Iterations between full checkpoints.
    """
    exact = without_failure(plan, iterations)
    yield exact
    for method, apart in ((Method(f"lc, {bits} bits", "lc", {"bits": bits}), 1), (FULL, interval)):
        yield with_failure(plan, method, apart, failure, exact["losses"])


def without_failure(plan: Experiment, iterations: int) -> Row:
    """Train; return the loss before the first iteration and after each, and the seconds of one."""
    with one_thread():
        workload, seconds = plan.workload(), list[float]()
        losses = [workload.evaluate(), *_train(plan, workload, 0, iterations, seconds)]
    return {"name": "no failure", "losses": losses, "seconds": statistics.median(seconds)}


def with_failure(plan: Experiment, method: Method, apart: int, failure: int, exact: Sequence[float]) -> Row:
    """Train, fail, restore, and train until the loss is no larger than that at the end of the run without a failure.

    Args:
        plan: As for `compare`.
        method: How checkpoints are made, after every `apart` iterations.
        apart: Iterations between checkpoints.
        failure: The iteration at whose end it fails.
        exact: Losses of the run without a failure.

    Returns:
        The losses after all iterations that were executed, those done again among them; the iteration restored; the
        iterations that the failure costs, None if a limit was reached: those executed, less those after which the run
        without a failure had that loss (not before the failure); and medians of seconds and bytes.
    """
    with one_thread(), tempfile.TemporaryDirectory(prefix="dsq-case-") as name:
        workload, directory = plan.workload(), Path(name)
        config, taken, seconds, written = method.config(), list[float](), list[float](), list[int]()
        with dsq_ckpt.Compressor(
            workload.model, workload.optimizer, config, every=apart * plan.every, history=dsq_ckpt.SaveHistory()
        ) as compressor:

            def save(done: int) -> None:
                if done % apart == 0:
                    path = directory / f"{done:04d}"
                    start = time.perf_counter()
                    compressor.save(path)
                    taken.append(time.perf_counter() - start)
                    written.append(dsq_ckpt.describe(path)["bytes_written"])

            save(0)
            losses = [workload.evaluate(), *_train(plan, workload, 0, failure - 1, seconds, save)]
            losses += _train(plan, workload, failure - 1, failure, seconds)
            restored = (failure - 1) // apart * apart
            compressor.load(directory / f"{restored:04d}")
            last = len(exact) - 1 + MORE * failure
            for loss in _train(plan, workload, restored, last, seconds, save):
                losses.append(loss)
                if loss <= exact[-1]:
                    break
    reached = next(number for number in range(failure, len(exact)) if exact[number] <= exact[-1])
    return {
        "name": method.name, "losses": losses, "restored": restored,
        "costs": len(losses) - 1 - reached if losses[-1] <= exact[-1] else None, "seconds": statistics.median(seconds),
        "seconds_save": statistics.median(taken[1:] or taken), "bytes": statistics.median(written[1:] or written),
        "overhead": statistics.median(taken[1:] or taken) / statistics.median(seconds) / apart,
    }


def _train(
    plan: Experiment, workload: Workload, first: int, last: int, seconds: list[float],
    after: Callable[[int], None] = lambda done: None,
) -> Iterator[float]:
    """Train iterations, yield the loss after each, and append what each took; `after` is not part of it."""
    for number in range(first, last):
        start = time.perf_counter()
        workload.train(number * plan.every, (number + 1) * plan.every)
        seconds.append(time.perf_counter() - start)
        after(number + 1)
        yield workload.evaluate()


COLUMNS = (
    Column("<run", "name"), Column("goes back to", "restored"), Column("iterations more", "costs"),
    Column("s per iteration", "seconds", digits(3)), Column("s per checkpoint", "seconds_save", digits(3)),
    Column("of an iteration", "overhead", percent), Column("bytes", "bytes", "{:,.0f}".format),
)
NOTES = """\
iterations more: than without a failure, until the loss is as low as at the end of that run; seconds and bytes:
medians, of all that a checkpoint writes; of an iteration: time of checkpoints per iteration."""
