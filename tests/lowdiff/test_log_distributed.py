"""Logs under DDP: each rank writes its share, and all of them decide together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import torchrun

WORKERS = Path(__file__).parent / "workers"
TWO = (
    "topk", "topk_of_images", "fp16", "bf16", "kmeans", "nothing", "power_sgd", "fp16_hook", "on_from_a_snapshot",
    "one_process_dies", "a_share_is_lost", "an_edit_in_the_last_step", "an_edit_in_the_last_step_of_a_rank_that_fails",
    "parameters_are_added",
)
THREE = (
    "topk", "topk_of_images", "kmeans", "fp16", "power_sgd", "one_process_dies", "an_edit_in_the_last_step",
    "an_edit_in_the_last_step_of_a_rank_that_fails", "parameters_are_added",
)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "checks"), [(2, TWO), (3, THREE)])
def test_every_step_and_fault(tmp_path, ranks, checks):
    output = torchrun("logged", ranks, tmp_path, *checks, workers=WORKERS)
    print(output)
    assert [line.split()[1] for line in output.splitlines() if line.startswith("[ok]")] == list(checks)
