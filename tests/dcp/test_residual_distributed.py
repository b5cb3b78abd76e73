"""Chains of differences on several ranks: what the worker checks is written in its docstrings."""

from __future__ import annotations

import pytest

from tests.processes import torchrun


@pytest.mark.slow
def test_differences(tmp_path):
    assert torchrun("residual", 2, tmp_path, "save", timeout=200).count("ok ") == 5
    for ranks in (1, 3):
        assert torchrun("residual", ranks, tmp_path, "load").count("ok ") == 1
