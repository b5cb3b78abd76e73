"""docs/papers.md names files and functions that exist."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.helpers.processes import ROOT

PAGE = (ROOT / "docs" / "papers.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/.-]+\.(?:py|json))(?:::([\w.]+))?`", PAGE)))


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """Top-level functions, classes and constants of a file, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


def test_the_page_names_many() -> None:
    assert len(NAMED) > 80


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_it_exists(path: str, name: str) -> None:
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
