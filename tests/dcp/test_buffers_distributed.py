"""Statistics of each rank under DDP: a checkpoint has those of rank 0, as one by `torch.save` has."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def test_all_buffers_are_of_one_rank(tmp_path):
    """By every way of saving; of DCP's plans, those of one layer were another rank's than those of the next."""
    output = torchrun("buffers", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 11, output
