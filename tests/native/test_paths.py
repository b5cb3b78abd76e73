"""Choice of the path that passes over the data take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.skipif(len(PATHS) == 1 or sys.platform != "linux", reason="there is no compiled ELF library")
@pytest.mark.parametrize("kept", [0, 60, 100, 4096, 20000])
def test_a_library_that_is_cut_off_is_not_used(monkeypatch, caplog, tmp_path, kept):
    """Loading one of which whole pages are missing kills the process, without a word."""
    whole = Path(native.library()._name)
    assert not native._is_cut_off(whole)
    (tmp_path / whole.name).write_bytes(whole.read_bytes()[:kept])
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    native.library.cache_clear()
    try:
        assert native.available() == ("numba",)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert whole.name in caplog.text and ("cut off" in caplog.text or kept in (0, 60))
    finally:
        native.library.cache_clear()


def test_loops_use_no_instructions_that_a_path_does_not_ask_for():
    sources = Path(native.__file__).parent
    asked = (sources / "lanes.c").read_text().partition("int dsq_best_path")[2].partition("\n}")[0]
    known = set(re.findall(r'cpu_supports\("(\w+)"\)', asked))
    loops = (sources / "paths.h").read_text()
    (wide,) = re.findall(r'#define ALL_OF_AVX512 "(.+)"', loops)
    assert set(wide.split(",")) == {name for name in known if name.startswith("avx512")}
    assert set(re.findall(r'target\((.+?)\)', loops)) == {'"avx2"', "ALL_OF_AVX512"}
    code = (sources / "quantize.c").read_text()
    assert set(re.findall(r'target\((.+?)\)', code)) == {'"avx2"', '"avx2,bmi2"', "ALL_OF_AVX512"}
    assert code.count('target("avx2,bmi2")') == 1 and "dsq_fast_bits()" in code  # chosen apart


NO_NUMBA = """
import sys, torch

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numba":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
import dsq_ckpt

dsq_ckpt.save({"weight": torch.randn(400, 300)}, sys.argv[1])
dsq_ckpt.load({"weight": torch.zeros(400, 300)}, sys.argv[1])
"""


def test_what_needs_numba_says_so(tmp_path):
    for path in {"numba", PATHS[-1]}:
        ran = subprocess.run(
            [sys.executable, "-c", NO_NUMBA, str(tmp_path / path)], capture_output=True, text=True,
            env={**os.environ, native.VARIABLE: path},
        )
        if path == "numba":
            assert ran.returncode == 1 and "Numba is missing" in ran.stderr and "pip install numba" in ran.stderr
        else:
            assert ran.returncode == 0, ran.stderr[-3000:]


WITHOUT_NUMBA = """
import sys, torch, dsq_ckpt

def state(number, dtype):
    noise = torch.Generator().manual_seed(number)
    weight = torch.randn(400, 300, generator=torch.Generator().manual_seed(99)) / 20
    weight += torch.randn(400, 300, generator=noise) / 1000
    first = torch.randn(400, 300, generator=noise) / 1000
    moments = {"exp_avg": first, "exp_avg_sq": first**2, "step": torch.tensor(1.0)}
    return {"model": {"w": weight.to(dtype), "b": torch.ones(9)}, "optimizer": {"state": {"w": moments}}}

for dtype in (torch.float32, torch.bfloat16):
    run = f"{sys.argv[1]}/{dtype}"
    for number in range(4):
        dsq_ckpt.save(state(number, dtype), f"{run}/{number}")
    for refinement in (False, "auto"):
        for number in (0, 3):
            dsq_ckpt.load(loaded := state(9, dtype), f"{run}/{number}", refinement=refinement)
            error = loaded["model"]["w"].float() - state(number, dtype)["model"]["w"].float()
            assert 0 < error.abs().max() < 0.1
print("numba" in sys.modules)
"""


@pytest.mark.skipif(len(PATHS) == 1, reason="there is no compiled library")
def test_saves_and_loads_import_numba_on_its_own_path_alone(tmp_path):
    for path in ("numba", PATHS[-1]):
        ran = subprocess.run(
            [sys.executable, "-c", WITHOUT_NUMBA, str(tmp_path / path)], capture_output=True, text=True,
            env={**os.environ, native.VARIABLE: path},
        )
        assert ran.stdout.strip() == str(path == "numba"), ran.stderr[-3000:]
