"""What all tests share."""

from __future__ import annotations

import pytest

import dsq_ckpt


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests():
    """The chains a process remembers are module-level; every test starts without any."""
    dsq_ckpt.forget()
    yield
    dsq_ckpt.forget()
