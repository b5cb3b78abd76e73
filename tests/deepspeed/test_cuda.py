"""DeepSpeed on a GPU; all else is tested on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.deepspeed_processes import WORKERS
from tests.helpers.processes import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_resumed_engines(tmp_path):
    pytest.importorskip("deepspeed")
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    status, output = run([*how, str(WORKERS / "on_gpu.py"), str(tmp_path)], DS_ACCELERATOR="cuda")
    assert status == 0 and "same losses" in output, output[-4000:]
