"""A few of the kills of `kills.py`, which does as many as it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import processes


@pytest.mark.slow
def test_kills():
    status, output = processes.run([str(Path(__file__).with_name("kills.py")), "--trials", "6"])
    print(output)
    assert status == 0, output[-8000:]
