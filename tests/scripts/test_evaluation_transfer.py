"""Fine-tuning from compressed checkpoints: from which weights it starts, and what it is compared with."""

from __future__ import annotations

import pytest
import torch
from evaluation import create, oneshot, transfer
from evaluation.models import ViT
from evaluation.workloads import NOISE_FLOOR

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows_compare_with_the_weights_as_trained(monkeypatch) -> None:
    monkeypatch.setitem(transfer.TASKS, "gpt-tiny", "gpt-tiny")
    rows = list(transfer.compare("gpt-tiny", 0, (0.05, 0.001), ("uniform",), lambda line: None))
    names = [(row["name"], row.get("bound")) for row in rows]
    assert names == [
        (transfer.EXACT, None), (NOISE_FLOOR, None), (transfer.UNTRAINED, None), ("uniform", 0.05), ("uniform", 0.001),
    ]
    exact, noise, untrained, *compressed = rows
    assert exact["worse_by"] == 0 and abs(noise["worse_by"]) < 1e-3 and untrained["worse_by"] > 0.05
    twice = create("gpt-tiny")
    twice.train(0, twice.steps)
    again = create("gpt-tiny")
    again.model.load_state_dict(twice.model.state_dict())
    again.train(0, again.steps)
    assert exact["loss"] == again.evaluate()
    for row in compressed:
        assert row["satisfied"] and row["degradation"] <= row["bound"] and row["ratio"] > 1
        assert row["worse_by"] == pytest.approx(row["loss"] / exact["loss"] - 1) and row["worse_by"] < 0.05
    assert compressed[0]["ratio"] >= compressed[1]["ratio"]


def test_every_compression_starts_from_the_weights_as_trained() -> None:
    trained = oneshot.Trained.of("gpt-tiny", 0, lambda line: None)
    _, first = trained.compressed("uniform", 0.05)
    assert any(not first[name].equal(value) for name, value in trained.weights.items())
    _, again = trained.compressed("uniform", 0.05)
    assert all(first[name].equal(value) for name, value in again.items())


def test_an_output_layer_of_another_shape_stays_new() -> None:
    torch.manual_seed(0)
    weights = ViT().state_dict()
    task = create("gpt-tiny")
    task.model = ViT(classes=4)
    head = task.model.head.weight.detach().clone()
    transfer._take(task, weights)
    state = task.model.state_dict()
    assert state["head.weight"].equal(head)
    assert all(state[name].equal(value) for name, value in weights.items() if not name.startswith("head."))
