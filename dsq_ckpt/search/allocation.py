"""Bit allocation: a quantization step per class of tensors, for single checkpoints that may take many evaluations.

A single step wastes most of a bound, since one layer may tolerate a relative error of 0.9 and another not even 0.1. So
each class of tensors in turn is quantized more coarsely than the rest, and the loss of the metric is measured. If
losses are additive, the size is minimal where the loss per saved bit is equal for all classes (Shoham and Gersho,
"Efficient bit allocation for an arbitrary set of quantizers", 1988). They are nearly additive for small changes, so
steps change by small factors, the combination is evaluated and corrected, and the next round starts there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.quantization.analysis import Analysis
from dsq_ckpt.quantization.codebook import GroupFit
from dsq_ckpt.search.candidates import Candidate, SaveSearch, size_in_bits

_STEPS = tuple(2 ** (number / 8) for number in range(-16, 25))  # relative to the uniform step: 1/4 to 8
_MAX_STEP = 16.0
_PROBE_STEP = 0.5  # of the first probes, relative to the initial step: small losses are additive
_PROBE_ERROR_RATIO = 1.5  # increase of a class's squared error by a probe
_MAX_ERROR_RATIO = 4.0  # largest change of it by a choice; reduced where that was too much
_MIN_ERROR_RATIO = 1.2  # new probes are taken before a smaller change is tried
_LOSS_EXPONENT = 1.5  # power of the error with which losses grow beyond a probe
_MIN_ROUNDS = 6  # of probes that the budget must allow
_MIN_LOSS_SHARE = 1 / 50  # of a class's share of the bound: smaller losses are noise
_MAX_LOSS = 20.0  # times the bound: larger losses, and NaN, count as this

Losses = dict[str, float]
"""Degradation by fold (`evaluate`, `check`)."""

BoundCheck = Callable[[Analysis, bool], tuple[bool, Losses]]
"""Evaluates an analysis on `evaluate`, or on all folds; returns whether it keeps the bound, and its losses."""


@dataclass(frozen=True)
class OperatingPoint:
    """Operating point of a class: all its tensors quantized with one step.

    Attributes:
        step: step of the lattices.
        configs, fits: configurations and fits by group.
        bits: exact size.
        error: squared error relative to the energy of the class.
    """

    step: float
    configs: dict[str, TensorConfig]
    fits: dict[str, GroupFit]
    bits: float
    error: float


class TensorClass:
    """Tensors that share a step, relative to the root mean square of each.

    Attributes:
        points: operating points in descending order of error and ascending order of bits.
        place: index of the operating point at the start of a round.
    """

    def __init__(self, points: list[OperatingPoint], step: float) -> None:
        self.points = _select_pareto_front(points)
        self.place = min(range(len(self.points)), key=lambda index: abs(math.log(self.points[index].step / step)))
        self._coarser = self._finer = 0.0

    @property
    def probe(self) -> int:
        """Index of the point with about `_PROBE_ERROR_RATIO` times the squared error of the current point."""
        wanted = _PROBE_ERROR_RATIO * self.points[self.place].error
        return min(range(self.place + 1), key=lambda index: abs(math.log(self.points[index].error / wanted)))

    @property
    def expected_doubling_loss(self) -> float:
        """Expected loss of a doubled error."""
        return self._coarser

    def set_probe_loss(self, loss: float, min_loss: float) -> None:
        """Set the measured loss of the point at `probe`, relative to the current point."""
        self._coarser = self._finer = max(loss, min_loss) / max(self._ratio(self.probe) - 1, 0.1)

    def move(self, index: int) -> None:
        """Set the current point, and scale expected losses in proportion to errors."""
        ratio = self._ratio(index)
        self.place, self._coarser, self._finer = index, self._coarser * ratio, self._finer * ratio

    def limit_gain(self, factor: float) -> None:
        """Scale the expected gain of finer points."""
        self._finer *= factor

    def expected_loss(self, index: int) -> float:
        """Return the expected loss of a point relative to the current point; negative for finer points."""
        ratio = self._ratio(index)
        if ratio <= 1:
            return self._finer * (ratio - 1)
        growth = max(ratio / _PROBE_ERROR_RATIO, 1.0) ** _LOSS_EXPONENT
        return self._coarser * (min(ratio, _PROBE_ERROR_RATIO) - 1) * growth

    def select_point(self, price: float, reach: float) -> int:
        """Return the point that minimizes bits + price * loss, among those whose error changes by at most `reach`."""
        candidates = [index for index in range(len(self.points)) if 1 / reach <= self._ratio(index) <= reach]
        return min(candidates, key=lambda index: self.points[index].bits + price * self.expected_loss(index))

    def _ratio(self, index: int) -> float:
        return self.points[index].error / self.points[self.place].error


class Allocation:
    """Search of the steps of one checkpoint.

    Args:
        save: search of the save.
        start: initial configuration, with one step for all lattices.
        step: this step; lattices with another step, set by `quantize.groups`, keep theirs.
        bound: allowed relative degradation.
        losses: losses of `start`, None if it does not keep its bound.
        judge: evaluates the metric.
        budget: maximum number of evaluations.
    """

    def __init__(
        self, save: SaveSearch, start: Candidate, losses: Losses | None, step: float, bound: float, judge: BoundCheck,
        budget: int,
    ) -> None:
        self._losses = losses
        self._best, self._bound, self._judge, self._left = start, bound, judge, budget
        lattices = {
            group: config for group, config in start.groups.items()
            if isinstance(config.codebook, Lattice) and config.codebook.step == step
            and group in save.model.groups  # the metric does not depend on other groups
        }
        others = {group: fitted for group, fitted in start.analysis.fitted.items() if group not in lattices}
        self._others = replace(start.analysis, fitted=others)
        self._bits_of_others = sum(size_in_bits(others[group]) for group in start.groups if group in others)
        sizes = {group: int(save.sketches.joint[group].sum()) for group in lattices}
        self._classes = [
            TensorClass(
                _make_operating_points(save, {group: lattices[group] for group in members}, start.analysis, step),
                step * _PROBE_STEP,
            )
            for members in group_into_classes(sizes, max(1, budget // _MIN_ROUNDS))
        ]
        self._least = _MIN_LOSS_SHARE * bound / max(1, len(self._classes))

    def run(self) -> tuple[Candidate, Losses | None]:
        """Return the smallest configuration found that keeps the bound, and its losses; None without one."""
        if self._left:
            self._loss = self._try([group.place for group in self._classes])[1]
        while self._left > len(self._classes):
            self._probe_classes()
            if not self._descend():
                break
        return self._best, self._losses

    def _merge_fits(self, points: Sequence[OperatingPoint]) -> Analysis:
        fits = {group: fitted for point in points for group, fitted in point.fits.items()}
        return replace(self._others, fitted={**self._others.fitted, **fits})

    def _select_points(self, places: Sequence[int]) -> list[OperatingPoint]:
        return [tensor_class.points[index] for tensor_class, index in zip(self._classes, places, strict=True)]

    def _probe_classes(self) -> None:
        """Measure the loss of a coarser point of each class, with all other classes unchanged."""
        places = [tensor_class.place for tensor_class in self._classes]
        for number, tensor_class in enumerate(self._classes):
            moved = self._select_points([*places[:number], tensor_class.probe, *places[number + 1 :]])
            self._left -= 1
            _, losses = self._judge(self._merge_fits(moved), False)
            tensor_class.set_probe_loss(self._clip_loss(losses) - self._loss, self._least)
        slopes = sum(tensor_class.expected_doubling_loss for tensor_class in self._classes)
        for tensor_class in self._classes:  # without errors there is no loss, so the total gain is limited by the loss
            tensor_class.limit_gain(min(1.0, max(self._loss, self._least) / slopes))

    def _try(self, places: Sequence[int]) -> tuple[bool, float]:
        """Evaluate a choice of points, and record it if it is the smallest that keeps the bound."""
        points = self._select_points(places)
        analysis = self._merge_fits(points)
        self._left -= 1
        keeps, losses = self._judge(analysis, True)
        bits = sum(point.bits for point in points) + self._bits_of_others
        if keeps and (self._losses is None or bits < self._best.bits):
            groups = {group: config for point in points for group, config in point.configs.items()}
            self._best = replace(self._best, groups={**self._best.groups, **groups}, analysis=analysis, bits=bits)
            self._losses = losses
        return keeps, self._clip_loss(losses)

    def _clip_loss(self, losses: Losses) -> float:
        """Return the loss by `evaluate`, clipped to a finite value."""
        return min(losses["evaluate"], _MAX_LOSS * self._bound)

    def _descend(self) -> bool:
        """Move to smaller choices that keep the bound while there are any. Return whether there was one."""
        reach, share, succeeded, failed = _MAX_ERROR_RATIO, 1.0, False, list[list[int]]()
        while self._left > 0 and reach >= _MIN_ERROR_RATIO:
            places = self._minimize_bits(share * (self._bound - self._loss), reach)
            if places == [tensor_class.place for tensor_class in self._classes]:
                break
            keeps, loss = (False, 0.0) if places in failed else self._try(places)
            if not keeps:
                reach, share = reach**0.5, share / 2  # smaller changes, rather in classes with small expected losses
                failed.append(places)
                continue
            for tensor_class, index in zip(self._classes, places, strict=True):
                tensor_class.move(index)
            self._loss, succeeded = loss, True
        return succeeded

    def _minimize_bits(self, target: float, reach: float) -> list[int]:
        """Return the points within reach of the smallest total size whose expected losses sum to at most `target`."""
        low, high = 1e-30, 1e30
        while high > low * 1.001:
            price = math.sqrt(low * high)
            places = [tensor_class.select_point(price, reach) for tensor_class in self._classes]
            if sum(
                tensor_class.expected_loss(index) for tensor_class, index in zip(self._classes, places, strict=True)
            ) > target:
                low = price
            else:
                high = price
        return [tensor_class.select_point(high, reach) for tensor_class in self._classes]


def group_into_classes(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Group tensors into at most `limit` classes: by role (the name without numbers), and large roles also by depth.

    Args:
        sizes: number of elements by name, in the order of the model.
        limit: maximum number of classes, at least 1.
    """
    roles: dict[str, list[str]] = {}
    for name in sizes:
        roles.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    classes, order = list(roles.values()), list(sizes)

    def elements(names: list[str]) -> int:
        return sum(sizes[name] for name in names)

    while len(classes) > limit:
        first, second, *rest = sorted(classes, key=elements)
        classes = [*rest, sorted(first + second, key=order.index)]
    while len(classes) < limit and (several := [names for names in classes if len(names) > 1]):
        largest = max(several, key=elements)
        classes.remove(largest)
        classes += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return classes


def _make_operating_points(
    save: SaveSearch, configs: dict[str, TensorConfig], analysis: Analysis, step: float
) -> list[OperatingPoint]:
    """Return the operating points of a class."""
    points = []
    for size in sorted({min(step * factor, _MAX_STEP) for factor in _STEPS}):
        # Without rate-distortion choice: it biases values towards zero, which degrades the metric more than an
        # unbiased error of the same size (docs/evaluation/one-checkpoint.md).
        changed = {"step": size, "rate_distortion": 0.0}
        tried = {
            group: config.model_copy(update={"codebook": config.codebook.model_copy(update=changed)})
            for group, config in configs.items()
        }
        fits = save.sketches.fit(tried, analysis).fitted
        points.append(_make_operating_point(size, tried, save.model.recount({group: fits[group] for group in configs})))
    return points


def _make_operating_point(step: float, configs: dict[str, TensorConfig], fits: dict[str, GroupFit]) -> OperatingPoint:
    loss = energy = bits = 0.0
    for fitted in fits.values():
        elements = int(fitted.counts.sum())
        loss += fitted.error * elements
        energy += fitted.mean_square * elements
        bits += size_in_bits(fitted)
    return OperatingPoint(step, configs, fits, bits, max(loss / energy if energy else 0.0, 1e-12))


def _select_pareto_front(points: list[OperatingPoint]) -> list[OperatingPoint]:
    """Return the Pareto-optimal points in bits and error, in descending order of error."""
    front: list[OperatingPoint] = []
    for point in sorted(points, key=lambda point: (point.bits, point.error)):
        if not front or point.error < front[-1].error:
            front.append(point)
    return front
