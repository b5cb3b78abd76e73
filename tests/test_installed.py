"""A wheel, built from the source distribution and installed beside nothing but the distributions that it requires."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dsq_ckpt import __version__
from tests.helpers.processes import ROOT
from tests.test_packaging import tracked, unpacked  # noqa: F401  (fixtures)

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
PROGRAM = """
import torch
import dsq_ckpt
from dsq_ckpt import native

state = {"w": torch.arange(4096.0).reshape(64, 64) / 4096, "step": 1}
for config in ("exact", "default"):
    dsq_ckpt.save(state, f"run/{config}", config=config)
    target = {"w": torch.zeros(64, 64), "step": 0}
    dsq_ckpt.load(target, f"run/{config}")
    assert target["step"] == 1 and torch.allclose(target["w"], state["w"], atol=0 if config == "exact" else 0.02)
print(dsq_ckpt.__file__, *native.available())
"""


def required(names: Iterable[str]) -> set[str]:
    """Return the distributions that these ones need, and themselves, as installed here; extras are nobody's."""
    requirements: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in requirements:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # of another system, or one that this torch does not use
            continue
        requirements.add(name)
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(re.sub(r"[-_.]+", "-", need.name).lower())
    return requirements


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):  # noqa: F811
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=unpacked, capture_output=True, check=True)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """An environment with the wheel, and links to the distributions that it requires, from somebody else's."""
    target = tmp_path_factory.mktemp("environment")
    venv.create(target, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(target), "platbase": str(target)}))
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    direct = [line.split(": ")[1] for line in text.splitlines() if line.startswith("Requires-Dist")]
    direct = [need for need in direct if "extra ==" not in need]
    for name in required(re.split(r"[<>=!~; ]", need)[0].lower() for need in direct):
        installed = distribution(name)
        for part in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = site / part
            if not link.exists():
                link.symlink_to(installed.locate_file(part))
    command = [sys.executable, "-m", "pip", "--python", target / "bin" / "python", "install", "--no-index", "-q", wheel]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_the_wheel_holds_the_whole_package(wheel):
    """Modules, presets, kernels for GPUs, type information, and the coder's library; no tests, no sources of C."""
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dsq_ckpt").rglob("*.py")}
    assert modules <= names
    assert {f"dsq_ckpt/{path.relative_to(ROOT)}" for path in (ROOT / "triton_kernels").rglob("*.py")} <= names
    presets = [path for path in (ROOT / "configs").rglob("*") if path.suffix in (".yaml", ".json")]
    assert {f"dsq_ckpt/{path.relative_to(ROOT)}" for path in presets} <= names
    assert "dsq_ckpt/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"dsq_ckpt", f"dsq_ckpt-{__version__}.dist-info"}
    assert not [name for name in names if name.endswith((".c", ".h"))]
    if shutil.which("gcc"):
        assert len([name for name in names if name.startswith("dsq_ckpt/native/_compiled.")]) == 1
        assert "-abi3-" in wheel.name


@pytest.mark.slow
def test_it_works_with_what_it_requires_alone(environment, tmp_path):
    """The installed package saves, loads and verifies, without any package that only development needs."""
    def run(*command: str) -> str:
        done = subprocess.run(
            [str(environment / "bin" / command[0]), *command[1:]], cwd=tmp_path, capture_output=True, text=True,
            # A checkout there would be imported in place of it. Kernels of a new place are compiled, for ten seconds.
            env={**os.environ, "PYTHONPATH": "", "NUMBA_DISABLE_JIT": "1"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    absent = ("deepspeed", "pytest", "s3fs", "safetensors", "transformers")
    code = f"from importlib.util import find_spec; print([n for n in {absent} if find_spec(n)])"
    assert run("python", "-c", code) == "[]\n"
    place, *paths = run("python", "-c", PROGRAM).split()
    assert Path(place).is_relative_to(environment)
    assert paths[0] == "numba" and (not shutil.which("gcc") or paths[1] == "c")
    assert [entry["ok"] for entry in json.loads(run("dsq", "verify", "run", "--json"))["checkpoints"]] == [True, True]
    assert "lattice" in run("dsq", "inspect", "run/default", "--json")
