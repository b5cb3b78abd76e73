"""One thing changed in a checkpoint, at random: an error of ours that names a file, or nothing is lost."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest

from tests.format import mutations
from tests.format.mutations import Original

SEED = 20261
MEMORY = 400 << 10
"""KiB that reading files of a few KiB may take."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return mutations.small_run(tmp_path_factory.mktemp("run"))


def test_accidents(original: Original, tmp_path: Path) -> None:
    """Damage that checksums were not told of gives the same values or an error, never others."""
    rng = random.Random(SEED)
    for number in range(150):
        told, path = mutations.changed(original, tmp_path / "x", mutations.accident, rng)
        kind, error = mutations.outcome(original, path)
        assert kind in ("same", "refused"), (SEED, number, told, error)


def test_forgeries(original: Original, tmp_path: Path) -> None:
    """What says something else, with checksums that fit, may give other values; nothing worse, and no large memory."""
    rng = random.Random(SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(300):
        told, path = mutations.changed(original, tmp_path / "x", mutations.forgery, rng)
        kind, error = mutations.outcome(original, path)
        assert kind != "crashed", (SEED, number, told, error)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + MEMORY, (SEED, number, told)
