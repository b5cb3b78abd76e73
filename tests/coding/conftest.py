"""Fixtures that force a path of the coder; after each test the package chooses again."""

from __future__ import annotations

import pytest

from dsq_ckpt.coding import _native


@pytest.fixture(autouse=True)
def _path():
    yield
    _native.force(None)


@pytest.fixture(params=_native.PATHS)
def path(request):
    """Every path of the coder in turn, forced."""
    known = _native.available()
    if request.param not in known:
        pytest.skip(f"this machine has only {known}: no compiled library, or a processor without {request.param}")
    _native.force(request.param)
    return request.param
