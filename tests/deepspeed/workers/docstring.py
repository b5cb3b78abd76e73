"""The example in the docstring of `dsq_ckpt.deepspeed.initialize`, on one rank."""

from __future__ import annotations

import doctest
import os
import sys

import deepspeed
import torch
import torch.distributed as dist

import dsq_ckpt.deepspeed

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    deepspeed.init_distributed()  # prints a line
    (test,) = doctest.DocTestFinder(recurse=False).find(
        dsq_ckpt.deepspeed.initialize, "initialize", module=False, globs={"torch": torch, "dsq_ckpt": dsq_ckpt}
    )
    assert test.examples and not doctest.DocTestRunner(verbose=False).run(test).failed
    print("[ok]")
    dist.destroy_process_group()
