"""Steps of each class of tensors by what the metric bears: for one checkpoint that may cost many evaluations.

One step for all tensors wastes most of a bound, since one layer may bear a relative error of 0.9 where another does not
bear 0.1. So each class of tensors in turn is made coarser than the rest, and the metric is asked what that costs. If
losses add up, the smallest size for a loss is where all classes save as many bits for the same loss (Shoham and Gersho,
"Efficient bit allocation for an arbitrary set of quantizers", 1988). They nearly do for small changes, so steps move by
small factors, the sum is evaluated and corrected, and the next round starts there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.quantization.analysis import Analysis
from dsq_ckpt.quantization.codebook import Fitted
from dsq_ckpt.search.candidates import Candidate, SaveSearch, size_in_bits

_STEPS = tuple(2 ** (number / 8) for number in range(-16, 25))  # of the uniform step: a quarter to eight times
_LARGEST_STEP = 16.0
_FINER = 0.5  # step of the first probes, in steps of the start: losses add up where they are small
_MOVE = 1.5  # by which a probe raises the squared error of a class
_REACH = 4.0  # by which a choice changes it at most; less where that was too far
_NARROW = 1.2  # a reach below that is not tried before new probes
_STEEPER = 1.5  # power of the error by which losses rise beyond a probe
_ROUNDS = 6  # of probes that a budget allows for at least
_LEAST = 1 / 50  # of a class's share of the bound: losses below that are chance
_WORST = 20.0  # times the bound: losses above that, such as those of weights that give NaN, are as bad

Losses = dict[str, float]
"""Degradation by fold of batches (`evaluate`, `check`)."""

Judge = Callable[[Analysis, bool], tuple[bool, Losses]]
"""Whether an analysis keeps the bound on `evaluate`, and if asked on all folds, and what it costs there."""


@dataclass(frozen=True)
class Rung:
    """All tensors of a class at one step: configurations and fits by group, bits and error of all.

    Attributes:
        step: of the lattices.
        configs, fits: by group.
        bits: exact size.
        error: squared, relative to the energy of the class.
    """

    step: float
    configs: dict[str, TensorConfig]
    fits: dict[str, Fitted]
    bits: float
    error: float


class TensorClass:
    """Tensors that share a step, in root mean squares of each.

    Attributes:
        rungs: in descending order of error and ascending order of bits.
        place: of the rung that this class has in the configuration that a round starts from.
    """

    def __init__(self, rungs: list[Rung], step: float) -> None:
        self.rungs = _undominated(rungs)
        self.place = min(range(len(self.rungs)), key=lambda place: abs(math.log(self.rungs[place].step / step)))
        self._coarser = self._finer = 0.0

    @property
    def probe(self) -> int:
        """Place of the rung with about `_MOVE` times the squared error; the present one if that is the coarsest."""
        wanted = _MOVE * self.rungs[self.place].error
        return min(range(self.place + 1), key=lambda place: abs(math.log(self.rungs[place].error / wanted)))

    @property
    def slope(self) -> float:
        """The loss that a doubled error is expected to cost."""
        return self._coarser

    def learn(self, loss: float, least: float) -> None:
        """Note what the rung at `probe` costs, beyond the present one."""
        self._coarser = self._finer = max(loss, least) / max(self._ratio(self.probe) - 1, 0.1)

    def move(self, place: int) -> None:
        """Make another rung the present one; losses are in proportion to errors."""
        ratio = self._ratio(place)
        self.place, self._coarser, self._finer = place, self._coarser * ratio, self._finer * ratio

    def limit_gain(self, factor: float) -> None:
        """Scale what finer rungs are expected to gain."""
        self._finer *= factor

    def loss(self, place: int) -> float:
        """Return what a rung is expected to cost beyond the present one; negative for finer ones."""
        ratio = self._ratio(place)
        if ratio <= 1:
            return self._finer * (ratio - 1)
        return self._coarser * (min(ratio, _MOVE) - 1) * max(ratio / _MOVE, 1.0) ** _STEEPER

    def best(self, price: float, reach: float) -> int:
        """Return the rung within reach with the fewest bits where a unit of loss is worth so many."""
        near = [place for place in range(len(self.rungs)) if 1 / reach <= self._ratio(place) <= reach]
        return min(near, key=lambda place: self.rungs[place].bits + price * self.loss(place))

    def _ratio(self, place: int) -> float:
        return self.rungs[place].error / self.rungs[self.place].error


class Allocation:
    """The search for steps of one checkpoint.

    Args:
        save: its search.
        start: a configuration with one step for all lattices that the search was given.
        step: that one; lattices of other steps, which `quantize.groups` sets, keep theirs.
        bound: relative degradation allowed.
        losses: of the start if it keeps its bound; None if it does not.
        judge: asks the metric.
        budget: evaluations that may be spent.
    """

    def __init__(
        self, save: SaveSearch, start: Candidate, losses: Losses | None, step: float, bound: float, judge: Judge,
        budget: int,
    ) -> None:
        self._losses = losses
        self._best, self._bound, self._judge, self._left = start, bound, judge, budget
        lattices = {
            group: config for group, config in start.groups.items()
            if isinstance(config.codebook, Lattice) and config.codebook.step == step
            and group in save.model.groups  # the metric does not tell what others bear
        }
        others = {group: fitted for group, fitted in start.analysis.fitted.items() if group not in lattices}
        self._others = replace(start.analysis, fitted=others)
        self._bits_of_others = sum(size_in_bits(others[group]) for group in start.groups if group in others)
        sizes = {group: int(save.sketches.joint[group].sum()) for group in lattices}
        self._classes = [
            TensorClass(
                _ladder(save, {group: lattices[group] for group in members}, start.analysis, step), step * _FINER
            )
            for members in classes_of(sizes, max(1, budget // _ROUNDS))
        ]
        self._least = _LEAST * bound / max(1, len(self._classes))

    def run(self) -> tuple[Candidate, Losses | None]:
        """Return the smallest configuration found that keeps the bound, and what it costs; None: there is none."""
        if self._left:
            self._loss = self._try([one.place for one in self._classes])[1]
        while self._left > len(self._classes):
            self._probe()
            if not self._descend():
                break
        return self._best, self._losses

    def _analysis(self, rungs: Sequence[Rung]) -> Analysis:
        fits = {group: fitted for rung in rungs for group, fitted in rung.fits.items()}
        return replace(self._others, fitted={**self._others.fitted, **fits})

    def _rungs(self, places: Sequence[int]) -> list[Rung]:
        return [one.rungs[place] for one, place in zip(self._classes, places, strict=True)]

    def _probe(self) -> None:
        """Ask what a coarser rung of each class costs beside the errors of all others."""
        places = [one.place for one in self._classes]
        for number, one in enumerate(self._classes):
            moved = self._rungs([*places[:number], one.probe, *places[number + 1 :]])
            self._left -= 1
            _, losses = self._judge(self._analysis(moved), False)
            one.learn(self._limited(losses) - self._loss, self._least)
        slopes = sum(one.slope for one in self._classes)
        for one in self._classes:  # without any error there is no loss: all together cannot gain more than it
            one.limit_gain(min(1.0, max(self._loss, self._least) / slopes))

    def _try(self, places: Sequence[int]) -> tuple[bool, float]:
        """Evaluate a choice, and keep it if it is the smallest one within the bound."""
        rungs = self._rungs(places)
        analysis = self._analysis(rungs)
        self._left -= 1
        keeps, losses = self._judge(analysis, True)
        bits = sum(rung.bits for rung in rungs) + self._bits_of_others
        if keeps and (self._losses is None or bits < self._best.bits):
            groups = {group: config for rung in rungs for group, config in rung.configs.items()}
            self._best = replace(self._best, groups={**self._best.groups, **groups}, analysis=analysis, bits=bits)
            self._losses = losses
        return keeps, self._limited(losses)

    def _limited(self, losses: Losses) -> float:
        """Return the loss by `evaluate`, finite: sums and products of it decide."""
        return min(losses["evaluate"], _WORST * self._bound)

    def _descend(self) -> bool:
        """Go to smaller choices within the bound while these probes find such; True if they found one."""
        reach, share, found, failed = _REACH, 1.0, False, list[list[int]]()
        while self._left > 0 and reach >= _NARROW:
            places = self._smallest(share * (self._bound - self._loss), reach)
            if places == [one.place for one in self._classes]:
                break
            keeps, loss = (False, 0.0) if places in failed else self._try(places)
            if not keeps:
                reach, share = reach**0.5, share / 2  # nearer, and rather by classes that are expected to cost little
                failed.append(places)
                continue
            for one, place in zip(self._classes, places, strict=True):
                one.move(place)
            self._loss, found = loss, True
        return found

    def _smallest(self, target: float, reach: float) -> list[int]:
        """Return the smallest rungs within reach whose expected losses sum up to at most `target`."""
        low, high = 1e-30, 1e30
        while high > low * 1.001:
            price = math.sqrt(low * high)
            places = [one.best(price, reach) for one in self._classes]
            if sum(one.loss(place) for one, place in zip(self._classes, places, strict=True)) > target:
                low = price
            else:
                high = price
        return [one.best(high, reach) for one in self._classes]


def classes_of(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Divide tensors into at most `most` classes: by role, a name without its numbers, and large roles by depth.

    Args:
        sizes: elements by name, in the order of the model.
        most: classes, at least 1.
    """
    roles: dict[str, list[str]] = {}
    for name in sizes:
        roles.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    classes, order = list(roles.values()), list(sizes)

    def elements(names: list[str]) -> int:
        return sum(sizes[name] for name in names)

    while len(classes) > most:
        first, second, *rest = sorted(classes, key=elements)
        classes = [*rest, sorted(first + second, key=order.index)]
    while len(classes) < most and (several := [names for names in classes if len(names) > 1]):
        largest = max(several, key=elements)
        classes.remove(largest)
        classes += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return classes


def _ladder(
    save: SaveSearch, configs: dict[str, TensorConfig], known: Analysis, step: float
) -> list[Rung]:
    """Return all steps of a class."""
    rungs = []
    for own in sorted({min(step * factor, _LARGEST_STEP) for factor in _STEPS}):
        # Without rate-distortion choice: it moves values towards zero, all of them in one direction, which costs the
        # metric more than an error of the same size that has none (docs/evaluation.md).
        changed = {"step": own, "rate_distortion": 0.0}
        tried = {
            group: config.model_copy(update={"codebook": config.codebook.model_copy(update=changed)})
            for group, config in configs.items()
        }
        fits = save.sketches.fit(tried, known).fitted
        rungs.append(_rung(own, tried, save.model.recounted({group: fits[group] for group in configs})))
    return rungs


def _rung(step: float, configs: dict[str, TensorConfig], fits: dict[str, Fitted]) -> Rung:
    lost = energy = bits = 0.0
    for fitted in fits.values():
        elements = int(fitted.counts.sum())
        lost += fitted.error * elements
        energy += fitted.mean_square * elements
        bits += size_in_bits(fitted)
    return Rung(step, configs, fits, bits, max(lost / energy if energy else 0.0, 1e-12))


def _undominated(rungs: list[Rung]) -> list[Rung]:
    """Return the rungs that none of at most their bits beats in error, in descending order of error."""
    kept: list[Rung] = []
    for rung in sorted(rungs, key=lambda rung: (rung.bits, rung.error)):
        if not kept or rung.error < kept[-1].error:
            kept.append(rung)
    return kept
