"""Random states of each rank by the listing of docs/loop.md: argv = a directory, which is empty or of fewer ranks."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import done, fails_everywhere, world

import dsq_ckpt
from tests.helpers.processes import ROOT

(LISTING,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loop.md").read_text(), re.S)
NAMES: dict[str, Any] = {}
exec(LISTING.partition("rank = 0")[0], NAMES)


def seeded(rank: int) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


if __name__ == "__main__":
    path = Path(sys.argv[1]) / "a"
    with world() as (me, size):
        if not path.exists():
            seeded(me)
            state = {"rng": {f"rank-{me}": NAMES["random_states"]()}, f"rng-{me}": torch.get_rng_state()}
            dsq_ckpt.save(state, path)
            done("saved")
        else:
            before = size - 1
            back: dict[str, Any] = {"rng": {}}
            dsq_ckpt.load(back, path)
            assert sorted(back["rng"]) == [f"rank-{rank}" for rank in range(before)]
            if me < before:
                NAMES["set_random_states"](back["rng"][f"rank-{me}"])
                numbers = drawn()
                seeded(me)
                assert numbers == drawn()
            own = {f"rng-{me}": torch.zeros_like(torch.get_rng_state())}
            fails_everywhere(lambda: dsq_ckpt.load(own, path), f"has no 'rng-{before}'")
            own_state = own if me < before else {}
            dsq_ckpt.load({"rng": {}, **own_state}, path)
            done("loaded on more ranks")
