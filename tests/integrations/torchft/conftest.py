"""A transport of each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsq_ckpt.integrations.torchft import DSQTransport
from tests.integrations.torchft.common import PATIENCE


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[DSQTransport[Any]]:
    dsq_transport = DSQTransport[Any](PATIENCE, directory=tmp_path)
    yield dsq_transport
    dsq_transport.shutdown()
    assert os.listdir(tmp_path) == [], "nothing is left"
