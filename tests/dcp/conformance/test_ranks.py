"""Several ranks, as real processes; the cases are in the worker."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun


@pytest.mark.slow
def test_ranks(tmp_path):
    output = torchrun("conformance", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 4, output
