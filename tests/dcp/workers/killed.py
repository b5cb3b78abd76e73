"""A run whose process is killed again and again: argv = run directory, sync, async or overwrite, kills, seed.

This process imports everything once and forks: children that save until they are killed, and children that check
what is left. It never computes anything itself, so that its children start clean.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

import dsq_ckpt
from dsq_ckpt.checkpoint import Checkpoint
from dsq_ckpt.manifest import Manifest
from tests.states import loaded, relative_error

CONFIG = {"delta": {"max_chain": 10}}
CALLS = dsq_ckpt.save, dsq_ckpt.async_save, dsq_ckpt.load  # imported here, where children find them


def main() -> None:
    run, mode, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rng = random.Random(seed)
    for kill in range(kills):
        reader, writer = os.pipe()
        child = forked(lambda: train(run, mode, writer))  # noqa: B023
        os.close(writer)
        # Counted in saves, so that a busy machine changes nothing; the moment within one is left to chance.
        saves = sum(len(os.read(reader, 1)) for _ in range(rng.randint(2, 4)))
        time.sleep(rng.uniform(0.0, 0.2))
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert saves >= 2 and os.WTERMSIG(status) == signal.SIGKILL, f"the child died of something else: {status}"
        assert os.waitpid(forked(lambda: check(run)), 0)[1] == 0, f"after kill {kill}, seed {seed}"
    assert os.waitpid(forked(lambda: finish(run, mode, kills)), 0)[1] == 0, f"seed {seed}"


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        warnings.simplefilter("ignore")
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def weights(layer: int, step: int) -> torch.Tensor:
    """float32[100, 100], a function of layer and step."""
    start = torch.randn(100, 100, generator=torch.Generator().manual_seed(layer)) * 0.02
    drift = torch.randn(100, 100, generator=torch.Generator().manual_seed(100 + layer)) * 0.0005
    return start + drift * step


def state_at(step: int) -> dict[str, object]:
    return {"model": {f"layer{n}.weight": weights(n, step) for n in range(3)}, "step": step}


def train(run: Path, mode: str, saved: int) -> None:
    """Resume from the newest checkpoint and save without end."""
    state = state_at(0)
    newest = dsq_ckpt.latest(run)
    if newest is not None:
        dsq_ckpt.load(state, newest)
    step = state["step"]
    assert isinstance(step, int)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    while True:
        step += 1
        path = run / f"step-{step:06d}"  # what a killed save left there is in nobody's way
        if mode == "overwrite":
            dsq_ckpt.save(state_at(step), run / "last", config=CONFIG, overwrite=True)
        elif mode == "async":
            dsq_ckpt.async_save(state_at(step), path, config=CONFIG)
        else:
            dsq_ckpt.save(state_at(step), path, config=CONFIG)
        with suppress(BrokenPipeError):
            os.write(saved, b"x")  # of an asynchronous one: the one before is complete


def check(run: Path) -> None:
    """Whatever has a manifest is whole; the newest holds what was saved."""
    complete = [path for path in sorted(run.glob("*")) if (path / "manifest.json").exists()]
    newest = dsq_ckpt.latest(run)
    print(f"{len(complete)} complete, {len(list(run.glob('*')))} directories, newest {newest}")
    for path in complete:
        with Checkpoint(path) as checkpoint:
            problems = [problem for _, _, problem in checkpoint.verify() if problem]
            assert not problems, (path, problems)
    if newest is None:
        assert not complete
        return
    assert newest == str(complete[-1])
    for path in complete[-3:]:
        state = loaded(path, state_at(0))
        assert path.name in ("last", f"step-{state['step']:06d}")
        truth = state_at(state["step"])
        assert Manifest.read(path).refinement == "kept" or path != complete[-1]
        limit = 0.02 if Manifest.read(path).refinement == "kept" else 0.3
        for name, value in truth["model"].items():  # type: ignore[attr-defined]
            assert relative_error(value, state["model"][name]) < limit, (path, name)


def finish(run: Path, mode: str, kills: int) -> None:
    """There were chains, and a new process continues the last one."""
    check(run)
    newest = dsq_ckpt.latest(run)
    assert newest is not None
    depths = [Manifest.read(path).depth for path in sorted(run.glob("*")) if (path / "manifest.json").exists()]
    if mode != "overwrite":
        assert len(depths) >= kills and max(depths) == 10, depths
    state = loaded(newest, state_at(0))
    assert state["step"] >= kills, state["step"]
    dsq_ckpt.save(state, run / "step-999999")
    manifest = Manifest.read(run / "step-999999")
    assert manifest.depth == (0 if depths[-1] >= 32 else depths[-1] + 1), manifest.depth
    check_last = loaded(run / "step-999999", state_at(0))
    assert check_last["step"] == state["step"]


if __name__ == "__main__":
    main()
