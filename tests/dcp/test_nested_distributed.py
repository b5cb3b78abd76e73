"""Nested states of several ranks, and what is refused before work is done; the checks are in the worker."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def test_ranks_with_different_states(tmp_path):
    output = torchrun("nested", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 8, output


def test_random_states_are_found_on_more_ranks(tmp_path):
    """A load finds the states of all ranks that there were; a placeholder of another is refused on all ranks."""
    assert "ok saved" in torchrun("random_states", 2, tmp_path)
    assert "ok loaded on more ranks" in torchrun("random_states", 3, tmp_path)
