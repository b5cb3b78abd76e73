"""Intervals between snapshots and sizes of batches: LowDiff's equations, the cost model of this package, and a tuner.

*Wasted time* is the time of a job beyond its iterations: steady overhead, and after each failure the recovery and the
lost work (§II-B). `wasted_time` and `optimum` are equations 8 and 10 of LowDiff (§V-C). `CostModel` describes this
package, and `Tuner` applies it while a job runs.

**The equations.**  The paper counts the lost work of a failure, `b / 2`, in iterations, and writes `1 / f` for the
iterations between snapshots: its unit of time is the iteration, so W, R_F, R_D and M have to be in iterations too.
With seconds and an iteration of `t` seconds, f being snapshots per iteration, equation 8 reads ::

    wasted = N T / M (b t / 2 + R_F + R_D / 2 (1 / (f b) - 1)) + N T S f / (W t)

Its derivatives vanish where `f² b = R_D W t / (2 S M)` and `f b² = R_D / t`: equation 9 with `t = 1`. Division
of the second, squared, by the first leaves `b³ = 2 S R_D M / (W t³)`, and then `f³ = R_D W² t³ / (4 S² M²)`:
equation 10 is right, and `f b = (R_D² W / (2 S M))^(1/3)`. This is the minimum: the three terms that depend on f and
b are exponentials of linear functions of `log f` and `log b`, so their sum is convex in these logarithms. At the
optimum the terms are equal. The optimum may be infeasible: nothing ensures `b >= 1`, and `f b <= 1` (a batch in a
snapshot's interval) holds only for `R_D² <= 2 S M / W`.

**Differences from this package.**

* R_D is the time to merge one *batch*: the equations count batches, so a batch of summed gradients must merge in the
  time of one gradient. This holds for SGD, but Adam cannot be replayed from a sum. If each step of a batch is
  replayed, R_D is `b` times the replay of a step: `(1 / f - b) / 2` steps are merged, the derivative by b has no
  root, and `b = 1` is best.
* A batch costs nothing to write, although Table I is explained by "many writes due to insufficient batching".
  Equation 8 does not describe that table: fitted to its 24 cells (1, b, 1/(f b) and f) it misses them by 0.17 rms.
  With a cost per batch and replay per step (1, b, 1/b, f and 1/f, the terms of `CostModel`) it misses by 0.05.
* The table's FCF must be iterations between snapshots, as in Exp. 5: best batches grow with it. The text around it
  reads it as a frequency, and explains it the wrong way round.
* A snapshot stops training for S / W. Here it stops training for `Costs.stall`, and is written in the background.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from dsq_ckpt.errors import ConfigError

MAX_LOAD = 0.8
"""Largest load of the checkpointing process. A fully loaded process never catches up after a slow write."""
HYSTERESIS = 1.02
"""Settings that waste at most this many times the optimum stay, such as an interval of 1.2 times the best one."""
PRIOR_SECONDS = 2 * 3600.0
"""Assumed seconds between failures before the first one: the geometric mean of 5 minutes and 2 days, after the paper's
"minutes to days"."""
DEFAULT_REPLAY = 1 / 3
"""Iterations to replay a step, assumed until the first recovery. A high value, so that snapshots are frequent."""
SMOOTHING = 0.2
"""Weight of the newest measurement in the running means."""
_LEAST = 1e-9  # seconds or bytes: a positive stand-in for values below a clock's resolution


class TunedSettings(NamedTuple):
    """The settings of a log: steps from one snapshot to the next, and steps per written segment."""

    snapshot_every: int
    batch: int


INITIAL_SETTINGS = TunedSettings(50, 2)
"""Settings before the first measurements."""


@dataclass(frozen=True)
class Bounds:
    """The ranges of the settings, both ends included; equal ends fix a setting.

    Attributes:
        every: steps from one snapshot to the next. The upper end bounds the log on disk and the time of a recovery.
        batch: steps written at once. The upper end bounds the steps that a failure loses.

    Raises:
        ConfigError: an end is below 1, ends are in the wrong order, or batches exceed all intervals.
    """

    every: tuple[int, int] = (1, 1000)
    batch: tuple[int, int] = (1, 64)

    def __post_init__(self) -> None:
        (min_every, max_every), (smallest, largest) = self.every, self.batch
        if not (1 <= min_every <= max_every and 1 <= smallest <= min(largest, max_every)):
            bounds = f"every={self.every}, batch={self.batch}"
            raise ConfigError(f"bounds are (lowest, highest), at least 1, a batch within an interval; not {bounds}")

    def clip(self, settings: TunedSettings) -> TunedSettings:
        """Return the nearest settings within the bounds; a batch never exceeds the interval between snapshots."""
        every = min(max(settings.snapshot_every, self.every[0], self.batch[0]), self.every[1])
        return TunedSettings(every, min(max(settings.batch, self.batch[0]), self.batch[1], every))


@dataclass(frozen=True)
class Costs:
    """The measured costs of a job on its machine, in seconds and bytes.

    Attributes:
        iteration: t, seconds of one step, without waiting for checkpoints.
        bandwidth: W, bytes per second at which snapshots are written.
        snapshot_bytes: S.
        load: R_F, seconds to load a snapshot, plus other costs of a restart that do not depend on the settings.
        replay: seconds to replay one logged step.
        mtbf: M, mean seconds between failures of the whole job: that of one rank divided by their number.
        ranks: N, for the conversion to GPU-seconds.
        merge: R_D, seconds to merge one batch of summed gradients; None for the time to replay one step.
        stall: seconds that a snapshot stops training; None for the whole write, S / W.
        batch_fixed: seconds of the checkpointing process for each batch: file, fsync, commit.
        batch_step: seconds of the checkpointing process for each step of a batch: encoding and writing it.
        contention: share of the checkpointing process's busy time that training loses, as to a shared disk or cache.
            On separate cores 1.3 % and 0.4 % were measured (`scripts/evaluate_lowdiff.py contention`), noise 2 %.

    Raises:
        ConfigError: values are out of range; the message names all of them.
    """

    iteration: float
    bandwidth: float
    snapshot_bytes: float
    load: float
    replay: float
    mtbf: float
    ranks: int = 1
    merge: float | None = None
    stall: float | None = None
    batch_fixed: float = 0.0
    batch_step: float = 0.0
    contention: float = 0.0

    def __post_init__(self) -> None:
        may_be_zero = {"load", "stall", "batch_fixed", "batch_step", "contention"}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        invalid = [
            f"{name}={value}" for name, value in values.items()
            if value is not None and not (0 < value < math.inf or (value == 0 and name in may_be_zero))
        ]
        if self.contention > 1:
            invalid.append(f"contention={self.contention} (a share, at most 1)")
        if invalid:
            raise ConfigError(f"costs are seconds and bytes, finite and positive, not {', '.join(invalid)}")

    @property
    def write_seconds(self) -> float:
        """Seconds to write a snapshot, S / W."""
        return self.snapshot_bytes / self.bandwidth

    @property
    def merge_seconds(self) -> float:
        """Seconds to merge one batch, R_D."""
        return self.replay if self.merge is None else self.merge

    @property
    def stall_seconds(self) -> float:
        """Seconds that a snapshot stops training."""
        return self.write_seconds if self.stall is None else self.stall


def wasted_time(costs: Costs, f: float, b: float, run_time: float) -> float:
    """Evaluate equation 8 of LowDiff, with consistent units (see the module's docstring).

    Args:
        costs: costs, of which `merge_seconds`, `write_seconds`, `load`, `iteration`, `mtbf` and `ranks` are used.
        f: snapshots per iteration, > 0.
        b: steps of a batch, > 0.
        run_time: T, seconds.

    Returns:
        Wasted GPU-seconds of all ranks.
    """
    merges = (1 / (f * b) - 1) / 2
    failure = b / 2 * costs.iteration + costs.load + costs.merge_seconds * merges
    return costs.ranks * run_time * (failure / costs.mtbf + costs.write_seconds * f / costs.iteration)


def optimum(costs: Costs) -> tuple[float, float]:
    """Return `(f, b)`, snapshots per iteration and steps per batch, at the minimum of `wasted_time` (equation 10).

    Neither is rounded or bounded: b may be below 1 and `f b` above it.
    """
    t = costs.iteration
    merge, write, mtbf = costs.merge_seconds / t, costs.write_seconds / t, costs.mtbf / t
    return (merge / (4 * write**2 * mtbf**2)) ** (1 / 3), (2 * write * merge * mtbf) ** (1 / 3)


@dataclass(frozen=True)
class CostModel:
    """A model of wasted time if each logged step is replayed and a separate process writes.

    Let F be `snapshot_every`, t an iteration, c the stall of training by a snapshot, `p = S / W` the time to write
    a snapshot, r the replay of a step, `w = batch_fixed + b batch_step` the time to write a batch, M the mean time
    between failures. Failures are uniformly distributed in time. On average a failure happens

    * `age = F t / 2 + p - c` seconds of training after the newest snapshot that is complete on disk was taken
      (training continues while a snapshot is written, for p - c after its stall);
    * `lost = b t / 2 + w` seconds of training after the last step that is complete on disk.

    The steps in between are replayed, at r instead of t. With the overhead of every step, ::

        wasted / run_time = (R_F + lost + r / t max(0, age - lost)) / M + (c / F + slowdown) / t
        busy = batch_fixed / b + batch_step + p / F                      (of the checkpointing process, per step)
        slowdown = contention busy + max(0, busy - t)                    (per step; the latter if it falls behind)

    If the process does not fall behind, F and b separate, and with k for contention ::

        F = sqrt(2 (c + k p) M / (r t))        Young's interval, with replay instead of lost work
        b = sqrt(k batch_fixed M / ((t - r) (t / 2 + batch_step)))

    Without contention the smallest batch that the process can keep up with is best. A little contention makes the best
    batch much larger, since failures are rare and writes are frequent. The model is of first order in
    wasted / run_time, and ignores failures during a recovery.
    """

    costs: Costs

    def busy(self, every: float, batch: float) -> float:
        """Return the busy seconds of the checkpointing process per step."""
        return self.costs.batch_fixed / batch + self.costs.batch_step + self.costs.write_seconds / every

    def slowdown(self, every: float, batch: float, max_load: float = 1.0) -> float:
        """Return the additional seconds of a step, without stalls; training waits for a load above `max_load`."""
        busy = self.busy(every, batch)
        return self.costs.contention * busy + max(0.0, busy - max_load * self.costs.iteration)

    def wasted_time(self, every: float, batch: float, run_time: float, max_load: float = 1.0) -> float:
        """Return the wasted GPU-seconds of all ranks in `run_time` seconds; `max_load` as for `slowdown`."""
        c = self.costs
        age, lost_time = every * c.iteration / 2 + max(0.0, c.write_seconds - c.stall_seconds), self._lost(batch)
        failure = c.load + lost_time + c.replay / c.iteration * max(0.0, age - lost_time)
        steady = (c.stall_seconds / every + self.slowdown(every, batch, max_load)) / c.iteration
        return c.ranks * run_time * (failure / c.mtbf + steady)

    def best_settings(self, bounds: Bounds | None = None) -> TunedSettings:
        """Return the best integer settings within bounds, with a load of the checkpointing process below `MAX_LOAD`.

        The result is exact: for each batch the waste is piecewise convex in the interval (falling behind or not, steps
        to replay or not), so the best integer is next to the minimum of a piece or to a boundary between pieces.
        """
        bounds = bounds or Bounds()
        candidates = {
            bounds.clip(TunedSettings(max(round_(min(interval, bounds.every[1])), batch), batch))
            for batch in range(bounds.batch[0], bounds.batch[1] + 1)
            for interval in self._intervals(batch)
            for round_ in (math.floor, math.ceil)
        }
        return min(candidates, key=lambda settings: (self.rate(settings), settings))

    def rate(self, settings: TunedSettings) -> float:
        """Return the objective of `best_settings`: wasted seconds per second, at a full load of `MAX_LOAD`."""
        return self.wasted_time(settings.snapshot_every, settings.batch, 1.0, MAX_LOAD) / self.costs.ranks

    def _lost(self, batch: float) -> float:
        return batch * self.costs.iteration / 2 + self.costs.batch_fixed + batch * self.costs.batch_step

    def _intervals(self, batch: int) -> list[float]:
        """Return candidates for the best real-valued, unbounded interval of a batch."""
        c = self.costs
        cost = c.stall_seconds + c.contention * c.write_seconds
        candidates = [math.sqrt(2 * x * c.mtbf / (c.replay * c.iteration)) for x in (cost, cost + c.write_seconds)]
        candidates.append(max(0.0, self._lost(batch) - max(0.0, c.write_seconds - c.stall_seconds)) * 2 / c.iteration)
        spare = MAX_LOAD * c.iteration - c.batch_step - c.batch_fixed / batch
        return [*candidates, c.write_seconds / spare] if spare > 0 else candidates


class Tuner:
    """A tuner that moves the settings towards `CostModel.best_settings` during a job (§VII-A, "stepwise adjustments").

    Args:
        start: settings until an iteration, a snapshot and a batch were measured.
        bounds: bounds of the settings.
        mtbf: mean seconds between failures; None to estimate it as `(PRIOR_SECONDS + run time) / (1 + failures)`, as
            if the job had run `PRIOR_SECONDS` before and failed once. Without failures the intervals grow over time.
        contention: see `Costs`.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self, start: TunedSettings = INITIAL_SETTINGS, bounds: Bounds | None = None, mtbf: float | None = None,
        contention: float = 0.0,
    ) -> None:
        if mtbf is not None and not (math.isfinite(mtbf) and mtbf > 0):
            raise ConfigError(f"mtbf is in seconds and positive, not {mtbf}")
        if not 0 <= contention <= 1:
            raise ConfigError(f"contention is a share, from 0 to 1, not {contention}")
        self.bounds = bounds or Bounds()
        self.settings = self.bounds.clip(start)
        self._fixed_mtbf, self._contention = mtbf, contention
        self._means: dict[str, float] = {}
        self._run_time = 0.0
        self._failures = 0

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures, fixed or estimated."""
        estimate = (PRIOR_SECONDS + self._run_time) / (1 + self._failures)
        return estimate if self._fixed_mtbf is None else self._fixed_mtbf

    def observe(
        self, *, iteration: float | None = None, steps: int = 1, stall: float | None = None,
        snapshot: tuple[float, int] | None = None, batch: tuple[float, int, int] | None = None,
        encoding: float | None = None, load: float | None = None, replay: float | None = None, failures: int = 0,
    ) -> None:
        """Add measurements to the running means.

        Args:
            iteration: seconds of one step, without waiting for checkpoints. With the waiting, a checkpointing process
                that falls behind would seem to keep up, since it slows down the steps.
            steps: number of steps of this duration, counted as run time.
            stall: seconds that a snapshot stopped training.
            snapshot: seconds and bytes of writing a snapshot.
            batch: seconds, bytes and steps of writing a batch. The time of its bytes at a snapshot's bandwidth counts
                as a cost of its steps, the rest as a cost of each batch.
            encoding: seconds to encode one step, not included in `batch`.
            load: seconds to load a snapshot.
            replay: seconds to replay one step.
            failures: number of new failures.

        Raises:
            ValueError: a measurement is negative or not finite.
        """
        measured = {
            "iteration": iteration, "stall": stall, "encoding": encoding, "load": load, "replay": replay,
            "snapshot_seconds": snapshot and snapshot[0], "snapshot_bytes": snapshot and snapshot[1],
            "batch_seconds": batch and batch[0], "batch_bytes": batch and batch[1], "batch_steps": batch and batch[2],
        }
        present = {name: float(value) for name, value in measured.items() if value is not None}
        checked = {**present, "steps": steps, "failures": failures}
        if invalid := [f"{name}={value}" for name, value in checked.items() if not 0 <= value < math.inf]:
            raise ValueError(f"measurements are finite and not negative: {', '.join(invalid)}")
        for name, value in present.items():
            mean = self._means.get(name, value)
            self._means[name] = mean + SMOOTHING * (value - mean)
        self._run_time += steps * present.get("iteration", 0.0)
        self._failures += failures

    def costs(self) -> Costs | None:
        """Return the measured costs, or None before an iteration, a snapshot and a batch were measured."""
        means = self._means
        if not {"iteration", "snapshot_seconds", "batch_seconds"} <= means.keys():
            return None
        needed = ("iteration", "snapshot_seconds", "snapshot_bytes")
        iteration, written, size = (max(means[name], _LEAST) for name in needed)
        transfer = min(means["batch_bytes"] * written / size, means["batch_seconds"])
        return Costs(
            iteration=iteration, bandwidth=size / written, snapshot_bytes=size, mtbf=self.mtbf,
            load=means.get("load", written),  # affects the settings only through `HYSTERESIS`
            replay=max(means.get("replay", DEFAULT_REPLAY * iteration), _LEAST),
            stall=means.get("stall"), contention=self._contention,
            batch_fixed=means["batch_seconds"] - transfer,
            batch_step=means.get("encoding", 0.0) + transfer / max(means["batch_steps"], 1.0),
        )

    def suggest(self) -> TunedSettings:
        """Update and return the settings, each at most doubled or halved, if the optimum is better by `HYSTERESIS`."""
        if costs := self.costs():
            model, current = CostModel(costs), self.settings
            target = model.best_settings(self.bounds)
            if model.rate(current) > HYSTERESIS * model.rate(target):
                self.settings = self.bounds.clip(TunedSettings(*map(_step_towards, current, target)))
        return self.settings

    def state(self) -> dict[str, Any]:
        """Return the measurements as JSON data, without the constructor's arguments."""
        state = {"means": dict(self._means), "run_time": self._run_time, "failures": self._failures}
        return {"choice": list(self.settings), **state}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], bounds: Bounds | None = None, mtbf: float | None = None, contention: float = 0.0,
    ) -> Tuner:
        """Create a tuner from the result of `state`, possibly with other bounds and another time between failures.

        Raises:
            ConfigError: a value is out of range, or `state` is not the state of a tuner.
        """
        tuner = cls(INITIAL_SETTINGS, bounds, mtbf, contention)
        try:
            every, batch = (int(number) for number in state["choice"])
            tuner.settings = tuner.bounds.clip(TunedSettings(every, batch))
            tuner._means = {str(name): float(value) for name, value in state["means"].items()}
            tuner._run_time, tuner._failures = float(state["run_time"]), int(state["failures"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"not the state of a tuner: {error!r}") from error
        return tuner


def _step_towards(current: int, target: int) -> int:
    """Return the next value from `current` towards `target`, by at most a factor of two."""
    return min(target, 2 * current) if target > current else max(target, (current + 1) // 2)
