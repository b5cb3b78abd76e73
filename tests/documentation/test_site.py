"""`make docs` builds the site without a warning, and what it builds needs no network."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, run

DOCS = ROOT / "docs"
PUBLIC = ("dsq_ckpt", "dsq_ckpt.lowdiff", "dsq_ckpt.deepspeed", "dsq_ckpt.integrations.lightning", "dsq_ckpt.mpi")


def pages() -> list[Path]:
    """Return the pages of the site, relative to their folder."""
    paths = [page.relative_to(DOCS) for page in DOCS.rglob("*.md")]
    return [path for path in paths if path.parts[0] != "_build"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with the options of `make docs`."""
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module)
    importlib.import_module("matplotlib.font_manager")  # logs once per machine that it lists the fonts
    makefile = (ROOT / "Makefile").read_text()
    options = re.search(r"-m sphinx (.*) docs docs/_build", makefile)
    assert options is not None
    target = tmp_path_factory.mktemp("site")
    status, output = run(
        ["-m", "sphinx", *options[1].split(), "--doctree-dir", str(target / "doctrees"), str(DOCS),
         str(target / "html")],
        forked=True,
    )
    assert status == 0, output[-6000:]
    assert output == ""
    return target / "html"


def test_it_has_every_page_and_public_name(site: Path) -> None:
    for page in pages():
        assert (site / page).with_suffix(".html").exists(), page
    reference = (site / "api.html").read_text()
    for module in PUBLIC:
        for name in set(importlib.import_module(module).__all__) - {"__version__"}:
            assert f'id="{module}.{name}"' in reference, f"docs/api.md lacks {module}.{name}"
    for name in ("codebooks.register_codebook", "codebooks.CodebookConfig", "config.systems.register_system"):
        assert f'id="dsq_ckpt.{name}"' in reference, f"docs/api.md lacks dsq_ckpt.{name}"


def test_it_loads_nothing_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"https?:[^\"]*", text), page.name
        assert not re.findall(r"<link[^>]*\shref=\"https?:[^\"]*", text), page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?https?:", sheet.read_text()), sheet.name


def test_links_between_files_of_the_repository_lead_somewhere() -> None:
    """Also of pages that the site does not have, such as README."""
    for page in [*ROOT.glob("*.md"), ROOT / "benchmarks" / "results" / "README.md", *(DOCS / page for page in pages())]:
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def anchors(page: Path, marks: str = "#+") -> set[str]:
    """Return the anchors of a page's headings with these marks, as MyST and git hosting sites name them."""
    headings = re.findall(rf"^{marks} (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = re.findall(r"^([a-z_/-]+)$", (DOCS / "index.md").read_text(), re.M)
    assert {page.with_suffix("").as_posix() for page in pages()} - {"index", "cli_options"} <= set(listed)
