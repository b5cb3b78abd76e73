"""Removal of the oldest of the checkpoints that Accelerate names itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.packages import needs

pytestmark = needs("accelerate")


def test_a_removal_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsq_ckpt.integrations import accelerate

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    paths = [tmp_path / f"checkpoint_{number}" for number in (1, 2)]
    for path in paths:
        path.mkdir()
        (path / "manifest.json").touch()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            accelerate._remove_checkpoint(paths[0])
    assert accelerate._list_numbered_checkpoints(tmp_path) == [paths[1]]
    (tmp_path / "checkpoint_3").symlink_to(paths[1])
    accelerate._remove_checkpoint(tmp_path / "checkpoint_3")
    assert paths[1].exists(), "where a link leads is not the run's"
    accelerate._remove_checkpoint(paths[1])
    assert not paths[1].exists()
