"""Choice of the path that passes over the data take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import dsq_ckpt
from dsq_ckpt import native
from dsq_ckpt.errors import ConfigError

PATHS = native.available()


@pytest.fixture(autouse=True)
def _path():
    yield
    native.force(None)


def test_a_path_is_chosen_by_name(monkeypatch):
    for name in PATHS:
        native.force(name)
        assert native.path() == name
    native.force(None)
    assert native.path() == os.environ.get(native.VARIABLE, PATHS[-1])
    monkeypatch.setenv(native.VARIABLE, "numba")
    native.force(None)
    assert native.path() == "numba"
    with pytest.raises(ConfigError):
        native.force("mmx")
    assert native.path() == "numba"


def test_a_path_that_does_not_exist_is_refused_before_a_file_is_read(tmp_path):
    """Later its error would be taken for one of the file."""
    dsq_ckpt.save({"weight": torch.zeros(3)}, tmp_path / "0")
    ran = subprocess.run(
        [sys.executable, "-m", "dsq_ckpt.cli", "verify", str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, native.VARIABLE: "mmx"},
    )
    assert ran.returncode != 0 and "Traceback" not in ran.stderr
    assert "DSQ_CODER asks for the coder's path 'mmx', expected one of" in " ".join(ran.stderr.split())
    assert "damaged" not in ran.stdout + ran.stderr


def test_a_library_of_other_sources_is_not_used(monkeypatch, caplog):
    """A warning of one line says so; without a library there is none."""
    if len(PATHS) == 1:
        pytest.skip("there is no compiled library")
    monkeypatch.setattr(native, "_hash_sources", lambda: "another")
    native.library.cache_clear()
    try:
        assert native.available() == native.available() == ("numba",)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "built from other sources" in caplog.text and "pip install -e ." in caplog.text
        caplog.clear()
        monkeypatch.setattr(native, "EXTENSION_SUFFIXES", [])
        native.library.cache_clear()
        assert native.available() == ("numba",) and not caplog.records
    finally:
        native.library.cache_clear()
