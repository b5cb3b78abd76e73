"""benchmarks/results/README.md leads from each figure to its file and key, and gives the value that is there."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.processes import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (RESULTS / "README.md").read_text()
FIGURES = re.findall(r"^\|(.*?)\| ([^|]*?\d[^|]*?) \| ([\w-]+\.json) \| (.+) \|$", PAGE, re.M)
COUNTS = re.compile(
    r"\b(\d[\d.]* to )?\d[\d.]* ?M\b|torch [\d.]+\b"
    r"|(?<![\d.])\d[\d,]* ?(runs|restarts|steps|checkpoints|restores|deltas|shared cores)\b"
)
"""Sizes of models, versions and settings, which are not measured."""
OVER: dict[str, Callable[[list[Any]], Any]] = {
    "mean": statistics.fmean, "median": statistics.median, "min": min, "max": max,
}


@functools.cache
def document(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def values(tree: Any, path: str) -> list[Any]:
    """Return all values at a path: keys, each with a selection of rows where it has one."""
    nodes = [tree]
    for part in path.split(" > "):
        key, _, selection = part.removesuffix("]").partition("[")
        nodes = [tree[key] for tree in nodes]
        rows = [row for node in nodes for row in (node if isinstance(node, list) else [node])]
        wanted = [condition.split("=") for condition in re.split(r", (?=\w+=)", selection)] if selection else []
        nodes = [row for row in rows if all(str(row[key]) == value for key, value in wanted)]
    return nodes


def figure(file: str, path: str) -> float:
    name, _, rest = path.partition(" of ")
    if name in OVER:
        return float(OVER[name](values(document(file), rest)))
    path, _, divisor = path.partition(" ÷ ")
    if divisor:
        rows, _, _ = path.rpartition(" > ")
        return figure(file, path) / figure(file, f"{rows} > {divisor}")
    matches = values(document(file), path)
    assert len(matches) == 1, f"{file}: {len(matches)} values at {path}"
    return float(matches[0])


@pytest.mark.parametrize(("name", "shown", "file", "path"), FIGURES, ids=lambda text: text[:40])
def test_every_figure_is_in_its_file(name: str, shown: str, file: str, path: str) -> None:
    number, unit = re.fullmatch(r"([+-]?[\d.,]+)(x| %| MB|)", shown).groups()  # type: ignore[union-attr]
    scale = {"x": 1, " %": 100, " MB": 1e-6, "": 1}[unit]
    places = len(number.partition(".")[2])
    assert abs(figure(file, path) * scale - float(number.replace(",", ""))) <= 0.5001 * 10**-places, (name, path)


def test_the_table_of_readme_has_these_values() -> None:
    """Every number in its column of measurements, of others, and of the list below it is the value of some figure."""
    readme = (ROOT / "README.md").read_text()
    text, _, _ = readme.partition("| what | `dsq_ckpt` |")[2].partition("Beyond the table:")
    table, _, notes = text.partition("\n\n")
    known = {re.sub(r"[^\d.,]", "", shown) for _, shown, _, _ in FIGURES}
    known |= set(re.findall(r"\d[\d.]*", PAGE.partition("## Figures without a file")[2]))
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert 5 <= len(rows) <= 8
    for row in rows:
        assert len(row) == 3, row
    for line in [*(" ".join(row[1:]) for row in rows), *notes.splitlines()]:
        without_units = COUNTS.sub("", line)
        for number in re.findall(r"(?<![\w.-])[+-]?(\d[\d.,]*\d|\d)", without_units):
            assert number in known, (number, line)


def test_sizes_of_the_six_models_are_those_of_their_runs() -> None:
    sizes = [size / 1e6 for size in values(document("online-frequent.json"), "rows > settings > run > parameters")]
    pages = [ROOT / "README.md", ROOT / "docs" / "limits.md", ROOT / "docs" / "evaluation" / "restarts.md"]
    for page in pages:
        assert f"{min(sizes):.1f} to {max(sizes):.1f} M" in page.read_text(), page.name


def test_every_file_is_in_the_list() -> None:
    page = PAGE.replace("NAME", r"[\w]+").replace("WORKLOAD", r"\w+").replace("seedN", r"seed\d")
    patterns = re.findall(r"([\w\[\]\\+-]+\.json)", page)
    for path in RESULTS.glob("*.json"):
        assert any(re.fullmatch(pattern.replace(".json", r"\.json"), path.name) for pattern in patterns), path.name


def test_every_file_has_a_command() -> None:
    commands = PAGE.partition("## Commands")[2]
    for path in RESULTS.glob("*.json"):
        listed = path.name in commands or re.sub(r"seed\d", "seedN", path.name) in commands
        assert listed or document(path.name)["command"].startswith("python "), path.name
