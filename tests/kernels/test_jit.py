"""Machine code that is kept, and what a kernel is compiled for."""

import pickle
import shutil
import threading
from types import ModuleType, SimpleNamespace

import numba
import pytest

from dsq_ckpt.kernels import compiler
from dsq_ckpt.kernels import jit as module
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


FIRST_IMPORT = """
import os, signal, sys, threading, time
from dsq_ckpt.kernels import jit

@jit.jit
def twice(value):
    return 2 * value

assert "numba" not in sys.modules
thread = threading.Thread(target=twice, args=(21,))
thread.start()
while "numba" not in sys.modules:
    time.sleep(0.001)
child = os.fork()
if not child:
    signal.alarm(60)
    print(twice(3), flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
thread.join()
print("CHILD", status)
"""


def test_a_fork_while_another_thread_imports_numba_and_then_compiles():
    """The child finds no lock that a thread holds which it does not have."""
    status, output = processes.run(["-c", FIRST_IMPORT])
    assert status == 0 and output.split() == ["6", "CHILD", "0"], output


SAVE_OF_A_HANDLER = """
import os, signal, sys, threading, time
import torch
import dsq_ckpt

def interrupt():
    while "numba" not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

saved = []
signal.signal(signal.SIGTERM, lambda *_: saved.append(dsq_ckpt.save({"w": torch.randn(200, 200)}, sys.argv[1])))
threading.Thread(target=interrupt).start()
dsq_ckpt.DSQStorageWriter("unused")
print("SAVED", len(saved))
"""


def test_the_handler_of_a_signal_may_save_while_numba_is_imported(tmp_path):
    """The fork waits for the thread that compiles, and this thread for the import."""
    status, output = processes.run(["-c", SAVE_OF_A_HANDLER, str(tmp_path / "a")], timeout=200, DSQ_CODER="numba")
    assert status == 0 and "SAVED 1" in output, output


def test_no_thread_waits_for_what_is_known_while_another_one_compiles():
    """As the one that says that kernels are compiled."""
    module.cache_directories()
    with module.block_forks():
        thread = threading.Thread(target=module.cache_directories, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


def test_a_copy_of_machine_code_that_fails_leaves_no_file(monkeypatch, tmp_path):
    package, cache = tmp_path / "package", tmp_path / "cache"
    (package / "__pycache__").mkdir(parents=True)
    cache.mkdir()
    (package / "__pycache__" / "kernel.twice-1.py311.nbi").write_bytes(b"index")
    code = SimpleNamespace(co_filename=str(package / "kernel.py"))
    kernel = SimpleNamespace(
        py_func=SimpleNamespace(__code__=code, __qualname__="twice"), stats=SimpleNamespace(cache_path=str(cache))
    )

    def fails(source, target):
        target.write_bytes(b"in")
        raise OSError("no space")

    monkeypatch.setattr(compiler.os, "access", lambda path, mode: False)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(shutil, "copyfile", fails)
        compiler._copy_shipped_cache(kernel)
    assert not list(cache.iterdir())
    compiler._copy_shipped_cache(kernel)
    assert [file.name for file in cache.iterdir()] == ["kernel.twice-1.py311.nbi"]


CALLS = """
@jit
def add(value, other, negative=False):
    return value - other if negative else value + other

@jit
def call(value):
    return add(value, 1) + add(2, value) + add(value, other=3) + add(value, 4, negative=True)
"""


@pytest.fixture
def _apart(monkeypatch):
    """Kernels of the package stay as they are."""
    monkeypatch.setattr("dsq_ckpt.kernels.jit._KERNELS", [])
    monkeypatch.setattr("dsq_ckpt.kernels.compiler.KERNELS", [])


@pytest.mark.usefixtures("_apart")
def test_kernels_of_another_module_are_compiled_with_those_that_call_them():
    other = ModuleType("other")
    other.jit = jit
    exec("@jit\ndef twice(value):\n    return 2 * value", vars(other))
    kernels = {"jit": jit, "other": other}
    exec("@jit\ndef call(value):\n    return other.twice(value) + 1", kernels)
    assert kernels["call"](3) == 7


@pytest.mark.usefixtures("_apart")
def test_literals_are_values_like_others():
    """Numba compiles a function once more for each literal that another one gives it."""
    kernels = {"jit": jit}
    exec(CALLS, kernels)  # machine code of what has no file is not kept
    assert kernels["call"](10) == 11 + 12 + 13 + 6
    assert len(kernels["add"].signatures) == 2, "with the default and without"
