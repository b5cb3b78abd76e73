"""A step for each class of tensors: smaller at the same bound, within its evaluations, and never past the bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import ConfigError
from dsq_ckpt.search.allocation import group_into_classes

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = {"first": 0.001, "second": 0.1, "third": 1.0, "fourth": 30.0}
"""What a relative squared error of one costs, by layer."""
BOUND = 0.05


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((value - exact) ** 2).sum() / (exact**2).sum())


class Stack(nn.Module):
    """Layers whose errors cost what `WEIGHTS` say."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for name in WEIGHTS:
                setattr(self, name, nn.Linear(192, 192, bias=False))
        self.exact = {name: layer.weight.detach().clone() for name, layer in self.named_children()}
        self.calls = 0

    def loss(self, costs: dict[str, float] = WEIGHTS) -> float:
        self.calls += 1
        layers = dict(self.named_children())
        return 1 + sum(
            cost * relative_error(layers[name].weight.detach(), self.exact[name]) for name, cost in costs.items()
        )


def compressed(path: Path, model: Stack, **arguments) -> dict:
    return dsq_ckpt.compress(model, path, evaluate=model.loss, max_degradation=BOUND, **arguments)


def loaded(path: Path) -> Stack:
    other = Stack()
    state = other.state_dict()
    dsq_ckpt.load(state, path)
    other.load_state_dict(state)
    return other


def test_weights_that_bear_more_get_larger_steps(tmp_path):
    uniform, model = Stack(), Stack()
    one_step = compressed(tmp_path / "one", uniform, probes=0)
    result = compressed(tmp_path / "own", model, probes=48)
    assert result["bytes_kept"] < 0.75 * one_step["bytes_kept"]
    steps = result["quality"]["steps"]
    sizes = [steps[next(group for group in steps if name in group)] for name in WEIGHTS]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 4 * sizes[-1]
    assert loaded(tmp_path / "own").loss() - 1 == pytest.approx(result["quality"]["degradation"], rel=1e-3)
    assert 0.4 * BOUND < result["quality"]["degradation"] <= BOUND
    assert result["quality"]["evaluations"] == model.calls <= one_step["quality"]["evaluations"] + 48


def test_near_the_optimum_of_theory(tmp_path):
    """Losses here are additive and in proportion to squared errors: fine steps want equal losses of equal sizes."""
    model = Stack()
    costs = dict.fromkeys(WEIGHTS, 0.0) | {"second": 1.0, "third": 4.0, "fourth": 16.0}
    dsq_ckpt.compress(model, tmp_path / "a", evaluate=lambda: model.loss(costs), max_degradation=BOUND, probes=96)
    read = loaded(tmp_path / "a")
    layers = dict(read.named_children())
    losses = [
        costs[name] * relative_error(layers[name].weight.detach(), read.exact[name])
        for name in ("second", "third", "fourth")
    ]
    assert max(losses) < 2.5 * min(losses) and sum(losses) <= BOUND


def test_the_bound_is_kept_on_other_batches_too(tmp_path):
    model = Stack()
    others = {"first": 20.0, "second": 0.1, "third": 1.0, "fourth": 3.0}
    result = compressed(tmp_path / "a", model, check=lambda: model.loss(others))
    read = loaded(tmp_path / "a")
    assert read.loss() - 1 <= BOUND and read.loss(others) - 1 <= BOUND
    assert result["quality"]["check_degradation"] == pytest.approx(read.loss(others) - 1, rel=1e-3)


def test_where_no_step_for_all_is_fine_enough(tmp_path):
    """The finest step that all could have breaks the bound; that of the one sensitive layer may be finer still."""
    costs = {"first": 0.01, "second": 0.01, "third": 0.01, "fourth": 200.0}
    model = Stack()
    with pytest.warns(UserWarning, match="no configuration keeps"):
        exact = dsq_ckpt.compress(
            model, tmp_path / "one", evaluate=lambda: model.loss(costs), max_degradation=BOUND, probes=0
        )
    result = dsq_ckpt.compress(model, tmp_path / "own", evaluate=lambda: model.loss(costs), max_degradation=BOUND)
    assert result["quality"]["satisfied"] and loaded(tmp_path / "own").loss(costs) - 1 <= BOUND
    assert result["bytes_kept"] < 0.4 * exact["bytes_kept"]


@pytest.mark.parametrize("probes", [1, 4])
def test_few_evaluations_still_keep_the_bound(tmp_path, probes):
    model = Stack()
    result = compressed(tmp_path / "a", model, probes=probes)
    assert loaded(tmp_path / "a").loss() - 1 <= BOUND
    uniform = Stack()
    assert result["bytes_kept"] <= 1.1 * compressed(tmp_path / "one", uniform, probes=0)["bytes_kept"]
    assert model.calls <= uniform.calls + probes


def test_other_codebooks_have_one_configuration(tmp_path):
    result = compressed(tmp_path / "a", Stack(), config={"system": "uniform"})
    assert "steps" not in result["quality"]


@pytest.mark.parametrize("probes", [-1, 2.5, True, "64"])
def test_wrong_numbers_of_probes(tmp_path, probes):
    with pytest.raises(ConfigError, match="probes"):
        compressed(tmp_path / "a", Stack(), probes=probes)
    assert not (tmp_path / "a").exists()


def test_classes_are_roles_and_then_depths():
    sizes = {f"h.{layer}.{role}": 100 for layer in range(4) for role in ("attn", "mlp")} | {"embed": 1000, "head": 10}
    assert sorted(map(len, group_into_classes(sizes, 4))) == [1, 1, 4, 4]
    assert sorted(map(len, group_into_classes(sizes, 6))) == [1, 1, 2, 2, 2, 2]
    halves = [names for names in group_into_classes(sizes, 6) if "h.0.attn" in names]
    assert halves == [["h.0.attn", "h.1.attn"]], "neighbours are together"
    assert sorted(map(len, group_into_classes(sizes, 2))) == [1, 9]
    assert len(group_into_classes(sizes, 99)) == len(sizes)
    assert sorted(name for names in group_into_classes(sizes, 3) for name in names) == sorted(sizes)


def test_a_step_that_was_set_stays(tmp_path):
    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding.from_pretrained(self.first.weight.detach(), freeze=False)

    result = compressed(
        tmp_path / "a", Model(), config={"quantize": {"groups": {"embedding": {"codebook": {"step": 0.05}}}}}
    )
    steps = result["quality"]["steps"]
    assert steps.pop("weights/embedding/first.weight") == 0.05
    assert len(set(steps.values())) == 3


def test_a_class_that_breaks_the_metric_leaves_the_others_theirs(tmp_path):
    """Beyond some error of one layer the metric is NaN, which is no number to compare or add up."""
    model = Stack()

    def loss() -> float:
        broken = relative_error(model.first.weight.detach(), model.exact["first"]) > 0.002
        return float("nan") if broken else model.loss()

    result = dsq_ckpt.compress(model, tmp_path / "a", evaluate=loss, check=loss, max_degradation=BOUND)
    steps = [step for group, step in sorted(result["quality"]["steps"].items()) if "first" not in group]
    assert result["quality"]["degradation"] <= BOUND
    assert max(steps) > 2 * min(steps)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_a_failure_within_the_probes_leaves_the_model_as_it_was(tmp_path, failure):
    model = Stack()

    def loss() -> float:
        if model.calls == 14:
            raise failure
        return model.loss()

    expected = dsq_ckpt.SaveFailed if isinstance(failure, Exception) else KeyboardInterrupt
    with pytest.raises(expected):
        dsq_ckpt.compress(model, tmp_path / "a", evaluate=loss, max_degradation=BOUND)
    assert all(torch.equal(layer.weight, model.exact[name]) for name, layer in model.named_children())
    assert list(tmp_path.iterdir()) == []
