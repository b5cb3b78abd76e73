"""Command line options and process groups that the training scripts share."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_OPTIONS: dict[str, dict[str, Any]] = {
    "--out": {"type": Path, "required": True, "help": "run directory, which holds the checkpoints; all hosts see it"},
    "--log-file": {"type": Path, "help": "file that JSON lines are appended to"},
    "--steps": {"type": int, "default": 600, "help": "last step of the run"},
    "--save-every": {"type": int, "default": 100, "help": "steps between checkpoints"},
    "--batch-size": {"type": int, "default": 8, "help": "rows of the global batch, shared by the ranks"},
    "--seed": {"type": int, "default": 0, "help": "seed of the initial weights and of the batches"},
    "--layers": {"type": int, "default": 6, "help": "transformer blocks"},
    "--width": {"type": int, "default": 192, "help": "size of the residual stream; a multiple of 6"},
    "--die-at-step": {"type": int, "help": "step in the middle of which a rank kills itself with SIGKILL"},
    "--die-rank": {"type": int, "default": 1, "help": "the rank that does"},
}


def parser(description: str, *names: str) -> argparse.ArgumentParser:
    """Return a parser with these of the shared options, beside `--out`, `--steps` and `--save-every`."""
    argument_parser = argparse.ArgumentParser(description=description)
    for name in ("--out", "--steps", "--save-every", *names):
        argument_parser.add_argument(name, **_OPTIONS[name])
    return argument_parser


def init_processes(timeout: timedelta) -> torch.device:
    """Create the default process group of a job of torchrun; return the device of this rank.

    Without a GPU for each rank of the host, all train on the CPU, in one thread.
    """
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_world:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timeout)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)
    return device
