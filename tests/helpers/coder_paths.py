"""A fixture that forces a path of the compiled code; after each test the package chooses again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsq_ckpt.coding import _native


@pytest.fixture(params=_native.PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path in turn, forced."""
    known = _native.available()
    if request.param not in known:
        pytest.skip(f"this machine has only {known}: no compiled library, or a processor without {request.param}")
    _native.force(request.param)
    yield request.param
    _native.force(None)
