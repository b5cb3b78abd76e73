"""Files of measurements have one row of a table per line, and say the same as any other JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsq_ckpt.cli import json_files
from tests.helpers.processes import ROOT

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=30
)


@given(st.dictionaries(st.text(), TREES, max_size=5))
def test_files_read_back_as_written(document: dict[str, object]) -> None:
    assert json.dumps(json.loads(json_files.dumps(document))) == json.dumps(document)


def test_one_row_per_line() -> None:
    rows = [{"system": "dsq", "step": step, "losses": [0.5] * 30} for step in range(3)]
    text = json_files.dumps({"measured": "x", "rows": rows, "settings": {"seed": 0}})
    assert text.splitlines() == [
        "{", ' "measured": "x",', ' "rows": [',
        *(f"  {json.dumps(row)}{',' * (row != rows[-1])}" for row in rows),
        " ],", ' "settings": {"seed": 0}', "}",
    ]


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    json_files.write(tmp_path / "new" / "x.json", {"a": math.nan, "b": [math.inf, 1.5]})
    assert json.loads((tmp_path / "new" / "x.json").read_text()) == {"a": None, "b": [None, 1.5]}
    with pytest.raises(TypeError):
        json_files.write(tmp_path / "new" / "x.json", {"a": object()})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.json"]  # the file of before, and nothing beside


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_are_kept_so(path: Path) -> None:
    text = path.read_text()
    assert text == json_files.dumps(json.loads(text))
