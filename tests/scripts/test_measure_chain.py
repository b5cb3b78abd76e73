"""What the bytes of a run were spent on adds up to the bytes that it keeps."""

from __future__ import annotations

import measure_chain
import pytest

from tests.helpers.small_run import small_run


@pytest.mark.usefixtures("one_thread")
def test_every_byte_has_a_cause(tmp_path):
    fine = {"fit": "update", "step": 0.25}  # else all codes of first moments are 0
    small_run(tmp_path / "run", quantize={"exp_avg": {"codebook": fine}})
    causes = measure_chain.spent(tmp_path / "run")
    assert sum(causes.values()) == measure_chain.on_device(tmp_path / "run") and min(causes.values()) > 0
    assert {"weights, not quantized", "exp_avg, not quantized", "manifests", "objects"} < set(causes)
