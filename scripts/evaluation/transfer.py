"""Transfer learning from compressed checkpoints (Inshrinkerator, section 9.2, Table 6).

A model is trained on one task and compressed by itself within a bound on its loss, by every system. What its checkpoint
gives back is fine-tuned on another task, with the same batches each time. Beside these: fine-tuning from the weights as
trained, from these with a relative noise of one part in a million, which tells what chance does, and from new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from dsq_ckpt.errors import DSQError
from evaluation import create
from evaluation.oneshot import CHECKED, Trained
from evaluation.report import Column, Row, digits, percent, ratio
from evaluation.workloads import NOISE_FLOOR, Workload, with_noise

TASKS = {"llama": "headers", "vit": "rotation"}
"""The workload whose model is fine-tuned, by the one that trained it."""
EXACT, UNTRAINED = "as trained", "new weights"
SYSTEMS = (CHECKED, "inshrinkerator", "uniform", "adaptive", "kmeans")
BOUNDS = (0.05, 0.01, 0.001)
COLUMNS = (
    Column("<model", "run"), Column("<weights", "name"), Column("bound", "bound", percent),
    Column("ratio", "ratio", ratio), Column("degradation", "other", percent), Column("loss", "loss", digits(4)),
    Column("worse by", "worse_by", percent), Column("accuracy", "accuracy", percent),
)
NOTES = """\
degradation: relative rise of the first task's loss on batches that the search did not see; loss, accuracy: of the other
task after fine-tuning; worse by: against fine-tuning from the weights as trained"""


def compare(
    name: str, seed: int, bounds: Sequence[float], systems: Sequence[str], report: Callable[[str], None]
) -> Iterator[Row]:
    """Train a workload, compress it with every system at every bound, and fine-tune each on the other task.

    Args:
        name: one of `TASKS`.
        seed: of weights and batches of both tasks.
        bounds: relative degradations allowed.
        systems: of `SYSTEMS`.
        report: called with progress, line by line.

    Yields:
        One row for each system and bound, after those it is compared with.
    """
    trained = Trained.of(name, seed, report)
    exact: Row = {}

    def row(about: Row, weights: Mapping[str, Tensor]) -> Row:
        task = create(TASKS[name], seed)
        _take(task, weights)
        task.train(0, task.steps)
        figures = {"run": trained.run, "task": task.name, **about, "loss": task.evaluate(), "accuracy": task.accuracy()}
        figures["worse_by"] = figures["loss"] / exact.get("loss", figures["loss"]) - 1
        bound = f", {about['bound']:.1%}" if "bound" in about else ""
        report(f"  {about['name']}{bound}: {figures['loss']:.4f}, {figures['worse_by']:+.2%}")
        return figures

    exact |= row({"name": EXACT}, trained.weights)
    yield exact
    yield row({"name": NOISE_FLOOR}, with_noise(trained.weights, seed))
    yield row({"name": UNTRAINED}, {})
    for system in systems:
        for bound in bounds:
            try:
                about, weights = trained.compressed(system, bound)
            except DSQError as error:
                yield {"run": trained.run, "name": system, "bound": bound, "skipped": " ".join(str(error).split())}
                continue
            yield row(about, weights)


def _take(task: Workload, weights: Mapping[str, Tensor]) -> None:
    """Give a model the weights of another, except where shapes differ, as those of the output layer may."""
    own = task.model.state_dict()
    fitting = {key: value for key, value in weights.items() if key in own and own[key].shape == value.shape}
    task.model.load_state_dict(own | fitting)
