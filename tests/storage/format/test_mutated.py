"""One thing changed in a checkpoint, at random: an error of ours that names a file, or nothing is lost."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.cli import app, verify_command
from dsq_ckpt.storage import files
from tests.helpers import mutated_checkpoints as mutations
from tests.helpers.mutated_checkpoints import Original

SEED = 20261
MEMORY = 400 << 10
"""KiB that reading files of a few KiB may take."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return mutations.small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is removing what lacks a file here, which is waited for."""
    for module in (files, verify_command):
        monkeypatch.setattr(module, "REMOVAL_TIMEOUT", 0.01)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.campaign)])
def test_accidents(original: Original, tmp_path: Path, count: int) -> None:
    """Damage that checksums were not told of gives the same values or an error, never others."""
    rng = random.Random(SEED)
    for number in range(count):
        told, path = mutations.changed(original, tmp_path / "x", mutations.accident, rng)
        kind, error = mutations.outcome(original, path)
        assert kind in ("same", "refused"), (SEED, number, told, error)


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.campaign)])
def test_forgeries(original: Original, tmp_path: Path, count: int) -> None:
    """What says something else, with checksums that fit, may give other values; nothing worse, and no large memory."""
    rng = random.Random(SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        told, path = mutations.changed(original, tmp_path / "x", mutations.forgery, rng)
        kind, error = mutations.outcome(original, path)
        assert kind != "crashed", (SEED, number, told, error)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + MEMORY, (SEED, number, told)


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.campaign)])
def test_commands(original: Original, tmp_path: Path, count: int) -> None:
    """`dsq` ends in tables or one line, whatever it is given."""
    rng = random.Random(SEED)
    for number in range(count):
        change = rng.choice([mutations.accident, mutations.forgery])
        told, path = mutations.changed(original, tmp_path / "x", change, rng)
        kind, error = mutations.commands(path)
        assert kind == "same", (SEED, number, told, error)


def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    name = "w\x1b[31m\u202e\x9b2J"
    state = {name: torch.randn(80, 80), "\x07": torch.ones(3)}
    dsq_ckpt.save(state, tmp_path / "run\x1b[5m" / "a", no_dist=True)
    for command in (["inspect", "--tensors"], ["verify"]):
        result = CliRunner().invoke(app, [*command, str(tmp_path / "run\x1b[5m" / "a")])
        assert result.exit_code == 0, result.output
        assert not set("\x1b\u202e\x9b\x07") & set(result.output)
    assert "\\x1b[31m" in CliRunner().invoke(app, ["inspect", "--tensors", str(tmp_path / "run\x1b[5m" / "a")]).output
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "\x1b[5m")])
    assert result.exit_code == 1 and "\x1b" not in result.output and "\\x1b" in result.output
