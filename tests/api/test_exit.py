"""A background save that the interpreter's exit finds still running."""

import os
import subprocess
import sys

from dsq_ckpt.storage.manifest import Manifest

SCRIPT = """
import sys, torch, dsq_ckpt
dsq_ckpt.async_save({"w": torch.randn(2000, 2000)}, sys.argv[1], config={"storage": {"threads": 2}})
"""


AT_EXIT = """
import atexit, sys, torch, dsq_ckpt

def at_exit():
    state = {"w": torch.randn(200, 200)}
    try:
        dsq_ckpt.async_save(state, sys.argv[1])
    except dsq_ckpt.SaveFailed as error:
        print(error)
    dsq_ckpt.save(state, sys.argv[1])

atexit.register(at_exit)
"""


def test_it_is_finished_before_the_process_ends(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "1")]
    done = subprocess.run(command, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Manifest.read(tmp_path / "1").refinement == "kept"


def test_one_that_begins_at_exit_says_why_it_cannot(tmp_path):
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path / "1")]
    without_kernels = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, timeout=900, capture_output=True, text=True, env=without_kernels)
    assert done.stdout.startswith("the interpreter is exiting") and "call dsq_ckpt.save here" in done.stdout, done
    assert done.stdout.count("\n") == 1
    assert Manifest.read(tmp_path / "1").refinement == "kept"
