"""Pictures of a whole run that failed, and of all recorded runs together."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from evaluate import app
from evaluation import along, overview, report
from matplotlib.figure import Figure
from typer.testing import CliRunner

from tests.helpers.commands import unwrap_text

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def failed_run(name: str, saved: bool = True, bound: str = "-") -> dict:
    sizes = {"keyframe": False, "ratio_written": 16.0, "ratio_weights": 64.0} if saved else {}
    saves = [{"step": step, "loss": 2 - 0.01 * step, **sizes} for step in (10, 20, 30, 40)]
    row = {
        "workload": "gpt", "seed": 0, "name": name, "bound": bound, "loss": 1.6, "checkpoints": saves,
        "failures": 1,
        "restores": [{"step": 20, "before": 1.8, "after": 1.81}], "reference_loss": 1.5,
        "reference_losses": {"every": 20, "values": [1.6, 1.5]},
    }
    if saved:
        saves[0] |= {"keyframe": True, "ratio_weights": 32.0}
        saves[2] |= {"ratio_weights": None}  # nothing changed
        row |= {"ratio_weights_kept": 50.0, "ratio_state_kept": 40.0, "ratio_written": 16.0,
                "bytes": {"logical": 64e6, "kept": 1e6}}
    return row


def drawn(rows: list[dict]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the lines of each panel, label and points, by its title."""
    panels = {}
    for panel in report.PANELS["online"](rows):
        axis = Figure().subplots()
        panel(axis)
        panels[axis.get_title()] = {
            line.get_label(): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
            for line in axis.get_lines()
        }
    return panels


def test_one_run_is_drawn_along_its_steps() -> None:
    panels = drawn([failed_run("dsq"), failed_run("noise", saved=False)])
    losses, differences, sizes, total = panels.values()
    assert losses["no failures"] == [(20, 1.6), (40, 1.5)]
    assert losses["dsq"] == [(10, 1.9), (20, 1.8), (30, 1.7), (40, 1.6)] == losses["noise"]
    assert losses["dsq, restored"] == [(20, 1.81)]
    # At the steps at which both were evaluated.
    assert differences["dsq"] == [(20, pytest.approx(12.5)), (40, pytest.approx(100 * (1.6 / 1.5 - 1)))]
    means = differences["dsq, mean from restore to restore"]
    assert means == [(10, pytest.approx(12.5)), (30, pytest.approx(100 * (1.6 / 1.5 - 1)))]
    assert sizes["dsq, keyframes: weights, base layer"] == [(10, 1.0)]
    assert sizes["dsq, deltas: weights, base layer"] == [(20, 0.5), (40, 0.5)]
    assert sizes["dsq, deltas: all that was written"] == [(20, 2.0), (30, 2.0), (40, 2.0)]
    assert total["plain checkpoints"] == [(10, 16), (20, 32), (30, 48), (40, 64)]
    assert total["dsq, written"] == [(10, 1), (20, 2), (30, 3), (40, 4)] and total["dsq, kept in the end"] == [(40, 1)]


def test_several_bounds_or_runs_are_compared_by_their_end() -> None:
    bounds = [failed_run("uniform", bound=bound) for bound in ("relative 0.05", "relative 0.02")]
    assert list(drawn(bounds)) == ["gpt, seed 0: weights", "gpt, seed 0: everything"]
    seldom = failed_run("noise", saved=False) | {"failures": 2}
    assert {"noise, 1 restores", "noise, 2 restores"} < set(
        drawn([failed_run("dsq"), failed_run("noise", saved=False), seldom])["gpt, seed 0: loss"]
    )
    assert "gpt, seed 1: weights" in drawn([failed_run("dsq"), failed_run("dsq") | {"seed": 1}])
    assert along.panels([{key: value for key, value in failed_run("dsq").items() if key != "reference_losses"}]) == []


def test_points_of_the_overview_are_those_of_the_files() -> None:
    names = ["offline-gpt-seed0", "peers-llama-seed0", "oneshot"]
    documents = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names]
    points = overview.points(documents)
    rows = {row["name"]: row for row in documents[0]["rows"]}
    lc = [point for point in points if point.system == "lc"]
    assert [(point.part, point.degradation, point.ratio) for point in lc] == [
        (overview.WEIGHTS, rows["lc"]["degradation_mean"], rows["lc"]["ratio_weights"]),
        (overview.STATE, rows["lc"]["degradation_mean"], rows["lc"]["ratio_files"]),
    ]
    assert sum(point.system == "dsq" and point.workload == "gpt" for point in points) == 10  # five bounds, two parts
    peers = [point for point in points if point.workload == "llama"]
    assert {point.system for point in peers} == {"excp", "nncodec", "dsq", overview.REFINED}  # none without loss
    assert {point.part for point in peers if point.system == "excp"} == {overview.STATE}
    other = overview.Point(overview.WEIGHTS, (9, "vit, seed 0"), "vit", "powers", 0.01, 20.0)
    colours, markers = overview._colours([*points, other]), overview._markers([*points, other])
    assert len(set(colours.values())) == len(colours) and "powers" in colours
    assert len(set(markers.values())) == len(markers) and "vit" in markers


def test_report_together(tmp_path) -> None:
    files = [str(RESULTS / name) for name in ("offline-gpt-seed0.json", "peers-llama-seed0.json")]
    result = CliRunner().invoke(app, ["report", *files, "--together", str(tmp_path / "all.png")])
    assert result.exit_code == 0, result.output
    assert [file.name for file in tmp_path.iterdir()] == ["all.png"]
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    none = ["report", str(RESULTS / "oneshot.json"), "--together", str(tmp_path / "none.png")]
    result = CliRunner().invoke(app, none)
    assert result.exit_code == 2 and "holds results of offline or peers" in unwrap_text(result.output)


def test_report_side_by_side(tmp_path) -> None:
    files = [str(RESULTS / name) for name in ("growth-gpt.json", "resume.json")]
    result = CliRunner().invoke(app, ["report", *files, "--side-by-side", str(tmp_path / "run.png")])
    assert result.exit_code == 0, result.output
    width, height = struct.unpack(">II", (tmp_path / "run.png").read_bytes()[16:24])
    assert width > 2 * height  # two panels
    none = ["report", *files, str(RESULTS / "coder-2-core-amd-epyc.json"), "--side-by-side", str(tmp_path / "none.png")]
    result = CliRunner().invoke(app, none)
    assert result.exit_code == 2 and "nothing that can be drawn" in unwrap_text(result.output)
