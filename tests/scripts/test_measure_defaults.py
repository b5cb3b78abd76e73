"""Runs that are restored from their checkpoints stand beside one that has none."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import measure_defaults
import pytest
from gpt import GPTConfig
from typer.testing import CliRunner


@pytest.mark.usefixtures("one_thread")
def test_restored_runs_beside_one_without_checkpoints(tmp_path: Path) -> None:
    small = GPTConfig(context=96, layers=1, width=32, heads=1)
    with patch.object(measure_defaults, "GPTConfig", lambda **_: small):
        result = CliRunner().invoke(measure_defaults.app, [
            "restores", "--steps", "6", "--failures", "2", "--only", "weights 4, moments 4",
            "--json", str(tmp_path / "restores.json"),
        ], catch_exceptions=False)
    assert result.exit_code == 0
    plain, *restored = json.loads((tmp_path / "restores.json").read_text())["rows"]
    assert plain["name"] == "no failures" and plain["against_no_failures"] == 0 and "ratio_kept" not in plain
    assert restored
    for row in restored:
        assert row["ratio_kept"] > 1 and row["ratio_written"] > 1
        assert row["final_loss"] != plain["final_loss"]
