"""DDP and FSDP2 on real ranks: exact resumes, other numbers of ranks and kinds of checkpoints, errors on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.deepspeed_processes import ON_CPU
from tests.helpers.processes import torchrun

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.slow
def test_ranks(tmp_path: Path) -> None:
    """All checks of one number of ranks share a launch; `workers/ranks.py` has them."""
    torchrun("ranks", 2, tmp_path, workers=WORKERS, **ON_CPU)
    torchrun("ranks", 1, tmp_path, workers=WORKERS, **ON_CPU)
