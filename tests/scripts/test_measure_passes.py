"""Passes of a save are told by the functions that do them, and add up to what a save takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import measure_passes
import pytest

import dsq_ckpt
from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.storage.checkpoint import Checkpoint


def test_the_functions_that_passes_are_told_by_exist() -> None:
    named = [part for parts in measure_passes.PASSES.values() for part in parts if not part.startswith("~")]
    assert len(named) > 20
    for part in named:
        file, _, function = part.partition(":")
        path = measure_passes.PACKAGE / file
        assert path.exists(), part
        assert not function or f"def {function}(" in path.read_text(), part


@pytest.mark.usefixtures("one_thread")
def test_passes_are_parts_of_the_whole(tmp_path: Path) -> None:
    with patch.object(StorageConfig, "thread_count", return_value=1):
        rows = measure_passes.measure(320_000, True, 1, tmp_path)
    works = {row["work"] for row in rows}
    assert works == {f"{what} of a {which}" for what in ("save", "load") for which in ("keyframe", "delta")}
    for work, passes in (("save of a delta", {"sketches", "codes and their refinement", "entropy coding", "checksums"}),
                         ("load of a delta", {"values", "entropy coding", "files"})):
        times = {row["pass"]: row["ns"] for row in rows if row["work"] == work}
        assert passes <= {name for name, ns in times.items() if ns > 0}, work
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.*is loaded from its base layer alone")
def test_the_last_of_several_deltas_is_measured(tmp_path: Path) -> None:
    saved: list[str] = []
    loaded: list[str] = []

    def note(state: Any, path: Path, **arguments: Any) -> None:
        saved.append(path.name)
        save(state, path, **arguments)

    def note_load(into: Any, path: Path, **arguments: Any) -> None:
        loaded.append(path.name)
        assert Checkpoint(path).manifest.depth == int(path.name)
        load(into, path, **arguments)

    save, load = dsq_ckpt.save, dsq_ckpt.load
    with patch.object(StorageConfig, "thread_count", return_value=1), \
            patch.object(dsq_ckpt, "save", note), patch.object(dsq_ckpt, "load", note_load):
        rows = measure_passes.measure(100_000, False, 1, tmp_path, deltas=3)
    assert saved == ["0", "1", "2", "3"] * 3
    assert loaded == ["0", "3"] * 3
    assert {row["work"] for row in rows} == {
        f"{what} of a {which}" for what in ("save", "load") for which in ("keyframe", "delta")}


def test_time_outside_passes_is_the_rest() -> None:
    assert measure_passes.pass_of("/usr/lib/python3/json/decoder.py", "decode") == measure_passes.REST
    assert measure_passes.pass_of("~", "<built-in method builtins.len>") == measure_passes.REST
    assert measure_passes.pass_of("~", "<method 'write' of '_io.BufferedWriter' objects>") == "files"
