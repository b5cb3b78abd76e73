"""Files of checkpoints written by somebody who knows the format: all checksums are right, what they cover is not.

What is read from a forged checkpoint is refused, or is what was saved, or ("accepted") what its files state: the values
that the reader of `tests/format` finds, which was written from `docs/format.md` alone, and the same twice, whatever lay
in memory before.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from campaigns import subjects
from campaigns.accidents import LOOKS, Accidents
from campaigns.forgeries import FORGERIES
from campaigns.harness import Found
from campaigns.subjects import State, command, refuses, same
from tests.helpers import independent_reader as independent
from tests.helpers.states import to_bytes


class Forged(Accidents):
    """Files forged with right checksums."""

    honest = False
    name = "forged"
    full = 8000
    few = 24

    def kind(self, number: int) -> str:
        """Return what is forged."""
        return self._forgery(number)[3].__name__.replace("_", " ")

    def _forgery(self, number: int) -> tuple[random.Random, str, str, Callable[[Path, random.Random], str]]:
        rng, name, way, _ = self.drawn(number)
        return rng, name, way, rng.choice(FORGERIES)

    def trial(self, number: int) -> Found:
        """Forge something in a copy, and read that."""
        rng, name, way, forge = self._forgery(number)
        shutil.rmtree(self.work, ignore_errors=True)
        for run in (name, f"{name}-other", f"{name}-victim"):
            shutil.copytree(self.base / run, self.work / run)
        os.chdir(self.work)
        path, victim = self.work / name / "step-3", self.work / f"{name}-victim"
        what = forge(path, rng)
        with subjects.watched(self.work) as seen:
            verdict = self.judge(name, way, path)
        if (self.work / "executed").exists():
            seen.append("a pickle was executed")
        if _listing(victim) != _listing(self.base / victim.name):
            seen.append("files of another run were changed")
        if seen:
            return Found("wrong", f"{name}, {way}, {what}: {seen[:3]}")
        return Found(verdict.outcome, verdict.what and f"{name}, {way}, {what}: {verdict.what}")

    def judge(self, name: str, way: str, path: Path, altered: bool = False) -> Found:
        """Read a checkpoint in one way; what commands are content with may state other values."""
        if way in ("verify", *LOOKS):
            words = LOOKS[way](path) if way in LOOKS else (str(path),)
            return Found("detected" if command(way, *words)[0] else "accepted")
        return super().judge(name, way, path)

    def read(self, way: str, path: Path) -> State | Found:
        """Load or export twice, and return what both gave, or that it was refused."""
        if way == "export":
            return super().read(way, path)
        values: list[State] = []
        read = subjects.read_like if way == "load" else subjects.read_all
        refused = refuses(lambda: values.extend(read(path, poison) for poison in (85, 170)), path)
        if refused is not None:
            return refused
        if not same(*values):
            return Found("wrong", "two loads give different values: memory that nobody wrote to")
        return values[0]

    def other(self, path: Path, state: State) -> Found:
        """Check that values that differ from those saved are those that the files contain."""
        problem = stated(path, state)
        return Found("wrong", problem) if problem else Found("accepted")


def stated(path: Path, state: State) -> str | None:
    """Return the first difference between a state and the files at `path`; None if there is none."""
    try:
        reader = independent.Reader(path)
        for fqn, keys in reader.index["planner"].items():
            value: Any = state
            try:
                for key in keys:
                    value = value[key]
            except (KeyError, IndexError):
                if keys[0] in state:
                    return f"'{fqn}' was not loaded"
                continue
            if fqn in reader.index["tensors"]:
                tensor = reader.index["tensors"][fqn]
                description = (str(value.dtype).removeprefix("torch."), list(value.shape))
                if description != (tensor["dtype"], tensor["shape"]) or not _equal(value, fqn, reader):
                    return f"'{fqn}' is not as the file states"
        missing = [fqn for fqn in (*reader.index["tensors"], *reader.index["objects"])
                   if fqn not in reader.index["planner"]]
        if missing:
            return f"{missing} not loaded, no error"
    except Exception as error:
        return f"loaded, although docs/format.md refuses it: {type(error).__name__}: {error}"
    return None


def _equal(value: torch.Tensor, fqn: str, reader: independent.Reader) -> bool:
    """Return whether a tensor equals the reader's, except for the bits of NaNs; tensors without elements are equal."""
    if not value.numel():
        return True
    other = torch.frombuffer(bytearray(reader.tensor(fqn)), dtype=value.dtype).view(value.shape)
    return torch.equal(value.isnan(), other.isnan()) and to_bytes(value.nan_to_num()) == to_bytes(other.nan_to_num())


def _listing(run: Path) -> list[str]:
    return sorted(str(file.relative_to(run)) for file in run.rglob("*"))
