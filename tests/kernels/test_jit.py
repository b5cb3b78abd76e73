"""Machine code that is kept, and what a kernel is compiled for."""

import pickle

import numba
import pytest

from dsq_ckpt.kernels.jit import jit
from tests.helpers import processes

KERNEL = """
import os, sys
import numba

os.environ["NUMBA_CACHE_DIR"] = sys.argv[1]
numba.config.reload_config()
from dsq_ckpt.kernels.jit import count_compilations, jit

before = count_compilations()

@jit
def twice(value):
    return 2 * value

if __name__ == "__main__":
    print(twice(21), count_compilations() - before)
"""


def run(directory):
    status, output = processes.run([str(directory / "kernel.py"), str(directory / "cache")], forked=True)
    assert status == 0, output
    return output.strip()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The directory of a kernel and its machine code."""
    directory = tmp_path_factory.mktemp("kept")
    (directory / "kernel.py").write_text(KERNEL)
    assert run(directory) == "42 1"
    return directory


@pytest.mark.parametrize("content", [
    pickle.dumps(numba.__version__) + b"cdsq_ckpt\nClassThatIsGone\n.", pickle.dumps(numba.__version__)[:-2], b"",
], ids=["of another version", "cut off", "empty"])
def test_an_index_that_cannot_be_read_is_made_again(package, content):
    [index] = (package / "cache").rglob("*.nbi")
    index.write_bytes(content)
    assert run(package) == "42 1"
    assert run(package) == "42 0"


CALLS = """
@jit
def add(value, other, negative=False):
    return value - other if negative else value + other

@jit
def call(value):
    return add(value, 1) + add(2, value) + add(value, other=3) + add(value, 4, negative=True)
"""


def test_literals_are_values_like_others(monkeypatch):
    """Numba compiles a function once more for each literal that another one gives it."""
    monkeypatch.setattr("dsq_ckpt.kernels.jit._KERNELS", [])  # those of the package stay as they are
    monkeypatch.setattr("dsq_ckpt.kernels.compiler.KERNELS", [])
    kernels = {"jit": jit}
    exec(CALLS, kernels)  # machine code of what has no file is not kept
    assert kernels["call"](10) == 11 + 12 + 13 + 6
    assert len(kernels["add"].signatures) == 2, "with the default and without"
