"""The package and its source distribution: public names, all that is tracked, a description without dead links."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
from types import ModuleType

import pytest
import tomllib

import dsq_ckpt
from tests.helpers.processes import ROOT

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


@pytest.fixture(scope="module")
def tracked():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def unpacked(tracked, tmp_path_factory):
    """A source distribution, built from a copy of what is tracked and unpacked."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("unpacked")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(target)], cwd=source, capture_output=True, text=True, check=True
    )
    archive = target / built.stdout.splitlines()[-1]
    with tarfile.open(archive) as files:
        files.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    return target / archive.name.removesuffix(".tar.gz")


def test_the_source_distribution_holds_all_that_is_tracked(tracked, unpacked):
    missing = [name for name in tracked if not (unpacked / name).exists()]
    assert not missing
    assert all((unpacked / name).read_bytes() == (ROOT / name).read_bytes() for name in tracked)


def test_a_compiler_is_optional(unpacked, tmp_path):
    """Without one, the package is built without the coder's library, and Numba does its work."""
    source = tmp_path / "source"
    shutil.copytree(unpacked, source)
    environment = {**os.environ, "CC": "/bin/false"}
    subprocess.run([sys.executable, "setup.py", "-q", "build"], cwd=source, env=environment, check=True)
    (built,) = source.glob("build/lib*")
    assert not list((built / "dsq_ckpt" / "native").glob("_compiled*"))
    code = "from dsq_ckpt import native; print(*native.available())"
    ran = subprocess.run([sys.executable, "-c", code], cwd=built, env={**environment, "PYTHONPATH": str(built)},
                         capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["numba"]


def test_the_description_has_no_dead_links(unpacked):
    description = (unpacked / "PKG-INFO").read_text()
    assert "docs/design.md" in description
    assert re.findall(r"\]\((?!https?://|#)[^)]+\)", description) == []


def test_links_lead_to_the_repository_once_it_has_an_address(unpacked):
    text = (ROOT / "setup.py").read_text()
    names: dict = {"__file__": str(ROOT / "setup.py")}
    exec(text[: text.index("packages =")].replace('URL = ""', 'URL = "https://host/files"'), names)
    assert names["description"]("[a](docs/a.md), [b](https://b), [c](#c)") == (
        "[a](https://host/files/docs/a.md), [b](https://b), [c](#c)"
    )


def test_the_documentation_shows_the_contract_between_subpackages():
    """What `make lint` checks, layer by layer; `__main__` is not a subpackage."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [layer.split(" | ") for layer in contract["layers"]][1:]
    text = (ROOT / "docs" / "design.md").read_text()
    table = text[text.index("| part of `dsq_ckpt/` |") :].split("\n\n")[0].splitlines()[2:]
    assert [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table] == layers


@pytest.mark.parametrize("module", ["dsq_ckpt", "dsq_ckpt.lowdiff", "dsq_ckpt.mpi"])
def test_every_public_name_is_there(module):
    """The names of `dsq_ckpt` are imported when they are asked for; checkpoints of DeepSpeed name `decode`."""
    package = importlib.import_module(module)
    assert all(hasattr(package, name) for name in {*package.__all__, *dir(package)})
    assert pickle.loads(b"cdsq_ckpt\ndecode\n.") is dsq_ckpt.decode


def test_completion_offers_public_names_and_modules_alone():
    """Names that the package imports for itself, such as `Any`, are left out."""
    assert set(dsq_ckpt.__all__) <= set(dir(dsq_ckpt))
    others = set(dir(dsq_ckpt)) - set(dsq_ckpt.__all__)
    assert {"deepspeed", "integrations", "lowdiff", "report"} <= others
    assert all(isinstance(getattr(dsq_ckpt, name), ModuleType) for name in others)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_builds_anew_for_sources_alone_and_removes_what_it_built(tmp_path):
    """Bytecode beside the sources of the library, which each run of Python may write, is none of them."""
    for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("dsq_ckpt", "scripts", "tests"):
        (tmp_path / name).mkdir()
    native, stamp = tmp_path / "dsq_ckpt" / "native", tmp_path / ".venv" / ".stamp"
    bytecode, source, library = native / "__pycache__" / "a.pyc", native / "lanes.c", native / "_compiled.abi3.so"
    for file in (stamp, bytecode, source, library):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def is_done(changed):
        for file in tmp_path.rglob("*"):
            os.utime(file, (1e9, 1e9))
        os.utime(changed, (2e9, 2e9))
        return subprocess.run(["make", "-q", ".venv/.stamp"], cwd=tmp_path, check=False).returncode == 0

    assert is_done(stamp) and is_done(bytecode.parent) and not is_done(source)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert source.exists() and not library.exists() and not stamp.exists()
