"""Run a training script unchanged, with compressed DeepSpeed checkpoints where its configuration asks for them.

    deepspeed --module dsq_ckpt.launch train.py --deepspeed_config ds_config.json
    torchrun --nproc-per-node 8 -m dsq_ckpt.launch train.py
    torchrun --nproc-per-node 8 -m dsq_ckpt.launch -m my.package.train
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.deepspeed import BLOCK, get_block_flags, install

_USAGE = "usage: python -m dsq_ckpt.launch SCRIPT [ARGUMENT ...] | -m MODULE [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    """Install, and run the script or module as `__main__`.

    DeepSpeed's launcher puts `--local_rank=N` before the script; the script gets it after its name.
    """
    before: list[str] = []
    while arguments and arguments[0].startswith("--local"):
        before.append(arguments.pop(0))
    module = arguments[:1] == ["-m"]
    if module:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(_USAGE)
    target, *rest = arguments
    if not module and not Path(target).is_file():
        raise SystemExit(f"dsq_ckpt.launch: there is no script '{target}'; {_USAGE}")
    install()
    sys.argv = [target, *before, *rest]
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).absolute().parent))
        runpy.run_path(target, run_name="__main__")
    if not get_block_flags():
        warn(
            f"'{target}' made no engine of DeepSpeed, so dsq_ckpt.launch had nothing to do", rank=_rank()
        )
    elif not any(get_block_flags()):
        warn(
            f"no engine of '{target}' had the block '{BLOCK}' in its configuration: checkpoints are DeepSpeed's own",
            rank=_rank(),
        )


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


if __name__ == "__main__":
    main(sys.argv[1:])
