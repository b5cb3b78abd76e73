"""What a restart costs: the evaluation continues the same run, and tells a lossy state from the exact one."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from evaluate import app
from evaluation import create
from evaluation.resume import COUNTED, EVERY, FLOOR, Curve, compare, lost_steps, summary, update_error
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")


def test_lost_steps_of_a_delayed_run_are_its_delay() -> None:
    steps = [place * EVERY for place in range(COUNTED // EVERY * 2 + 1)]
    exact = Curve([3 - 0.01 * step for step in steps])
    for delay in (0.0, 1.5, -2.0):
        late = Curve([3 - 0.01 * (step - delay) for step in steps])
        assert lost_steps(late, exact) == pytest.approx(delay, abs=1e-9)
    rising = Curve([3 + 0.01 * step for step in steps])
    assert lost_steps(exact, rising) is None


def test_update_error_is_relative_to_the_update() -> None:
    """Adam's update is linear in the first moment and goes with the inverse root of the second."""
    run = create("gpt-tiny")
    run.train(0, 5)
    exact = copy.deepcopy(run.state()["optimizer"])
    for key, factor, expected in (("exp_avg", 1.25, 0.25), ("exp_avg_sq", 4.0, 0.5), ("exp_avg", 1.0, 0.0)):
        other = copy.deepcopy(exact)
        for state in other["state"].values():
            state[key] *= factor
        figures = update_error(run.optimizer, exact, other)
        assert figures["update_error"] == pytest.approx(expected, abs=2e-3)  # eps is not scaled
        assert figures["update_cosine_worst"] == pytest.approx(1, abs=1e-3)


def test_exact_checkpoints_lose_nothing_and_lossy_ones_are_seen() -> None:
    rows = compare("gpt-tiny", 0, {"exact": "exact", "smallest": "smallest"}, [20], steps=30)
    by = {row["system"]: row for row in rows}
    assert by["exact"]["losses"] == by["exact"]["exact_losses"]
    assert by["exact"]["lost_steps"] == by["exact"]["update_error"] == 0
    assert 0 < by[FLOOR]["update_error"] < 1e-5
    assert by["smallest"]["update_error"] > 0.1 and by["smallest"]["losses"] != by["smallest"]["exact_losses"]
    assert by["smallest"]["written"] > 2 * by["exact"]["written"] > 2
    told = {row["system"]: row for row in summary(rows)}
    assert told["exact"]["lost_steps"] == 0 and told[FLOOR]["written"] is None


def test_training_goes_on_as_if_nothing_was_continued() -> None:
    """The second point is the same whether or not another came before it."""
    both = compare("gpt-tiny", 1, {}, [10, 20], steps=10)
    alone = compare("gpt-tiny", 1, {}, [20], steps=10)
    assert both[1:] == alone


def test_points_that_are_no_checkpoints_are_refused() -> None:
    with pytest.raises(ValueError, match="step 15: expected a multiple of 10, 20 steps or more before the end"):
        compare("gpt-tiny", 0, {}, [15], steps=20)


def test_command_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, int]] = []

    def measured(name: str, seed: int, configs: object, points: object, report: object) -> list[dict]:
        runs.append((name, seed))
        return compare(name, seed, {}, [20], steps=10)

    monkeypatch.setattr("evaluation.resume.compare", measured)
    arguments = ["resume", "gpt-tiny", "--seed", "3", "--config", "exact", "--json", str(tmp_path / "resume.json")]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "floor" in result.output and "lost steps" in result.output
    assert runs == [("gpt-tiny", 3)]
    assert json.loads((tmp_path / "resume.json").read_text())["measured"] == "resume"
    assert torch.get_num_threads() == 1
