"""docs/design.md is an overview that leads to all sections of its pages, and these name code that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documentation.test_site import anchors
from tests.helpers.processes import ROOT

OVERVIEW = (ROOT / "docs" / "design.md").read_text()
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
FOLDERS = ("", "dsq_ckpt/", "dsq_ckpt/lowdiff/")
"""Folders that paths of the pages are in."""


def test_the_overview_is_short() -> None:
    assert len(OVERVIEW.split()) <= 3000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_leads_to_every_section(page: Path) -> None:
    links = set(re.findall(rf"\(design/{page.name}#([^)]+)\)", OVERVIEW))
    assert links == anchors(page, "##")


@pytest.mark.parametrize("page", [ROOT / "docs" / "design.md", *PAGES], ids=lambda page: page.stem)
def test_the_files_that_it_names_exist(page: Path) -> None:
    for name in re.findall(r"`([\w./]+\.(?:py|c))`", page.read_text()):
        assert any((ROOT / folder / name).is_file() for folder in FOLDERS), name
