"""`Compressor` under DDP and FSDP2, as real processes: what is checked is written in the worker."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def test_ranks_choose_together(tmp_path):
    output = torchrun("compressor", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 13, output
