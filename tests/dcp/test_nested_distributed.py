"""Nested states of several ranks, and what is refused before work is done; the checks are in the worker."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def test_ranks_with_different_states(tmp_path):
    output = torchrun("nested", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 8, output
