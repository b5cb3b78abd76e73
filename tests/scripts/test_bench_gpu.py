"""The benchmark for GPUs runs on machines without one, and never passes what it finds there for a measurement."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_gpu.py"


def test_a_trial_run_says_that_it_is_none(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "gpu.json"
    small = ["--parameters", "70000", "--elements", "40000", "--repeats", "1", "--saves", "1", "--chunks", "3"]
    small += ["--width", "64"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", *small, "--json", str(path)], capture_output=True, text=True,
        timeout=900, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(path.read_text())
    assert made["measured"].startswith("nothing") and "nothing: a trial run" in done.stdout
    assert {"sketch, fp32", "quantize, joint table, fp32", "stall / copy to pinned memory"} <= made["rows"].keys()
    assert {"sketch, µs for each of 3 small chunks", "stall, µs per tensor, 3 small chunks"} <= made["rows"].keys()
    assert {"stall, s, a transformer", "stall, µs per tensor"} <= made["rows"].keys()
    assert all(row["min"] <= row["median"] <= row["max"] for row in made["rows"].values())
