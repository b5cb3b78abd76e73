"""System calls that fail: each call of a save or a load once, with every error that disks and file systems give.

A save that reports success holds what was saved; one that reports an error (one of ours) left nothing that looks
complete. Either way earlier checkpoints load as before, the next save works, and `dsq gc` leaves nothing behind.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import torch

import dsq_ckpt
from campaigns import subjects
from campaigns.calls import KINDS, counted, failing
from campaigns.harness import Campaign, Found, told
from campaigns.subjects import State, same, state_at
from dsq_ckpt.storage import gc

WRITING = ("keyframe", "delta", "overwrite", "async", "exact", "full disk")
READING = ("load", "load all", "latest", "verify")
_CHANGES = ("open to read", "open to write", "read", "write", "fsync", "rename", "link", "unlink", "mkdir")
_ERRORS = {
    "write": (errno.EIO, errno.ENOSPC, errno.EDQUOT), "open to write": (errno.EIO, errno.ENOSPC, errno.EMFILE),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT), "mkdir": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "link": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EPERM, errno.EXDEV),
    "rename": (errno.EIO, errno.ENOSPC, errno.EDQUOT), "unlink": (errno.EIO, errno.EACCES),
    "read": (errno.EIO,), "open to read": (errno.EIO, errno.EMFILE, errno.EACCES),
}
_CONFIG: State = {
    "quantize": {"min_elements": 256}, "storage": {"block_elements": 1024}, "refinement": {"keep_last": 1},
}


class Faults(Campaign):
    """System calls that fail."""

    name = "faults"
    full = 1500
    few = 20
    preload = True

    def prepare(self) -> None:
        """Make a run with two checkpoints."""
        for step in (1, 2):
            dsq_ckpt.save(state_at(step), self.directory / "base" / f"step-{step}", config=_CONFIG, no_dist=True)

    def begin(self) -> None:
        """Read what there is, and count the calls of each operation when nothing fails."""
        torch.set_num_threads(1)
        self.work = self.directory / f"lane-{os.getpid()}"
        self.expected = {
            step: subjects.read_all(self.directory / "base" / f"step-{step}") for step in (1, 2)
        }
        self.bases = {
            step: subjects.read_base(self.directory / "base" / f"step-{step}") for step in (1, 2)
        }
        self.calls: dict[str, dict[str, int]] = {}
        for what in ("keyframe", "delta", "overwrite", "async", "exact", *READING):
            self._fresh(what)
            with failing(self.work, None):
                self._do(what)
                self.calls[what] = {kind: counted(kind) for kind in KINDS}

    def kind(self, number: int) -> str:
        """Return the operation."""
        return (*WRITING, *READING)[number % 10]

    def trial(self, number: int) -> Found:
        """Run one operation in which one call fails."""
        rng, what = self.rng(number), self.kind(number)
        self._fresh(what)
        space, kind, error, nth, again = -1, "write", errno.ENOSPC, 1 << 30, False
        if what == "full disk":
            space, what = rng.randrange(24_000), rng.choice(["keyframe", "delta", "overwrite"])
            error = rng.choice([errno.ENOSPC, errno.EDQUOT])
        else:
            kind = rng.choice([kind for kind in _CHANGES if self.calls[what][kind]])
            error = rng.choice(_ERRORS[kind])
            nth = rng.randrange(self.calls[what][kind])
            again = rng.random() < 0.2
        with failing(self.work, kind, nth, error, again, space):
            try:
                value = self._do(what)
                failure = None
            except dsq_ckpt.DSQError as problem:
                value, failure = None, problem
        about = f"{what}, {kind} {nth}{' and later' if again else ''} gives {errno.errorcode[error]}, space {space}"
        if failure is not None and os.strerror(error) not in str(failure) and "interrupted" not in str(failure):
            return Found("wrong", f"{about}: the error does not say so: {told(failure)}")
        if failure is not None and str(self.work) not in str(failure):
            return Found("wrong", f"{about}: the error names no path: {told(failure)}")
        problem_found = self._judged(what, value, failure)
        if problem_found:
            return Found("wrong", f"{about}: {problem_found} ({failure})")
        return Found("detected" if failure is not None else "unchanged")

    def _fresh(self, what: str) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.directory / "base", self.work / "run")
        self.history = dsq_ckpt.SaveHistory()
        if what not in READING:
            subjects.read_like(self.work / "run" / "step-2", history=self.history)  # what comes next continues it

    def _do(self, what: str) -> object:
        run = self.work / "run"
        if what == "load":
            return subjects.read_like(run / "step-2")
        if what == "load all":
            return subjects.read_all(run / "step-2")
        if what == "latest":
            return dsq_ckpt.latest(run)
        if what == "verify":
            return subjects.command("verify", str(run))[0]
        path = run / ("step-2" if what == "overwrite" else "new" if what == "keyframe" else "step-3")
        config = {"system": "exact", **_CONFIG} if what == "exact" else _CONFIG
        if what == "async":
            dsq_ckpt.async_save(state_at(3), path, config=config, history=self.history).result()
        else:
            dsq_ckpt.save(
                state_at(3), path, config=config, parent=None if what == "keyframe" else "auto",
                overwrite=what == "overwrite", no_dist=True, history=self.history,
            )
        return path

    def _judged(self, what: str, value: object, failure: dsq_ckpt.DSQError | None) -> str | None:
        """Return the problem that is found; None if there is none."""
        run = self.work / "run"
        if what == "latest":
            return None if failure is not None or value == str(run / "step-2") else f"latest is {value}"
        if what == "verify":
            return None  # its status may be either: what failed once may have been read again
        if what in READING:
            if failure is not None:
                return None
            wanted = self.expected[2]
            assert isinstance(value, dict)
            return None if same({k: v for k, v in wanted.items() if k in value}, value) else "other values were loaded"
        path = run / ("step-2" if what == "overwrite" else "new" if what == "keyframe" else "step-3")
        for step in (1, 2):
            if run / f"step-{step}" != path and (wrong := self._earlier(run / f"step-{step}", step)):
                return wrong
        complete = (path / "manifest.json").exists()
        if complete:
            try:
                state = subjects.read_all(path)
            except dsq_ckpt.DSQError as error:
                return f"there is a checkpoint that does not load: {told(error)}"
            reported = failure is None or "the checkpoint was committed, but" in str(failure)
            if what == "overwrite" and not reported:
                if not same(state, self.expected[2]):
                    return "the checkpoint was replaced although the save failed"
            elif not reported:
                return "there is a checkpoint although the save failed"
            elif wrong := subjects.far(state, state_at(3)):
                return f"saved, but {wrong}"
        elif failure is None or what == "overwrite":
            return "no checkpoint"
        dsq_ckpt.save(state_at(4), run / "step-9", config=_CONFIG, no_dist=True, history=self.history)
        if wrong := subjects.far(subjects.read_all(run / "step-9"), state_at(4)):
            return f"the next save: {wrong}"
        gc.collect_garbage(run, 0)
        left = [file.name for file in run.rglob("*") if file.name.endswith((".tmp", ".old"))]
        if not complete and path.exists():  # the directory itself may stay
            left += [file.name for file in path.iterdir()]
        if left:
            return f"left behind after gc: {left}"
        return None

    def _earlier(self, path: Path, step: int) -> str | None:
        """Check that an earlier checkpoint has its values, or those of its base layer if its refinement is dropped."""
        try:
            state = subjects.read_all(path)
        except dsq_ckpt.DSQError as error:
            return f"step-{step} does not load any more: {told(error)}"
        if same(state, self.expected[step]):
            return None
        dropped = dsq_ckpt.describe(path)["refinement"] == "dropped"
        return None if dropped and same(state, self.bases[step]) else f"step-{step} has other values"
