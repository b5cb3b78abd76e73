"""An accuracy that is read as a loss is said, and a loss never is."""

from __future__ import annotations

import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.training import Net, compute_loss, make_batch, train, train_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
WRONG = "counts as better, since search.higher_is_better is false. For an accuracy, set"
HIGHER = {"search": {"higher_is_better": True}}


def accuracy_of(model: Net) -> float:
    """Share of targets among the 64 likeliest of 128 tokens: half by chance, so that nothing improves it much."""
    model.eval()
    with torch.no_grad():
        tokens, targets = make_batch(10_000)
        return float((model(tokens).topk(64).indices == targets[:, None]).any(-1).float().mean())


def count_warnings(recorded: list[warnings.WarningMessage]) -> int:
    return sum(WRONG in str(warning.message) for warning in recorded)


def base_accuracy(path) -> float:
    return accuracy_of(base(path))


def base(path) -> Net:
    """Load the base layer, which history keeps."""
    other = Net(seed=5)
    state = other.state_dict()
    dsq_ckpt.load(state if "compressed" in path.parts else {"model": state}, path, refinement=False)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("steps", [20, 150])
def test_an_accuracy_is_reported_once_and_keeps_its_bound_in_both_directions(tmp_path, steps):
    model, optimizer = train_model(steps)
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: accuracy_of(model))
    for number in range(3):
        exact = accuracy_of(model)
        with pytest.warns(UserWarning) if not number else warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            compressor.save(tmp_path / str(number))
        assert count_warnings(recorded) == (number == 0)
        assert abs(base_accuracy(tmp_path / str(number)) / exact - 1) <= 0.05
        train(model, optimizer, steps + 10 * number, steps + 10 * (number + 1))


@pytest.mark.parametrize("bound", [0.01, 0.05])
def test_a_snapshot_by_an_accuracy_is_reported(tmp_path, bound):
    model, _ = train_model(60)
    exact = accuracy_of(model)
    with pytest.warns(UserWarning, match=WRONG):
        dsq_ckpt.compress(
            model, tmp_path / "compressed", evaluate=lambda: accuracy_of(model), max_degradation=bound, probes=8
        )
    assert abs(base_accuracy(tmp_path / "compressed") / exact - 1) <= bound
    with pytest.warns(UserWarning, match=WRONG):
        dsq_ckpt.explore(model, tmp_path / "front", evaluate=lambda: accuracy_of(model), bounds=[bound], probes=0)


def test_an_accuracy_is_reported_once_there_is_something_to_lose(tmp_path):
    """A model that has learned nothing is as good with other signs; one that has is asked about again."""
    model, optimizer = train_model(0)
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: accuracy_of(model))
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        compressor.save(tmp_path / "0")
    assert not count_warnings(recorded)
    train(model, optimizer, 0, 60)
    with pytest.warns(UserWarning, match=WRONG):
        compressor.save(tmp_path / "1")
    resumed = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: accuracy_of(model))
    resumed.load(tmp_path / "1")
    with pytest.warns(UserWarning, match=WRONG):  # each process says it
        resumed.save(tmp_path / "2")


@pytest.mark.parametrize("all_steps", [
    (0, 4, 60, 10), pytest.param((0, 1, 4, 20, 60, 60, 10), marks=pytest.mark.campaign),
], ids=["short", "long"])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_loss_is_not_taken_for_an_accuracy(tmp_path, scale, all_steps):
    """Neither of a model that was made so that zeros are better, nor while it is trained, nor of a restored one."""
    model = Net()
    with torch.no_grad():
        for weight in (model.embed.weight, model.hidden.weight, model.head.weight):
            weight.mul_(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for number, steps in enumerate(all_steps):
            train(model, optimizer, 100 * number, 100 * number + steps)
            compressor.save(tmp_path / str(number))
        compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
        compressor.load(tmp_path / str(number))
        compressor.save(tmp_path / "resumed")
    assert not count_warnings(recorded), [str(warning.message) for warning in recorded]
    zeros = Net()
    with torch.no_grad():
        for weight in (zeros.embed.weight, zeros.hidden.weight, zeros.head.weight):
            weight.zero_()
    first = Manifest.read(tmp_path / "0").quality["metric"]
    assert scale == 1.0 or compute_loss(zeros) < 0.9 * first, "else this test shows nothing"


@pytest.mark.parametrize("config, metric, expected", [
    ({}, compute_loss, [1, 1, 0, 0, 0]), (HIGHER, accuracy_of, [1, 0, 0, 0, 0]),
])
def test_a_settled_direction_costs_no_more_evaluations(tmp_path, config, metric, expected):
    """A loss that fell while it was asked about is settled, and so is a metric that is said to be an accuracy."""
    model, optimizer = train_model(0)
    ruined, exact = [], {}

    def evaluate() -> float:
        ruined.append(float((model.hidden.weight.sign() == -exact["weight"].sign()).float().mean()) > 0.3)
        return metric(model)

    compressor = dsq_ckpt.Compressor(model, optimizer, config, evaluate)
    asked = []
    for number in range(5):
        exact["weight"] = model.hidden.weight.detach().clone()
        ruined.clear()
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            compressor.save(tmp_path / str(number))
        assert not count_warnings(recorded)
        asked.append(sum(ruined))
        train(model, optimizer, 20 * number, 20 * (number + 1))
    assert asked == expected


def test_an_evaluation_that_only_a_ruined_model_fails_is_none_that_failed(tmp_path):
    """As where scales have to be positive: no checkpoint has other signs."""
    model, optimizer = train_model(0)
    with torch.no_grad():
        model.hidden.weight.abs_()

    def evaluate() -> float:
        if (model.hidden.weight < 0).any():
            raise ValueError("scales have to be positive")
        return compute_loss(model)

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".* holds next to nothing of the weights")  # which are untrained
        compressor.save(tmp_path / "0")
    assert compressor.quality["satisfied"] and compute_loss(base(tmp_path / "0")) <= 1.05 * compute_loss(model)


def test_a_loss_that_is_said_to_be_an_accuracy_is_found_out(tmp_path):
    model, optimizer = train_model(150)
    compressor = dsq_ckpt.Compressor(model, optimizer, HIGHER, evaluate=lambda: compute_loss(model))
    with pytest.warns(UserWarning, match=r"improve the metric by \d+%.* unset search.higher_is_better"):
        compressor.save(tmp_path / "0")
