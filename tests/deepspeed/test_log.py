"""Gradient logs of DeepSpeed engines: what the worker checks is written in its docstrings."""

from __future__ import annotations

import re

import pytest

from tests.helpers.deepspeed_processes import ON_CPU, WORKERS, ranks
from tests.helpers.packages import needs
from tests.helpers.processes import torchrun

pytestmark = [pytest.mark.slow, needs("deepspeed")]


def test_killed_and_recovered(tmp_path):
    output = torchrun("logged", 2, tmp_path, "record", dies=True, workers=WORKERS, **ON_CPU)
    assert "now everything is killed" in output, output[-8000:]
    assert output.count("[ok]") == 20
    output = ranks("logged", 2, tmp_path, "recover")
    sizes = re.findall(r"\[ok\] (.*): ([\d.]+) bytes per parameter and step, (\w+)", output)
    print(*map(" ".join, sizes), sep="\n")
    assert len(sizes) == 9
    assert output.count("[ok]") == 55
    assert ranks("logged", 1, tmp_path, "refuse").count("[ok]") == 3
