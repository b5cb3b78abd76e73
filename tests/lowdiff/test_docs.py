"""The examples of docs/lowdiff.md run as they stand, twice: the second time they go on from the first."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.processes import ROOT

TEXT = (ROOT / "docs" / "lowdiff.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def _names() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def train_on_a_batch(model: Callable[..., torch.Tensor]) -> None:
        optimizer.zero_grad()
        tokens = torch.arange(100)
        nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 100).backward()

    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train_on_a_batch": train_on_a_batch}


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples(number: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(EXAMPLES[number], f"docs/lowdiff.md example {number}", "exec")
    first = _names()
    exec(code, first)
    again = _names()
    exec(code, again)
    assert again["recovered"].step == 30 and again["recovered"].exact and again["recovered"].closed
    for one, other in zip(first["model"].parameters(), again["model"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_files_are_all_named() -> None:
    """docs/design/gradient-logs.md names every file of the package's folder."""
    design = (ROOT / "docs" / "design" / "gradient-logs.md").read_text()
    for path in (ROOT / "dsq_ckpt" / "lowdiff").glob("[a-z]*.py"):
        assert f"`{path.name}`" in design, path.name
