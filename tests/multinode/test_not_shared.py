"""A directory that is not shared, where a single rank wrote all there is, so that no file is missing there."""

from __future__ import annotations

import pytest

from tests.helpers.processes import run
from tests.multinode.cluster import ROOT

pytestmark = pytest.mark.slow


def test_ranks_that_wrote_nothing_find_out_too(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    worker = ROOT / "tests" / "multinode" / "workers" / "apart.py"
    status, output = run([*launch, str(worker), str(tmp_path)], forked=True)
    assert status == 0, output
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert all("the checkpoint was committed, but host " in text for text in told)
    assert all("'/proc/self/cwd/step' is not shared by all hosts" in text for text in told)
    assert told[0].startswith("rank 1 failed: ")
