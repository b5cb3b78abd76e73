"""Tags of DeepSpeed, damaged: what an engine loads is what it saved, or the load fails with an error of ours."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from campaigns import kills, subjects
from campaigns.accidents import ALTERATIONS, other_file
from campaigns.harness import Campaign, Found
from campaigns.subjects import refuses


class Tags(Campaign):
    """Tags of an engine of ZeRO 2, with a file changed."""

    name = "tags"
    full = 600
    few = 8
    memory = 1 << 30

    def load(self) -> None:
        """Load DeepSpeed, too."""
        super().load()
        kills.import_deepspeed()

    def prepare(self) -> None:
        """Save three tags, and what the last one holds."""
        engine, common = self._engine("prepare", 0)
        for step in (1, 2, 3):
            common.train(engine, step, step + 1)
            engine.save_checkpoint(str(self.directory / "base"), client_state={"step": step})
        again, _ = self._engine("prepare", 5)
        again.load_checkpoint(str(self.directory / "base"))
        (self.directory / "digest").write_text(kills.digest_of(again))

    def begin(self) -> None:
        """Make an engine."""
        self.work = self.directory / f"lane-{os.getpid()}"
        self.engine, _ = self._engine(self.work.name, 3)
        self.digest = (self.directory / "digest").read_text()
        self.engine.load_checkpoint(str(self.directory / "base"))
        assert kills.digest_of(self.engine) == self.digest

    def _engine(self, name: str, seed: int) -> tuple[Any, Any]:
        torch.set_num_threads(1)
        common = kills.deepspeed_workers()
        if not dist.is_initialized():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - DeepSpeed tells a lot
            store = self.directory / f"store-{name}"
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        return common.engine_of(common.settings(2), common.LOSSY, seed=seed), common

    def _drawn(self, number: int) -> tuple[random.Random, Callable[[Path, random.Random], None]]:
        rng = self.rng(number)
        return rng, rng.choice([alter for alter in ALTERATIONS if alter != other_file])

    def kind(self, number: int) -> str:
        """Return the alteration."""
        return self._drawn(number)[1].__name__.replace("_", " ")

    def trial(self, number: int) -> Found:
        """Alter one file of the newest tag, and load it."""
        rng, alter = self._drawn(number)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.directory / "base", self.work)
        tag = self.work / "global_step3"
        file = rng.choice(sorted(tag.iterdir()))
        alter(file, rng)
        with subjects.watched(self.work, self.directory) as seen:
            refused = refuses(lambda: self.engine.load_checkpoint(str(self.work)), tag)
        if seen:
            return Found("wrong", f"{file.name}: {seen[:3]}")
        if refused is not None:
            return Found(refused.outcome, refused.what and f"{file.name}: {refused.what}")
        return Found("unchanged") if kills.digest_of(self.engine) == self.digest else Found(
            "wrong", f"{file.name}: other values, no error"
        )
