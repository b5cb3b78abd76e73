"""torchtitan's optimizers, schedulers and dataloaders on real ranks, saved and loaded by our manager."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.packages import needs
from tests.helpers.processes import ROOT, torchrun

pytestmark = [pytest.mark.slow, needs("torchtitan", "tyro")]
WORKERS = Path(__file__).parent / "workers"


def test_ranks(tmp_path: Path) -> None:
    """All checks of one number of ranks share a launch; `workers/ranks.py` has them."""
    torchrun("ranks", 2, tmp_path, workers=WORKERS)
    torchrun("ranks", 1, tmp_path, workers=WORKERS)


def test_command_line() -> None:
    import tyro

    from dsq_ckpt.integrations.torchtitan import DSQCheckpointManager

    arguments = ["--enable", "--interval", "7", "--async-mode", "async", "--compression", "exact", "--no-pinned"]
    config = tyro.cli(DSQCheckpointManager.Config, args=arguments)
    assert (config.interval, config.async_mode, config.compression, config.pinned) == (7, "async", "exact", False)
    assert config._owner is DSQCheckpointManager
    assert config.to_dict()["compression"] == "exact"


def test_the_line_of_the_page() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "torchtitan.md").read_text(), re.S)
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    config = namespace["checkpoint"]
    assert config.enable and config.async_mode == "async" and config.compression == "default" and config.pinned
