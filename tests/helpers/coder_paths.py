"""Fixtures that force a path of the compiled code; after each test the package chooses again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsq_ckpt import native


def _forced(name: str) -> Iterator[str]:
    known = native.available()
    if name not in known:
        pytest.skip(f"this machine has only {known}: no compiled library, or a processor without {name}")
    native.force(name)
    yield name
    native.force(None)


@pytest.fixture(params=native.PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path in turn, forced."""
    yield from _forced(request.param)


@pytest.fixture(params=native.PATHS[1:])
def compiled_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path in C in turn, forced."""
    yield from _forced(request.param)


def by_numba_and(path: str, work: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what a function returns on Numba's path, and on another one, which then stays."""
    native.force("numba")
    expected = work()
    native.force(path)
    return expected, work()
