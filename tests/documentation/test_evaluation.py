"""docs/evaluation.md is a page to look at: short, with a picture, and with figures of the pages that it links."""

from __future__ import annotations

import re

import pytest

from tests.helpers.processes import ROOT

DOCS = ROOT / "docs"
OVERVIEW = (DOCS / "evaluation.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in OVERVIEW.split("\n## ")[1:]}
QUESTIONS = [title for title, text in SECTIONS.items() if "\nDetails: [" in text or " Details: [" in text]


def figures(text: str) -> set[str]:
    """Return the numbers of a text, without links, signs and units."""
    return set(re.findall(r"(?<![\w.])\d(?:[\d,.]*\d)?", re.sub(r"\]\([^)]*\)", "]", text)))


def linked(text: str) -> str:
    """Return all pages of details that a section links."""
    return "".join((DOCS / page).read_text() for page in set(re.findall(r"\((evaluation/[\w-]+\.md)", text)))


def test_it_begins_with_a_picture_and_is_short() -> None:
    assert re.match(r"# Evaluation\n\n!\[[^\]]+\]\(overview\.png\)\n", OVERVIEW)
    assert len(OVERVIEW.split()) <= 2500


def test_it_leads_to_every_page_of_details() -> None:
    pages = {page.name for page in (DOCS / "evaluation").glob("*.md")}
    assert pages == set(re.findall(r"\(evaluation/([\w-]+\.md)", OVERVIEW))


@pytest.mark.parametrize("title", QUESTIONS)
def test_an_answer_is_a_table_and_the_command_that_makes_it(title: str) -> None:
    """Each with a table of at most eleven rows and, in all of its cells, figures of the details."""
    table = re.findall(r"^\|.*$", SECTIONS[title], re.M)
    assert 3 <= len(table) <= 13
    assert re.search(r"(python scripts/|dsq )\w[^\n]* --json ", SECTIONS[title])
    assert not figures("\n".join(table)) - figures(linked(SECTIONS[title]))


def test_there_are_many_answers() -> None:
    assert len(QUESTIONS) >= 9


def test_results_that_are_compared_with_aims_are_those_of_the_details() -> None:
    rows = re.findall(r"^\|.*$", SECTIONS["Aims and results"], re.M)[2:]
    assert len(rows) >= 10
    for row in rows:
        _, measured, _, where = row.strip("| ").split(" | ")
        assert not figures(measured) - figures(linked(where)), row
