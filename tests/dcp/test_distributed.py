"""Several ranks, as real processes: what each worker checks is written in its docstring."""

from __future__ import annotations

import pytest

from tests.helpers import forks
from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def checks(output: str) -> int:
    return output.count("\nok ") + output.startswith("ok ")


def test_fsdp_on_other_numbers_of_ranks(tmp_path):
    run = tmp_path / "run"
    assert checks(torchrun("fsdp", 2, run, "save")) == 2
    for ranks in (1, 2, 3):
        assert checks(torchrun("fsdp", ranks, run, "load")) == 2


def test_ranks_agree_about_what_is_frozen(tmp_path):
    assert checks(torchrun("frozen", 2, tmp_path)) == 7


def test_an_evaluation_before_the_state_is_set(tmp_path):
    assert checks(torchrun("evaluated", 2, tmp_path)) == 4


def test_optimizer_states_are_restored(tmp_path):
    assert checks(torchrun("optimizer_state", 2, tmp_path)) == 16


def test_placements_and_groups(tmp_path):
    assert checks(torchrun("layouts", 3, tmp_path)) == 12


def test_async(tmp_path):
    assert checks(torchrun("background", 2, tmp_path, **{forks.TEARDOWN: "1"})) == 11


def test_planners(tmp_path):
    assert checks(torchrun("planners", 2, tmp_path)) == 8


def test_a_plan_that_one_rank_cannot_finish(tmp_path):
    assert checks(torchrun("unfinished", 2, tmp_path)) == 10


def test_a_background_process_dies(tmp_path):
    assert checks(torchrun("revived", 2, tmp_path)) == 4


def test_faults(tmp_path):
    assert checks(torchrun("faults", 3, tmp_path)) == 9


def test_memory_that_is_short_on_one_rank(tmp_path):
    assert checks(torchrun("exhausted", 3, tmp_path, "one")) == 9


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_that_is_short_on_either_rank(tmp_path, ranks):
    assert checks(torchrun("exhausted", ranks, tmp_path, "each")) == 9


def test_a_disk_that_is_full_on_one_rank(tmp_path):
    assert checks(torchrun("full_disk", 2, tmp_path)) == 7


def test_damaged_ancestors(tmp_path):
    assert checks(torchrun("ancestors", 2, tmp_path)) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_signals(tmp_path, ranks):
    assert checks(torchrun("interrupted", ranks, tmp_path)) == 4 + ranks


@pytest.mark.parametrize("moment", ["writing", "committing"])
def test_a_rank_dies(tmp_path, moment):
    output = torchrun("dies", 2, tmp_path, moment, dies=True)
    assert checks(output) == 1
    assert checks(torchrun("dies", 2, tmp_path, "again")) == 1


def test_arguments_that_differ_by_rank(tmp_path):
    assert checks(torchrun("terms", 3, tmp_path)) == 4
