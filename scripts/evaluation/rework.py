"""Rework: how many iterations a restore from a lossy chain of checkpoints costs.

LC-Checkpoint, section 4.2 and Figure 3. A run is checkpointed at every iteration (or every few). At random steps it
fails: the newest checkpoint is decoded along its chain, training goes on from there, and iterations are counted until
the training loss is back at what it was at the failure. Methods that write as many bytes per checkpoint are compared.

The loss is that of batches that are not those of any step, in evaluation mode: always the same, so that it tells states
and not batches apart. Single rows may have been trained on: batches are drawn with replacement. SGD runs without
momentum, as in the paper; whatever state an optimizer has is restored bit for bit.

Top-n and SCAR are as large as LC-Checkpoint in one of two ways: as the paper counts, where a kept value of top-n takes
64 bits (CSR: fp32 and its place) and one of SCAR 32, whatever the files take; or in files, all three coded by rANS,
where values are bf16 and places take what they have of entropy. A Huffman code takes a bit per element at least.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.config.systems import EXACT_MOMENTS
from dsq_ckpt.storage.manifest import Manifest
from evaluation.online import Report
from evaluation.recording import one_thread
from evaluation.report import Column, Row, digits, percent
from evaluation.results import Results
from evaluation.workloads import Workload, create

PROBE_BATCHES = 16
SPAN = (0.1, 0.6)
"""Part of the run in which failures fall: past the first steps, and with steps left to make up for them."""
SMALL = 64
"""Smaller tensors are exact. A lower limit than the library's, for LeNet's kernels are to be compressed too."""
FP32 = 32
CLOSE = 0.02
"""Relative difference of sizes that counts as equal."""
_SHORT_SAVES = 12  # in runs that are only to find a size
_SHORT_RUNS, _WHOLE_RUNS = 3, 3


@dataclass(frozen=True)
class Method:
    """A way to make a chain of checkpoints.

    Attributes:
        name: For people.
        system: Name of the system.
        codebook: Settings of the weights' codebook, over the system's.
        sized: Setting of the codebook that is found so that checkpoints are as large as those of `like`, or None.
        like: The method whose size is matched.
        counted: Bits that a kept value counts as, None where it is the size of files that is matched.
        coder: Of codes, if not the system's.
    """

    name: str
    system: str
    codebook: dict[str, Any] = field(default_factory=dict)
    sized: str | None = None
    like: Method | None = None
    counted: int | None = None
    coder: str | None = None

    def config(self, **codebook: Any) -> dsq_ckpt.DSQConfig:
        """Make the configuration: base layers alone, one keyframe, at step 0."""
        config = dsq_ckpt.DSQConfig.create({
            "system": self.system,
            "quantize": {"min_elements": SMALL, **EXACT_MOMENTS},
            "delta": {"max_chain": 1000},
            "storage": {"fsync": False},
        })
        chosen = {f"quantize.weights.codebook.{key}": value for key, value in (self.codebook | codebook).items()}
        chosen |= {} if self.coder is None else {"delta.coder": self.coder}
        groups = {f"quantize.groups.{group}.refinement_bits": 0 for group in config.quantize.groups}
        return config.with_values(**{"quantize.weights.refinement_bits": 0}, **groups, **chosen)


@dataclass(frozen=True)
class Experiment:
    """What is the same for all methods: the run, and when it fails.

    Attributes:
        name: Name of the workload.
        seed: Of its weights and batches, and of the failures.
        every: Steps between checkpoints.
        trials: Number of failures.
        limit: Iterations after which a trial is given up.
        rate: Highest learning rate, if not the workload's.
    """

    name: str
    seed: int
    every: int
    trials: int
    limit: int
    rate: float | None = None

    def workload(self) -> Workload:
        """Make the workload at its step 0, SGD without momentum."""
        workload = create(self.name, self.seed)
        if self.rate is not None:
            workload.plan = replace(workload.plan, rate=self.rate)
        if isinstance(workload.optimizer, torch.optim.SGD):
            for group in workload.optimizer.param_groups:
                group["momentum"] = 0.0
            workload.optimizer.state.clear()
        return workload

    def failures(self, steps: int) -> list[int]:
        """Draw the steps after which the run fails, in ascending order.

        Raises:
            ValueError: There are fewer steps to draw from than trials.
        """
        eligible = range(max(self.every, int(SPAN[0] * steps)), int(SPAN[1] * steps) + 1)
        if len(eligible) < self.trials:
            raise ValueError(f"{self.name} has {len(eligible)} steps to fail at, fewer than {self.trials} trials")
        return sorted(random.Random(self.seed).sample(eligible, self.trials))


class Probe:
    """Mean loss on batches that are not those of any step (single rows may be: they are drawn with replacement)."""

    def __init__(self, workload: Workload) -> None:
        self._loss = workload.loss
        self._batches = [workload.batch(workload.steps + number) for number in range(PROBE_BATCHES)]

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        """Return the loss of a model; what it trains with stays as it is."""
        training = model.training
        model.eval()
        losses = [self._loss(model(inputs), targets).item() for inputs, targets in self._batches]
        model.train(training)
        return statistics.fmean(losses)


def methods(systems: Sequence[str], bits: Sequence[int], coded: bool = False) -> list[Method]:
    """Make LC-Checkpoint at each number of bits, top-n and SCAR as large as those, and other systems as they are.

    Args:
        systems: Names of systems.
        bits: Of LC-Checkpoint.
        coded: Whether top-n and SCAR are as large in files, all coded by rANS, instead of as the paper counts.
    """
    result: list[Method] = []
    how, coder = (", rANS", "rans") if coded else ("", None)
    for count in bits:
        lc = Method(f"lc{how}, {count} bits", "lc", {"bits": count}, coder=coder)
        sized = {"lc": lc}
        for name, setting, counted in (("topn", "fraction", 2 * FP32), ("scar", "parts", FP32)):
            sized[name] = Method(
                f"{name}{how}, as lc {count}", name, sized=setting, like=lc,
                counted=None if coded else counted, coder=coder,
            )
        result += [sized[system] for system in systems if system in sized]
    return result + [Method(f"{system}, base", system) for system in systems if system not in ("lc", "topn", "scar")]


def loss_curve(plan: Experiment) -> list[float]:
    """Return the loss before the first step and after every one, up to the last step that may fail."""
    with one_thread():
        workload = plan.workload()
        probe = Probe(workload)
        losses = [probe(workload.model)]
        for step in range(plan.failures(workload.steps)[-1]):
            workload.train(step, step + 1)
            losses.append(probe(workload.model))
    return losses


def run_method(
    plan: Experiment, method: Method, curve: Sequence[float], results: Results, report: Report = lambda line: None
) -> Row:
    """Measure failures and rework with one method, unless it was measured already; return its row.

    Args:
        plan: The run and its failures.
        method: How checkpoints are made; the method that its size follows is run first.
        curve: `loss_curve` of the plan.
        results: Rows go there; one that is there is not run again.
        report: Called with a line about every row that has to be made.
    """
    like = None if method.like is None else run_method(plan, method.like, curve, results, report)
    with one_thread():
        workload = plan.workload()
        failures = plan.failures(workload.steps)
        settings = {
            "run": workload.settings(), "momentum": False, "every": plan.every, "failures": failures,
            "limit": plan.limit, "probe_batches": PROBE_BATCHES,
            "as_large_as": None if method.like is None else method.like.name,
            "config": method.config().model_dump(mode="json"),
            **({} if method.counted is None else {"counted": method.counted}),
        }
        row = results.find(settings)
        if row is not None:
            return row
        report(f"{plan.name}: {method.name}")
        with tempfile.TemporaryDirectory(prefix="dsq-rework-") as directory:
            run = Path(directory)
            if like is None:
                sizes = _train(plan, method.config(), run, failures)
            elif method.counted is not None:
                sizes = _train_counted(plan, method, like["share"], run, failures)
            else:
                run, sizes = _train_sized(plan, method, like["bytes"], Path(directory), failures)
            trials = list(_rework(plan, run, failures, curve))
    steps = curve[failures[0]:]
    noise = statistics.fmean(abs(after / before - 1) for before, after in pairwise(steps)) if steps[1:] else None
    return results.add(settings, {
        "workload": plan.name, "seed": plan.seed, "name": method.name, **sizes, **_summary(trials, plan),
        "loss_changes_by": noise, "trials": trials,
    })


def checkpoints(
    workload: Workload, every: int, config: dsq_ckpt.DSQConfig, run: Path, last: int
) -> Iterator[tuple[int, Path]]:
    """Train from step 0 to a last one with checkpoints of one chain on the way; yield the step and path of each.

    Args:
        workload: at its step 0; at the yielded step whenever one is yielded.
        every: steps between checkpoints.
        config: of the checkpoints.
        run: directory for them.
        last: step after which no checkpoint comes.
    """
    with dsq_ckpt.Compressor(
        workload.model, workload.optimizer, config, every=every, history=dsq_ckpt.SaveHistory()
    ) as compressor:
        for step in range(0, last + 1, every):
            workload.train(max(0, step - every), step)
            path = _directory(run, step)
            compressor.save(path)
            yield step, path


def _train(plan: Experiment, config: dsq_ckpt.DSQConfig, run: Path, failures: Sequence[int]) -> Row:
    """Train to the last failure with checkpoints on the way, keep those that a failure goes back to; their size."""
    needed = {_directory(run, step - step % plan.every) for step in failures}
    weights: list[int] = []
    written: list[int] = []
    full = 0
    previous: Path | None = None
    for step, path in checkpoints(plan.workload(), plan.every, config, run, max(failures)):
        if previous is not None and previous not in needed:
            shutil.rmtree(previous)  # checkpoints are self-contained; thousands of links add up
        previous = path
        if step:
            kinds = Manifest.read(path).kinds
            sizes = kinds.get("weights") or kinds["exact"]  # all of it, if weights are exact too
            full = sizes.logical
            weights.append(sizes.base)
            written.append(dsq_ckpt.describe(path)["bytes_written"])
    average = statistics.fmean(weights)
    return {"bytes": average, "share": average / full, "bytes_written": statistics.fmean(written)}


def _rework(plan: Experiment, run: Path, failures: Sequence[int], curve: Sequence[float]) -> Iterator[Row]:
    """Restore after every failure and count iterations until the loss is back; None: not within the limit."""
    workload = plan.workload()
    probe = Probe(workload)
    compressor = dsq_ckpt.Compressor(workload.model, workload.optimizer, {"system": "exact"})  # it only loads
    for step in failures:
        begin = step - step % plan.every
        compressor.load(_directory(run, begin))
        restored = loss = probe(workload.model)
        iterations = 0
        last = min(plan.limit, workload.steps - begin)
        while not loss <= curve[step] and iterations < last:
            workload.train(begin + iterations, begin + iterations + 1)
            iterations += 1
            loss = probe(workload.model)
        yield {
            "step": step, "checkpoint": begin, "loss": curve[step], "restored": restored,
            "iterations": iterations if loss <= curve[step] else None,
        }


def _summary(trials: Sequence[Row], plan: Experiment) -> Row:
    """Return mean and 95 % confidence interval; trials that reach the limit have its value, and are counted."""
    counts = [plan.limit if trial["iterations"] is None else trial["iterations"] for trial in trials]
    half = None
    if len(counts) > 1:
        normal = statistics.NormalDist().inv_cdf(0.975)
        student = normal + (normal**3 + normal) / (4 * (len(counts) - 1))  # first term of its expansion
        half = student * statistics.stdev(counts) / len(counts) ** 0.5
    return {
        "iterations": statistics.fmean(counts), "iterations_ci95": half,
        "iterations_median": statistics.median(counts), "iterations_worst": max(counts),
        "over_limit": sum(trial["iterations"] is None for trial in trials),
        "restore_rise": statistics.fmean(trial["restored"] / trial["loss"] - 1 for trial in trials),
    }


def _train_counted(plan: Experiment, method: Method, share: float, run: Path, failures: Sequence[int]) -> Row:
    """Train with the setting that takes about a share of the weights' size, as values are counted.

    Returns:
        The setting, and the size as it is counted with that: SCAR's parts are a whole number, so not quite the share.
    """
    assert method.sized is not None and method.counted is not None
    fraction = share * FP32 / method.counted
    setting = round(1 / fraction) if method.sized == "parts" else fraction
    sizes = _train(plan, method.config(**{method.sized: setting}), run, failures)
    counted = method.counted / FP32 * (1 / setting if method.sized == "parts" else setting)
    return {method.sized: setting, **sizes, "bytes": sizes["bytes"] / sizes["share"] * counted, "share": counted}


def _train_sized(
    plan: Experiment, method: Method, target: float, directory: Path, failures: Sequence[int]
) -> tuple[Path, Row]:
    """Train with the setting whose checkpoints have the size closest to those of another method.

    Short runs come near it, whole runs then make up for sizes that change along the run.

    Returns:
        The directory of the run, and its sizes together with the setting.
    """
    assert method.sized is not None
    setting = getattr(method.config().quantize.weights.codebook, method.sized)
    parts = isinstance(setting, int)  # a part is written at a time, else a fraction
    tried: list[tuple[float, float]] = []
    ends = [[_SHORT_SAVES * plan.every]] * _SHORT_RUNS + [list(failures)] * _WHOLE_RUNS
    for number, last in enumerate(ends):
        run = directory / str(number)
        sizes = _train(plan, method.config(**{method.sized: setting}), run, last)
        tried.append((1 / setting if parts else setting, sizes["bytes"]))
        wanted = _next_fraction(tried, target)
        better = max(1, round(1 / wanted)) if parts else wanted
        close = abs(sizes["bytes"] / target - 1) <= CLOSE or better == setting
        if number == len(ends) - 1 or (number >= _SHORT_RUNS and close):
            break
        shutil.rmtree(run)
        setting = better
    return run, {method.sized: setting, **sizes}


def _next_fraction(tried: Sequence[tuple[float, float]], target: float) -> float:
    """Return the next fraction to try, by linear interpolation, since elements that are left out have codes too."""
    fraction, size = tried[-1]
    next_fraction = fraction * target / size
    others = [(other, bytes_) for other, bytes_ in tried if other != fraction and bytes_ != size]
    if others:
        other, bytes_ = others[-1]
        next_fraction = fraction + (target - size) * (fraction - other) / (size - bytes_)
    return min(1.0, max(next_fraction, fraction / 4), 4 * fraction)


def _directory(run: Path, step: int) -> Path:
    return run / f"step-{step:06d}"


def _interval(half: float) -> str:
    return f"± {half:.1f}"


def _bytes(count: float) -> str:
    return f"{count:,.0f}"


SHOW: Callable[[Any], str] = digits(1)
COLUMNS = (
    Column("<method", "name"), Column("fraction", "fraction", digits(4)), Column("parts", "parts"),
    Column("bytes", "bytes", _bytes), Column("of fp32", "share", percent), Column("rework", "iterations", SHOW),
    Column("95 %", "iterations_ci95", _interval), Column("median", "iterations_median", SHOW),
    Column("worst", "iterations_worst"), Column("over limit", "over_limit"),
    Column("loss at restore", "restore_rise", percent), Column("changes by", "loss_changes_by", percent),
)
NOTES = """\
bytes: of the weights in one checkpoint, mean, without tables, index and manifest, or as they are counted; rework:
iterations until the training loss is back at its value at the failure, mean, with its 95 % confidence interval; a trial
over the limit counts as the limit; loss at restore: its mean rise, to be read beside the mean change of the loss from
one step to the next."""
