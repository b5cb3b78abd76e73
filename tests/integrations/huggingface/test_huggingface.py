"""Hugging Face's Trainer and Accelerate, in real processes: one launch of one process, one of two ranks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers.deepspeed_processes import ON_CPU
from tests.helpers.packages import needs
from tests.helpers.processes import run, torchrun

pytestmark = [pytest.mark.slow(3), needs("transformers", "accelerate")]
WORKERS = Path(__file__).parent / "workers"


def scenarios(worker: str) -> list[str]:
    """Names of the functions that a worker runs."""
    calls = [
        node for node in ast.walk(ast.parse((WORKERS / f"{worker}.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run"
    ]
    (listed,) = (call.args[0] for call in calls)
    assert isinstance(listed, ast.List)
    return [name.id for name in listed.elts if isinstance(name, ast.Name)]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of one process, and the directory that it wrote to."""
    directory = tmp_path_factory.mktemp("single")
    status, output = run([str(WORKERS / "single.py"), str(directory)], forked=True, **ON_CPU)
    assert status == 0, output[-8000:]
    return output, directory


@pytest.fixture(scope="module")
def ranks(single: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of two ranks."""
    return torchrun("ranks", 2, tmp_path_factory.mktemp("ranks"), single[1], workers=WORKERS, **ON_CPU)


@pytest.mark.parametrize("name", scenarios("single"))
def test_one_process(name: str, single: tuple[str, Path]) -> None:
    assert f"ok {name}\n" in single[0], single[0][-8000:]


@pytest.mark.parametrize("name", scenarios("ranks"))
def test_two_ranks(name: str, ranks: str) -> None:
    assert f"ok {name}\n" in ranks, ranks[-8000:]
