"""A job that begins a log in the middle of which another one begins; argv = run, method of the log to stop in.

It says "there" when it has come to the method, and goes on when it is told to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from dsq_ckpt.lowdiff import GradientLog
from tests.helpers.checkpointing_processes import Nursery
from tests.lowdiff.loops import ADAM, Loop

STEPS = 3


def main(run: Path, method: str, told: Path) -> None:
    own = getattr(GradientLog, method)

    def stop(log: GradientLog) -> Any:
        setattr(GradientLog, method, own)
        print("there", flush=True)
        told.read_bytes()  # a pipe that another process opens
        return own(log)

    setattr(GradientLog, method, stop)
    loop = Loop(ADAM)
    with loop.log(run, compressor="none") as log:
        for number in range(STEPS):
            loop.step(number)
            log.step()


if __name__ == "__main__":
    Nursery()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
