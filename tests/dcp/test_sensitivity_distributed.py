"""Average gradients on several ranks, as real processes: what is checked is written in the worker."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def test_every_rank_averages_its_part():
    output = torchrun("gradients", 2)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 10, output
