"""Kept machine code whose index is damaged, or of another version of the package, is compiled again."""

import pickle

import numba
import pytest

from tests.helpers import processes

KERNEL = """
from dsq_ckpt.kernels.jit import compilations, jit

@jit
def twice(value):
    return 2 * value

if __name__ == "__main__":
    print(twice(21), compilations())
"""


def run(tmp_path):
    status, output = processes.run([str(tmp_path / "kernel.py")], NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert status == 0, output
    return output.strip()


@pytest.mark.parametrize("content", [
    pickle.dumps(numba.__version__) + b"cdsq_ckpt\nClassThatIsGone\n.", pickle.dumps(numba.__version__)[:-2], b"",
], ids=["of another version", "cut off", "empty"])
def test_an_index_that_cannot_be_read_is_made_again(tmp_path, content):
    (tmp_path / "kernel.py").write_text(KERNEL)
    assert run(tmp_path) == "42 1"
    [index] = (tmp_path / "cache").rglob("*.nbi")
    index.write_bytes(content)
    assert run(tmp_path) == "42 1"
    assert run(tmp_path) == "42 0"
