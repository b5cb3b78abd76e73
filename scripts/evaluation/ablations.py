"""What each part of a system is worth, on one recorded run.

* `coders`: the same codes by four coders (Inshrinkerator, Figure 11).
* `components`: systems without one of their parts, or with other settings of it, each searched again.
* `bins`: levels needed to keep a bound, without deltas (Table 7).
* `ranks`: elements by magnitude and by sensitivity (Figure 4b).
* `timings`, in a file of its own: thresholds and clustering on a sketch against the values themselves (Table 8).
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import dsq_ckpt
from dsq_ckpt.api.compressor import fractions_of
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.errors import DSQError
from dsq_ckpt.quantization.analysis import Analysis, GlobalSketch
from dsq_ckpt.quantization.chunk import Chunk
from dsq_ckpt.quantization.groups import group_config
from dsq_ckpt.quantization.plan import QuantizationPlan
from dsq_ckpt.search import Axis, Space
from dsq_ckpt.search.folds import compute_degradation
from dsq_ckpt.search.trial import TrialModel
from evaluation.offline import OURS, RIVAL, summary, system_config
from evaluation.recording import load_recording
from evaluation.replay import replay, save_recorded
from evaluation.report import Column, Row, digits, percent, ratio
from evaluation.workloads import create

Report = Callable[[str], None]
WEIGHTS, EMBEDDING = "quantize.weights.codebook.", "quantize.groups.embedding.codebook."
GRANULARITY = "quantize.granularity"
TOP, PRUNED = 0.1, 0.3
"""Shares of elements by rank: those that count as the largest or most sensitive, and those pruned."""

RUN_COLUMNS = (
    Column("<what", "name"), Column("weights", "ratio_weights", ratio), Column("best delta", "best_delta", ratio),
    Column("degradation mean", "degradation_mean", percent), Column("final", "degradation_final", percent),
    Column("max", "degradation_max", percent), Column("missed", "unsatisfied"),
    Column("codes, bits", "bits_codes", digits(3)), Column("entropy", "bits_entropy", digits(3)),
    Column("evaluations", "evaluations", digits(1)), Column("encode M/s", "encode", digits(1)),
    Column("decode M/s", "decode", digits(1)), Column("<skipped", "skipped"),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "coders": RUN_COLUMNS,
    "components": RUN_COLUMNS,
    "bins": (
        Column("<system", "name"), Column("bound", "bound", percent), Column("bins", "bins", digits(1)),
        Column("levels in use", "levels", digits(1)), Column("bits", "bits", digits(2)),
        Column("found", "found"), Column("of", "checkpoints_tried"), Column("evaluations", "evaluations", digits(1)),
        Column("<skipped", "skipped"),
    ),
    "ranks": (
        Column("step", "step"), Column("elements", "elements"), Column("rank correlation", "correlation", digits(3)),
        Column("largest, not sensitive", "large_insensitive", percent),
        Column("sensitive, not large", "sensitive_small", percent),
        Column("pruned by both", "pruned_by_both", percent),
    ),
    "timings": (
        Column("<what", "name"), Column("seconds", "seconds", digits(4)), Column("min", "fastest", digits(4)),
        Column("max", "slowest", digits(4)), Column("times faster", "speedup", digits(1)),
        Column("mean squared error", "error", lambda value: f"{value:.3e}"),
        Column("off by", "off_by", percent),
    ),
}
PARTS = tuple(COLUMNS)

CODERS: dict[str, dict[str, Any]] = {
    "Huffman of deltas": {"delta.coder": "huffman", "delta.rearrange": False, "delta.run_length": False},
    "RLE + Huffman": {"delta.coder": "huffman", "delta.rearrange": False, "delta.run_length": True},
    "rearranged, RLE + Huffman": {"delta.coder": "huffman", "delta.rearrange": True, "delta.run_length": True},
    "rANS given the previous code": {"delta.coder": "rans"},
}


def coders(directory: Path, epsilon: float, report: Report) -> list[Row]:
    """Encode Inshrinkerator's codes, of the configuration that its search chose, by each coder."""
    choices: dict[int, DSQConfig] | None = None
    rows = []
    for name, values in CODERS.items():
        report(f"coders: {name}")
        config = system_config(RIVAL, epsilon).with_values(**values)
        chosen = None if choices is None else {step: choice.with_values(**values) for step, choice in choices.items()}
        result = replay(directory, config, choices=chosen, report=report)
        if choices is None:
            choices = {point.step: DSQConfig.create(point.config) for point in result.checkpoints}
        rows.append({"part": "coders", "name": name, "skipped": None} | summary(result))
    # An assumption of this table, not a result of it: what differs is the coder alone.
    if len({row["degradation_mean"] for row in rows}) != 1:
        raise RuntimeError(f"the codes differ: mean degradations {[row['degradation_mean'] for row in rows]}")
    return rows


class Variant(NamedTuple):
    """A system changed: dotted keys to set, and how its search space changes with them."""

    name: str
    system: str
    values: dict[str, Any] = {}  # noqa: RUF012 - never changed
    space: Callable[[Space], Space] = lambda space: space


def without(*names: str) -> Callable[[Space], Space]:
    """Return a space without these axes; their keys keep the values of the configuration."""
    return lambda space: replace(space, axes=tuple(axis for axis in space.axes if axis.name not in names))


def only(*names: str) -> Callable[[Space], Space]:
    """Return a space with these variants alone."""
    return lambda space: replace(space, variants=tuple(variant for variant in space.variants if variant.name in names))


_KMEANS = {"fit": "kmeans", "bins": 16, "rate_distortion": 0.05}
VARIANTS = (
    Variant("dsq", OURS),
    Variant("dsq without rate-distortion", OURS, {WEIGHTS + "rate_distortion": 0.0}),
    *(Variant(f"dsq, rate-distortion {price}", OURS, {WEIGHTS + "rate_distortion": price}) for price in (0.05, 0.1)),
    Variant("dsq without sensitivity", OURS, {WEIGHTS + "sensitivity": 0.0}),
    *(Variant(f"dsq, sensitivity {power}", OURS, {WEIGHTS + "sensitivity": power}) for power in (0.125, 0.5)),
    Variant(
        "dsq, k-means levels", OURS, {"quantize.weights.codebook": _KMEANS},
        lambda space: Space((Axis("bins", (WEIGHTS + "bins",), (8, 10, 12, 14, 16)),)),
    ),
    Variant("inshrinkerator", RIVAL),
    Variant(
        "inshrinkerator without pruning", RIVAL, {WEIGHTS + "prune": 0.0},
        # Both variants say what pruning goes by: without it they are the same.
        lambda space: only("magnitude")(without("prune")(space)),
    ),
    Variant(
        "inshrinkerator without protection", RIVAL, {WEIGHTS + "protect": 0.0, EMBEDDING + "protect": 0.0},
        without("protect"),
    ),
    Variant("inshrinkerator, magnitude only", RIVAL, space=only("magnitude")),
    Variant("inshrinkerator, sensitivity only", RIVAL, space=only("sensitivity")),
)


def components(directory: Path, epsilon: float, report: Report) -> list[Row]:
    """Search the configuration of every variant."""
    rows = []
    for variant in VARIANTS:
        report(f"components: {variant.name}")
        row: Row = {"part": "components", "name": variant.name, "system": variant.system, "values": variant.values}
        try:
            with searching(variant.system, variant.space):
                config = system_config(variant.system, epsilon).with_values(**variant.values)
                rows.append(row | {"skipped": None} | summary(replay(directory, config, report=report)))
        except DSQError as error:
            rows.append(row | {"skipped": " ".join(str(error).split())})
    return rows


@contextmanager
def searching(system: str, change: Callable[[Space], Space]) -> Iterator[None]:
    """Give a system another search space for a while: `ConfigManager` takes it from the registry alone."""
    usual = SYSTEMS[system]
    assert usual.space is not None
    SYSTEMS[system] = replace(usual, space=change(usual.space))
    try:
        yield
    finally:
        SYSTEMS[system] = usual


BOUNDS = (0.05, 0.01, 0.001)
MOST_BINS = 254
_BINS = range(4, MOST_BINS + 1)


class Choice(NamedTuple):
    """A system whose levels are to be counted: fixed values, and configurations, the most aggressive first."""

    system: str
    values: dict[str, Any]
    candidates: list[dict[str, Any]]


def _choices() -> dict[str, Choice]:
    """Return, by name, each system as it is, and two with the tensors of a codebook as the other one has them."""
    with_embedding = [{WEIGHTS + "bins": bins, EMBEDDING + "bins": bins} for bins in _BINS]
    steps = SYSTEMS[OURS].space.axes[0].values  # type: ignore[union-attr]
    uniform = [{WEIGHTS + "min_bins": bins, WEIGHTS + "max_bins": bins} for bins in _BINS]
    unpruned, by_tensor, by_layer = {WEIGHTS + "prune": 0.0}, {GRANULARITY: "tensor"}, {GRANULARITY: "layer"}
    return {
        RIVAL: Choice(RIVAL, unpruned, with_embedding),
        f"{RIVAL}, by tensor": Choice(RIVAL, unpruned | by_tensor, with_embedding),
        "uniform": Choice("uniform", {}, uniform),
        "uniform, by layer type": Choice("uniform", by_layer, uniform),
        "adaptive": Choice("adaptive", {}, [{WEIGHTS + "bins": bins} for bins in _BINS]),
        "kmeans": Choice("kmeans", {}, with_embedding),
        OURS: Choice(OURS, {}, [{WEIGHTS + "step": step} for step in steps]),
    }


class Tried(NamedTuple):
    """What one configuration costs at one checkpoint; levels are those of the group that uses most of them."""

    degradation: float
    levels: int
    bits: float


class Bisection:
    """A chooser that looks for the first of many configurations that keeps each bound, by bisection.

    Attributes:
        found: by bound, the place of the configuration and what it cost; None where the most conservative fails too.
        evaluations: of the model.
    """

    def __init__(
        self, model: torch.nn.Module, evaluate: Callable[[], float], candidates: Sequence[Mapping[str, Any]]
    ) -> None:
        self._model, self._evaluate, self._candidates = model, evaluate, candidates
        self.found: dict[float, tuple[int, Tried] | None] = {}
        self.evaluations = 0

    def __call__(
        self, sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
    ) -> QuantizationPlan:
        """Search; the save itself goes on as configured."""
        usual = sketches.fit()
        tried: dict[int, Tried] = {}
        with TrialModel(self._model, local, workers) as trial:
            exact = trial.evaluate(self._evaluate)

            def ask(place: int) -> Tried:
                if place not in tried:
                    self.evaluations += 1
                    analysis = self._fitted(sketches, usual, config.with_values(**self._candidates[place]))
                    degradation = compute_degradation(trial.evaluate(self._evaluate, analysis), exact, config.search)
                    tried[place] = Tried(degradation, *_size(analysis))
                return tried[place]

            for bound in BOUNDS:
                low, high = 0, len(self._candidates)
                while low < high:
                    middle = (low + high) // 2
                    low, high = (low, middle) if ask(middle).degradation <= bound else (middle + 1, high)
                self.found[bound] = (low, ask(low)) if low < len(self._candidates) else None
        return QuantizationPlan(usual, config)

    @staticmethod
    def _fitted(sketches: GlobalSketch, usual: Analysis, config: DSQConfig) -> Analysis:
        return sketches.fit({
            group: group_config(group, config.quantize) for group in usual.fitted if group.startswith("weights/")
        }, usual)


def _size(analysis: Analysis) -> tuple[int, float]:
    """Return the largest number of codes that a group uses, without that of protected elements, and bits per weight."""
    fitted = [fit for group, fit in analysis.fitted.items() if group.startswith("weights/")]
    levels = max(int(np.count_nonzero(fit.counts.sum(0)[: fit.codebook.protected])) for fit in fitted)
    protected = sum(16 * int(fit.counts[:, fit.codebook.protected].sum()) for fit in fitted)
    elements = sum(int(fit.counts.sum()) for fit in fitted)
    return levels, (sum(fit.bits for fit in fitted) + protected) / max(elements, 1)


def bins(directory: Path, report: Report, count: int = 10) -> list[Row]:
    """Measure the levels that keep each bound in a single checkpoint: means over checkpoints spread over the run."""
    info, steps = load_recording(directory).info, _spread(directory, count)
    rows = []
    for name, (system, values, candidates) in _choices().items():
        report(f"bins: {name}")
        run = create(info["settings"]["workload"], info["settings"]["seed"])
        config = system_config(system, max(BOUNDS)).with_values(**values, **{"delta.enabled": False})
        probes, history = [], dsq_ckpt.SaveHistory()
        with tempfile.TemporaryDirectory(prefix="dsq-bins-") as into, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for checkpoint in load_recording(directory).checkpoints:
                if checkpoint["step"] in steps:
                    probe = Bisection(run.model, run.evaluate, candidates)
                    path = Path(into) / f"{checkpoint['step']:06d}"
                    save_recorded(run, checkpoint, path, config, probe, fractions_of(config), history=history)
                    probes.append(probe)
        for bound in BOUNDS:
            hits = [hit for probe in probes if (hit := probe.found[bound]) is not None]
            rows.append({
                "part": "bins", "name": name, "bound": bound, "found": len(hits), "checkpoints_tried": len(probes),
                "bins": _mean([_BINS[place] for place, _ in hits] if system != OURS else []),
                "levels": _mean([point.levels for _, point in hits]), "bits": _mean([point.bits for _, point in hits]),
                "evaluations": _mean([probe.evaluations for probe in probes]), "skipped": None,
            })
    return rows


def _spread(directory: Path, count: int) -> set[int]:
    """Return the steps of so many recorded checkpoints, from the first after training began to the last."""
    every = [row["step"] for row in load_recording(directory).info["checkpoints"] if row["step"]]
    return {every[round(place)] for place in np.linspace(0, len(every) - 1, min(count, len(every)))}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def ranks(directory: Path, report: Report, count: int = 4) -> list[Row]:
    """Rank the elements of all weight matrices of checkpoints by magnitude, and by magnitude times gradient."""
    rows, steps = [], _spread(directory, count)
    for checkpoint in load_recording(directory).checkpoints:
        if checkpoint["step"] in steps:
            report(f"ranks: step {checkpoint['step']}")
            names = [name for name in checkpoint["gradient"] if checkpoint["model"][name].ndim > 1]
            weights = torch.cat([checkpoint["model"][name].flatten() for name in names])
            gradients = torch.cat([checkpoint["gradient"][name].flatten() for name in names])
            rows.append({"part": "ranks", "step": checkpoint["step"], **ranked(weights, gradients)})
    return rows


def ranked(weights: torch.Tensor, gradients: torch.Tensor) -> Row:
    """Return how far two orders of elements agree, by magnitude and by sensitivity.

    Returns:
        Spearman's correlation of the ranks; of the largest tenth the share in the less sensitive half, and the other
        way round; of the least 30 % by magnitude the share that is in those by sensitivity; and the share of elements
        in each pair of tenths, rows by magnitude and columns by sensitivity, the least first.
    """
    scores = weights.abs(), (weights * gradients).abs()
    magnitude, sensitivity = (
        torch.empty(len(score), dtype=torch.float64).index_put_(
            (score.argsort(stable=True),), torch.arange(len(score), dtype=torch.float64) / len(score)
        ) for score in scores
    )
    tenths = torch.bincount((magnitude * 10).long() * 10 + (sensitivity * 10).long(), minlength=100) / len(weights)
    large, sensitive = magnitude >= 1 - TOP, sensitivity >= 1 - TOP
    return {
        "elements": len(weights), "correlation": float(torch.corrcoef(torch.stack([magnitude, sensitivity]))[0, 1]),
        "large_insensitive": float((sensitivity[large] < 0.5).double().mean()),
        "sensitive_small": float((magnitude[sensitive] < 0.5).double().mean()),
        "pruned_by_both": float((sensitivity[magnitude < PRUNED] < PRUNED).double().mean()),
        "tenths": tenths.reshape(10, 10).tolist(),
    }
