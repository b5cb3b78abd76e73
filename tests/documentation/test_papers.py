"""docs/papers.md names files and functions that exist, and its listings run."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, run

PAGE = (ROOT / "docs" / "papers.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/.-]+\.(?:py|json))(?:::([\w.]+))?`", PAGE)))


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """Top-level functions, classes and constants of a file, and methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return frozenset(names)


def test_the_page_names_many() -> None:
    assert len(NAMED) > 80


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_named_files_and_functions_exist(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"docs/papers.md names {path}"
    assert not name or name in names_in(path), f"docs/papers.md names {path}::{name}"


def test_all_parts_of_the_papers_are_there() -> None:
    """Algorithms 1 to 6 and tables of Inshrinkerator, equations 1 to 10 and experiments 1 to 10 of LowDiff."""
    first, _, rest = PAGE.partition("## LC-Checkpoint")
    last = rest.partition("## LowDiff and LowDiff+")[2]
    for number in range(1, 5):
        assert f"Algorithm {number}" in first
    assert "Algorithms 5 and 6" in first
    for number in range(1, 11):
        assert re.search(rf"experiments? (\d and )?{number}\b", last), f"experiment {number}"


LISTINGS = """
import torch
from lightning.pytorch import LightningModule

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = iter(lambda: torch.randn(64, 32), None)
held_out = torch.randn(256, 32)


def loss_of(batch):
    return (model(batch) - batch.roll(1, 1)).square().mean()


@torch.no_grad()
def evaluate():
    return loss_of(held_out).item()


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model

    def training_step(self, batch, batch_idx):
        return loss_of(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def evaluate(self):
        return evaluate()


module, train_loader = Module(), torch.utils.data.DataLoader(torch.randn(640, 32), batch_size=16)
"""
"""What the listings take for given."""


def test_the_listings_run(tmp_path: Path) -> None:
    """They are in order, as they stand; what they saved is searched, and complete."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    after = "\nassert step == 60 and compressor.quality is not None, step\n"
    (tmp_path / "listings.py").write_text("\n".join([LISTINGS, *blocks, after]))
    status, output = run(["listings.py"], directory=tmp_path, forked=True)
    assert status == 0, output[-6000:]
    paths = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("manifest.json"))
    assert paths == ["lightning/step-000020", "lightning/step-000040"] + [f"run/step-0000{n}" for n in (20, 40, 60)]
