"""Fixtures of paths of the coder; after each test the package chooses again."""

from __future__ import annotations

import pytest

from dsq_ckpt import native
from tests.helpers.coder_paths import path as path


@pytest.fixture(autouse=True)
def _path():
    yield
    native.force(None)
