"""A background save that the interpreter's exit finds still running."""

from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import forks, processes

SCRIPT = """
import sys, torch, dsq_ckpt
dsq_ckpt.async_save({"w": torch.randn(2000, 2000)}, sys.argv[1], config={"storage": {"threads": 2}})
"""


FAILS = """
import sys, torch, dsq_ckpt
from dsq_ckpt.engine import pipeline

def full(*_, **__):
    raise OSError(28, "No space left on device")

dsq_ckpt.async_save({"w": torch.ones(3)}, sys.argv[1]).result()
pipeline.write_rank = full
dsq_ckpt.async_save({"w": torch.ones(3)}, sys.argv[2])
"""


AT_EXIT = """
import atexit, sys, torch, dsq_ckpt
from numba.core.caching import NullCache
from dsq_ckpt.kernels import cpu_pack, jit

cpu_pack._pack._reset_overloads()
cpu_pack._pack._cache = NullCache()  # a kernel that is still to be compiled
compiled = jit.count_compilations()

def at_exit():
    state = {"w": torch.randn(200, 200)}
    try:
        dsq_ckpt.async_save(state, sys.argv[1])
    except dsq_ckpt.SaveFailed as error:
        print(error)
    dsq_ckpt.save(state, sys.argv[1])
    print("compiled", jit.count_compilations() - compiled)

atexit.register(at_exit)
"""


def ended(script, *arguments):
    """Status and output of a process that ended as interpreters do."""
    return processes.run(["-c", script, *map(str, arguments)], forked=True, **{forks.TEARDOWN: "1"})


def test_it_is_finished_before_the_process_ends(tmp_path):
    status, output = ended(SCRIPT, tmp_path / "1")
    assert status == 0, output
    assert Manifest.read(tmp_path / "1").refinement == "kept"


def test_one_that_begins_at_exit_says_why_it_cannot(tmp_path):
    done = processes.run_apart(["-c", AT_EXIT, str(tmp_path / "1")], **{forks.TEARDOWN: "1"})
    assert done.stdout.startswith("the interpreter is exiting") and "call dsq_ckpt.save here" in done.stdout, done
    assert done.stdout.splitlines()[1:] == ["compiled 1"], done
    assert Manifest.read(tmp_path / "1").refinement == "kept"


def test_a_failure_that_nobody_asks_about_is_reported(tmp_path):
    """As of the last save of a program, which ended without a word and without its last checkpoint."""
    _, output = ended(FAILS, tmp_path / "1", tmp_path / "2")
    assert "the last asynchronous save failed: SaveFailed" in output and "No space left" in output, output
    assert not (tmp_path / "2").exists()
