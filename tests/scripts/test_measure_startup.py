"""A process measures its own start, in order, and medians are taken of what several of them measured."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import measure_startup
import pytest

import dsq_ckpt
from tests.helpers import processes


def test_a_process_saves_twice_and_prints_its_times(tmp_path: Path) -> None:
    for system in ("dcp", "dsq"):
        arguments = ["-c", measure_startup.PROCESS, system, str(tmp_path / system), "2"]
        status, output = processes.run(arguments, forked=True)
        assert status == 0, output
        times = json.loads(output.splitlines()[-1])
        assert len(times) > max(end for _, end in measure_startup.INTERVALS.values())
        assert times == sorted(times)
        assert (tmp_path / system / "step-1" / ".metadata").exists() == (system == "dcp")
    assert dsq_ckpt.describe(tmp_path / "dsq" / "step-1")["depth"] == 1


def test_medians_are_of_each_part_and_the_first_process_only_compiles() -> None:
    begun = []

    def start(system: str, directory: Path, tensors: int) -> dict[str, tuple[float, float]]:
        begun.append((system, tensors))
        first = float(len(begun))
        return {"import torch": (2.0, 1.0), "import of what saves": (0.5, 0.25), "first save": (first, first / 2),
                "second save": (0.5, 0.5)}

    with patch.object(measure_startup, "start", start):
        rows = measure_startup.measure(3, 7)
    assert begun == [("dsq", 7), *[("dcp", 7), ("dsq", 7)] * 3]
    times = {(row["system"], row["part"]): (row["seconds"], row["processor_seconds"]) for row in rows}
    assert times["dcp", "first save"] == (4.0, 2.0)
    assert times["dsq", "first save"] == (5.0, 2.5)
    assert times["dsq", "first save beyond the second"] == (4.5, 2.0)
    assert times["dcp", "import torch"] == (2.0, 1.0)


def test_a_process_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with patch.object(measure_startup, "PROCESS", "raise SystemExit(3)"), pytest.raises(Exception, match="status 3"):
        measure_startup.start("dsq", tmp_path / "file", 1)
