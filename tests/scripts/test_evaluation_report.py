"""Options that all commands of the evaluation share, and plots of online runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from evaluate import app
from evaluation import report, resume_deepspeed
from matplotlib.figure import Figure
from typer.main import get_command
from typer.testing import CliRunner

from tests.helpers.commands import unwrap_text

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), ROOT / "scripts" / "evaluate.py"]


def row(name: str, bound: str, loss: float | None, weights: float | None, everything: float, seed: int = 0):
    return {
        "workload": "gpt", "seed": seed, "name": name, "bound": bound, "loss": loss, "reference_loss": 2.0,
        "ratio_weights_kept": weights, "ratio_state_kept": everything,
    }


ROWS = [
    row("exact", "-", 2.0, None, 1.2), row("dsq", "progress 0.05", 2.01, 100.0, 70.0),
    row("uniform", "relative 0.05", 2.3, 40.0, 1.9), row("uniform", "relative 0.02", 2.1, 20.0, 1.8),
    row("kmeans", "relative 0.05", None, 10.0, 1.7),
]


def drawn(rows):
    """Of each panel its title and its lines: label and points."""
    panels = {}
    for panel in report.PANELS["online"](rows):
        axis = Figure().subplots()
        panel(axis)
        lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axis.get_lines()}
        panels[axis.get_title()] = lines, [text.get_text() for text in axis.texts]
    return panels


def test_final_loss_against_the_ratio_kept_by_system() -> None:
    panels = drawn(ROWS)
    assert list(panels) == ["gpt, seed 0: weights", "gpt, seed 0: everything"]
    lines, bounds = panels["gpt, seed 0: weights"]
    assert lines["dsq"] == [(100.0, 2.01)] and lines["uniform"] == [(40.0, 2.3), (20.0, 2.1)]
    assert "exact" not in lines and "kmeans" not in lines  # nothing was quantized; the run diverged
    assert bounds == ["progress 0.05", "relative 0.05", "relative 0.02"]
    assert lines["no failures"][0][1] == 2.0 and lines["1 % above"][0][1] == pytest.approx(2.02)
    lines, _ = panels["gpt, seed 0: everything"]
    assert lines["exact"] == [(1.2, 2.0)]


def test_runs_have_panels_of_their_own() -> None:
    """Losses of other seeds, and of other workloads, do not compare."""
    assert len(drawn([*ROWS, row("dsq", "progress 0.05", 2.2, 90.0, 60.0, seed=1)])) == 4
    assert list(drawn(ROWS[:1])) == ["gpt, seed 0: everything"]
    floor = {key: value for key, value in row("noise", "-", 2.0, None, 1.0).items() if not key.startswith("ratio")}
    assert drawn([*ROWS, floor]) == drawn(ROWS)
    assert drawn(ROWS[-1:]) == {}


def test_restarts_are_drawn_in_steps_behind() -> None:
    exact = [3 - 0.05 * place for place in range(5)]  # 0.01 a step, evaluated every fifth

    def row(system: str, late: float, step: int) -> dict:
        return {"workload": "gpt", "seed": 0, "step": step, "system": system, "slope": 0.01, "exact_losses": exact,
                "losses": [loss + 0.01 * late for loss in exact]}

    rows = [{"rows": [row("floor", 0.0, 20), row("default", 1.0, 20), row("floor", 0.0, 40), row("default", 3.0, 40)]}]
    restart, behind = [Figure().subplots() for _ in range(2)]
    for axis, panel in zip((restart, behind), report.PANELS["resume"](rows), strict=True):
        panel(axis)
    labels = [line.get_label() for line in restart.lines]
    assert labels == ["without a restart", "restarted from a checkpoint, default"]
    lines = {line.get_label(): line for line in behind.lines if not line.get_label().startswith("_")}
    assert list(lines["default"].get_ydata()) == pytest.approx([2.0] * 5)
    assert list(lines["floor"].get_ydata()) == [0.0] * 5 and list(lines["floor"].get_xdata()) == [0, 5, 10, 15, 20]


def test_the_median_restart_under_deepspeed_is_reported() -> None:
    rows = [
        {"system": system, "lost_steps": float(lost), "behind": 0.01, "behind_at_end": 0.0, "written": written}
        for system, written in (("DeepSpeed's own tags", None), ("default", 6.0)) for lost in (0, 1, 5)
    ]
    told = resume_deepspeed.summary(rows)
    assert [(row["lost_steps"], row["worst"], row["written"]) for row in told] == [(1, 5, None), (1, 5, 6.0)]


def test_report_of_online_results(tmp_path) -> None:
    """The panels of all files are drawn; pictures are made of runs that are compared, and of one along its steps."""
    files = {file.stem: file for file in (ROOT / "benchmarks" / "results").glob("online-*.json")}
    empty = [name for name, file in files.items() if not drawn(json.loads(file.read_text())["rows"])]
    assert empty == ["online-noise"]  # nothing was saved
    for name, status in (("online-gpt-seed0", 0), ("online-resnet-seed1", 0), *((name, 2) for name in empty)):
        result = CliRunner().invoke(app, ["report", str(files[name]), "--directory", str(tmp_path)])
        assert result.exit_code == status, result.output
        assert status or (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "none.json").write_text(json.dumps({"measured": "online", "rows": ROWS[-1:]}))
    result = CliRunner().invoke(app, ["report", str(tmp_path / "none.json")])
    assert result.exit_code == 2 and "nothing that can be drawn" in unwrap_text(result.output)


def options() -> dict[str, dict[str, str]]:
    """By command: its options, and whether each takes one value or several."""
    commands = get_command(app).commands
    return {
        name: {flag: "several" if parameter.multiple else "one" for parameter in command.params
               for flag in parameter.opts if flag.startswith("--")}
        for name, command in commands.items()
    }


def test_systems_are_named_in_one_way() -> None:
    by_command = options()
    for name in ("offline", "online", "rework"):
        assert by_command[name]["--systems"] == "one"
    assert not any("--system" in flags for flags in by_command.values())
    for name in ("offline", "online", "rework"):
        required = ["--json", "x.json"] if name == "offline" else []
        result = CliRunner().invoke(app, [name, "gpt-tiny", "--systems", "dsq,qsd", *required])
        assert result.exit_code == 2 and "'qsd' is not one of" in unwrap_text(result.output)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documented_commands_exist(path) -> None:
    by_command = options()
    for command, rest in re.findall(r"python scripts/evaluate\.py (\w+)([^\n#`]*)", path.read_text()):
        assert command in by_command, command
        assert set(re.findall(r"--[\w-]+", rest)) <= set(by_command[command]), (command, rest)
