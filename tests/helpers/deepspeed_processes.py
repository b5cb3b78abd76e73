"""DeepSpeed's workers as process groups; the servers that fork them have other frameworks too, for tests of these."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import forks
from tests.helpers.processes import ROOT, run, torchrun

_TESTS = ROOT / "tests" / "deepspeed"
WORKERS = _TESTS / "workers"
ON_CPU = {
    "DS_ACCELERATOR": "cpu", "CXX": str(_TESTS / "c++"),
    forks.PRELOAD: (
        "deepspeed dsq_ckpt.deepspeed deepspeed.runtime.zero.muon.muon_optimizer accelerate transformers.trainer "
        "transformers.models.gpt2.modeling_gpt2 lightning.pytorch"
    ),
}


def ranks(worker: str, count: int, *arguments: object) -> str:
    """Run a worker on so many ranks; its output. The first that offloads builds an extension of DeepSpeed."""
    return torchrun(worker, count, *arguments, workers=WORKERS, **ON_CPU)


def python(*arguments: object, directory: Path = ROOT, **environment: str) -> str:
    """Run a Python program in a directory, where it must succeed; its output."""
    status, output = run(list(map(str, arguments)), forked=True, directory=directory, **ON_CPU, **environment)
    assert status == 0, output[-4000:]
    return output


def by_torchrun(*arguments: object, count: int = 2) -> str:
    """Run a script, or `-m module`, on so many ranks; its output."""
    how = ("--standalone", "--nproc-per-node", count, "--max-restarts", 0)
    return python("-m", "torch.distributed.run", *how, *arguments)
