"""The benchmark for GPUs runs on machines without one, and never passes what it finds there for a measurement."""

import json

import pytest

from tests.helpers.processes import ROOT, run


def test_a_trial_run_says_that_it_is_none(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "gpu.json"
    small = ["--parameters", "70000", "--elements", "40000", "--repeats", "1", "--saves", "1", "--chunks", "3"]
    small += ["--width", "64"]
    script = str(ROOT / "scripts" / "bench_gpu.py")
    status, output = run([script, "--device", "cpu", *small, "--json", str(path)], forked=True, TRITON_INTERPRET="1")
    assert status == 0, output
    document = json.loads(path.read_text())
    assert document["measured"].startswith("nothing") and "nothing: a trial run" in output
    assert {"sketch, fp32", "quantize, joint table, fp32", "stall / copy to pinned memory"} <= document["rows"].keys()
    assert {"sketch, µs for each of 3 small chunks", "stall, µs per tensor, 3 small chunks"} <= document["rows"].keys()
    assert {"stall, s, a transformer", "stall, µs per tensor"} <= document["rows"].keys()
    assert all(row["min"] <= row["median"] <= row["max"] for row in document["rows"].values())
