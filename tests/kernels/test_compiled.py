"""Every kernel compiles for a GPU, and keeps to the arithmetic that the interpreter has been tested with."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def kernels_in_source():
    """Functions of the package that a launch can start: those with tiles."""
    names = set()
    for path in (ROOT / "triton_kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(arg.arg == "TILE" for arg in node.args.args):
                names.add(node.name)
    return names


def test_every_kernel_compiles(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_all"], env=environment, capture_output=True, text=True, cwd=ROOT,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout)
    assert set(kernels) == kernels_in_source()
    # A fused multiply-add where none is asked for would round otherwise than the CPU.
    assert {name for name, code in kernels.items() if code["fused"]} == {"_blend", "_sensitivity"}
    assert not any(code["flushed"] for code in kernels.values())
    assert kernels["_quantize"]["wide"] and kernels["_sketch"]["wide"]
