"""Parameter groups of ranks with other parameters each; the checks are in the worker."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def test_ranks_with_parameters_of_their_own(tmp_path):
    """A load of the same ranks refused checkpoints that were saved without a warning."""
    output = torchrun("groups", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 8, output
