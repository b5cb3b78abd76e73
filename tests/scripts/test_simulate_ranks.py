"""The simulation saves what real ranks would, and counts what they move."""

from __future__ import annotations

import pytest
import simulate_ranks

from dsq_ckpt.storage.manifest import Manifest


@pytest.mark.usefixtures("one_thread")
def test_cached_plans_are_not_sent_again(tmp_path):
    ranks = 8
    for ours in (False, True):
        run = tmp_path / str(ours)
        planned, cached = simulate_ranks.measure(ranks, 12, ours, 2, run)
        assert planned["save"] == "planned" and cached["save"] == "cached"
        assert cached["bytes"]["plans gathered"] < planned["bytes"]["plans gathered"] / 5
        assert cached["planner_seconds"] < planned["planner_seconds"]
        if ours:  # collectives within a save are counted too
            summed = [save["bytes"]["sketches summed, each rank"] for save in (planned, cached)]
            assert min(summed) > 2 << 10 and max(summed) < 1 << 20  # tables of groups without their empty columns
            assert cached["bytes"]["small gathers, each rank"] >= ranks << 12
    assert [Manifest.read(run / name).depth for name in ("000", "001")] == [0, 1]
    assert Manifest.read(run / "001").ranks == ranks
