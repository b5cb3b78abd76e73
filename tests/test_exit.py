"""A background save that the interpreter's exit finds still running."""

import subprocess
import sys

from dsq_ckpt.manifest import Manifest

SCRIPT = """
import sys, torch, dsq_ckpt
dsq_ckpt.async_save({"w": torch.randn(2000, 2000)}, sys.argv[1], config={"storage": {"threads": 2}})
"""


def test_it_is_finished_before_the_process_ends(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "1")]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Manifest.read(tmp_path / "1").refinement == "kept"
