"""Replicas under DDP, as real processes: what is checked is written in the worker."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun

pytestmark = pytest.mark.slow


def test_replicas(tmp_path):
    output = torchrun("replicas", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 5, output
