"""A fixture that forces a path of the compiled code; after each test the package chooses again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsq_ckpt import native


@pytest.fixture(params=native.PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path in turn, forced."""
    known = native.available()
    if request.param not in known:
        pytest.skip(f"this machine has only {known}: no compiled library, or a processor without {request.param}")
    native.force(request.param)
    yield request.param
    native.force(None)
