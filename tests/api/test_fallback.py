"""What a save does where no configuration keeps the bound of `evaluate`, or where it hardly tells anything."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from tests.api.test_compressor import base_loss
from tests.helpers.states import relative_error
from tests.helpers.training import compute_loss, train, train_model


def near(model, error):
    """Return a function for `evaluate` that is content with the weights as they are, or as near as a restore's."""
    exact = {name: value.clone() for name, value in model.state_dict().items()}

    def evaluate():
        tensors = model.state_dict()
        return 1.0 if all(relative_error(value, tensors[name]) < error for name, value in exact.items()) else 2.0

    return evaluate


def test_a_restore_that_is_worse_than_what_is_kept_may_be_is_not_stored(tmp_path):
    """The weights are exact where no base layer keeps the bound, and no refinement either."""
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=near(model, 1e-7))
    with pytest.warns(UserWarning, match="nor does a restore with 8 refinement bits; the weights .* stored exactly"):
        compressor.save(tmp_path / "a")
    assert base_loss(tmp_path / "a") == compute_loss(model)
    assert compressor.quality["chosen"] is None and not compressor.quality["satisfied"]


@pytest.mark.parametrize("kind, says", [
    ("average", r"gave \S+ for the model and for one .* an average of them, such as an EMA"),
    ("strict", "no configuration keeps the metric within"),
    ("failing", r"`evaluate` raised ValueError: step \d+"),
    ("noisy", "is not deterministic"),
])
def test_a_warning_of_every_save_is_reported_once(tmp_path, kind, says):
    """Numbers in it differ from save to save, by which Python takes them for different warnings."""
    model, optimizer = train_model()
    average, calls = {name: value.clone() for name, value in model.named_parameters()}, itertools.count()

    def evaluate() -> float:
        if kind == "failing":
            raise ValueError(f"step {step}")
        if kind == "noisy":
            return 1 + next(calls) % 7
        if kind == "average":
            return float(sum(value.square().mean() for value in average.values()))
        return near_now()

    compressor = dsq_ckpt.Compressor(model, optimizer, {"search": {"bound": "relative"}}, evaluate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            train(model, optimizer, step, step + 1)
            near_now = near(model, 1e-3)
            for name, value in model.named_parameters():
                average[name] = average[name] * 0.9 + value.detach() * 0.1
            compressor.save(tmp_path / str(step))
            assert kind == "noisy" or not compressor.quality["satisfied"]
    assert len([warning for warning in caught if re.search(says, str(warning.message))]) == 1


def test_the_most_conservative_configuration_is_close(tmp_path):
    """The rate-distortion choice of a delta keeps old codes; where no bound is kept, it is left out."""
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=near(model, 1e-3))
    with pytest.warns(UserWarning, match="most conservative"):
        compressor.save(tmp_path / "a")
    assert Manifest.read(tmp_path / "a").config["quantize"]["weights"]["codebook"]["rate_distortion"] == 0.0
    assert base_loss(tmp_path / "a") == pytest.approx(compute_loss(model), rel=0.01)


def test_a_history_without_weights_is_reported(tmp_path):
    """As where the metric has a large constant part, so that weights of zero are within its bound."""
    model, optimizer = train_model(60)
    for constant in (50.0, 0.0):
        compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model) + constant)  # noqa: B023
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compressor.save(tmp_path / f"{constant}" / "1")
        messages = [warning for warning in caught if "holds next to nothing of the weights" in str(warning.message)]
        assert bool(messages) is (constant > 0)
