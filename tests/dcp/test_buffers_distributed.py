"""Statistics of each rank under DDP, of which a checkpoint has those of rank 0; modules with code of their own."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def test_all_buffers_are_of_one_rank(tmp_path):
    """By every way of saving; of DCP's plans, those of one layer were another rank's than those of the next."""
    output = torchrun("buffers", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 11, output


def test_modules_are_given_state_that_they_do_not_tell_yet_on_all_ranks(tmp_path):
    """Sharded by FSDP2; with other layers on each rank, those of others stay theirs, and what none takes is told."""
    output = torchrun("own_code", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 2, output
