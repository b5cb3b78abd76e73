"""One fixture: every backend there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.kernels.subjects import NAMES, Subject, subject_of


@pytest.fixture(params=NAMES)
def subject(request, monkeypatch) -> Iterator[Subject]:
    """NumPy, Numba, C, and Triton with its own tiles and with tiny ones."""
    with np.errstate(all="ignore"):  # of the interpreter
        yield subject_of(request.param, monkeypatch)
