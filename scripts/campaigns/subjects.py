"""Checkpoints that are altered, what they hold, and how what is read from an altered one is judged."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from typer.testing import CliRunner

import dsq_ckpt
from campaigns.harness import Found, told
from dsq_ckpt.cli import app
from tests.helpers.states import find_differences, flatten, make_blank, relative_error
from tests.helpers.states import is_equal as equal

State = dict[str, Any]
SUBJECTS = ("deltas", "differences", "exact")
_SMALL: State = {"quantize": {"min_elements": 256}, "storage": {"block_elements": 1024, "fsync": False}}
FINE_MOMENTS: State = {"exp_avg": {"codebook": {"fit": "update", "step": 1}}}
"""Cells of first moments in which base layers hold more than zeros; `far` compares these."""
_CONFIGS: dict[str, State] = {
    "deltas": {"refinement": {"max_differences": 3}, **_SMALL},
    "differences": {"system": "lc", **_SMALL},
    "exact": {"system": "exact", **_SMALL},
}
_PERTURB = -6  # of mallopt: memory that is allocated is filled with a byte


def state_at(step: int, seed: int = 0) -> State:
    """Return a state with every kind of value, in few elements; a function of the step."""
    start, drift = (torch.Generator().manual_seed(seed * 1000 + n) for n in (1, 2))

    def moving(*shape: int, scale: float = 0.02, speed: float = 0.05) -> torch.Tensor:
        base, change = (torch.randn(*shape, generator=generator) for generator in (start, drift))
        return scale * (base + speed * step * change)

    # Large weights are slow enough for refinement to be stored as a difference.
    weights = {"linear.weight": moving(48, 40, speed=0.02), "embed.weight": moving(64, 16, speed=0.02)}
    weights["bias"] = moving(40)
    weights["embed.weight"][3, 3] = 40.0 + step
    weights["tied.weight"] = weights["embed.weight"]
    weights["half.weight"] = moving(24, 32).bfloat16()
    moments = {}
    for name in ("linear.weight", "embed.weight"):
        squares = moving(*weights[name].shape).square() + 1e-6
        # As Adam's are, most first moments are small for their element, so that their refinement is coded.
        first = squares.sqrt() * moving(*weights[name].shape, scale=1.0) ** 3 / 4
        moments[name] = {"exp_avg": first, "exp_avg_sq": squares, "step": torch.tensor(float(step))}
    meta = {
        "step": step, "name": "run ü", "blob": bytes(range(64)), "none": None, "history": [1, 2.5, torch.arange(3), {}],
        "counts": torch.arange(50), "flags": torch.tensor([True, False]), "empty": torch.empty(0, 3),
    }
    return {"model": weights, "optimizer": {"state": moments}, "meta": meta}


def make(directory: Path) -> None:
    """Make a run of each subject, another save of the same state each, and their contents; always by the same names."""
    rng = random.Random(0)
    with mock.patch("uuid.uuid4", lambda: uuid.UUID(int=rng.getrandbits(128))):
        _make(directory)


def _make(directory: Path) -> None:
    expected: dict[str, Any] = {}
    for name, config in _CONFIGS.items():
        for run, seed in ((name, 0), (f"{name}-victim", 0), (f"{name}-other", 5)):
            history = dsq_ckpt.SaveHistory()
            for step in range(1, 4):
                path, pinned = directory / run / f"step-{step}", step == 1
                dsq_ckpt.save(state_at(step, seed), path, config=config, pinned=pinned, no_dist=True, history=history)
        expected[name] = {
            kind: read(directory / name / "step-3") for kind, read in (("like", read_like), ("all", read_all))
        }
        if name == "differences":
            dsq_ckpt.merge(directory / name / "step-3", directory / "merged")
            shutil.rmtree(directory / name / "step-3")
            (directory / "merged").rename(directory / name / "step-3")
            assert find_differences(read_all(directory / name / "step-3"), expected[name]["all"]) == []
    torch.save(expected, directory / "expected.pt")


def poisoned(byte: int) -> None:
    """Let memory that is not written to hold this byte."""
    ctypes.CDLL(None).mallopt(_PERTURB, byte)


def read_like(path: Path, poison: int = 85, history: dsq_ckpt.SaveHistory | None = None) -> State:
    """Return the tensors, loaded into tensors of the right shapes; saves with the same history continue from there."""
    poisoned(poison)
    state = make_blank({name: part for name, part in state_at(3).items() if name != "meta"})
    dsq_ckpt.load(state, path, no_dist=True, history=history or dsq_ckpt.SaveHistory())
    return state


def read_all(
    path: Path, poison: int = 85, refinement: bool | Literal["auto"] = "auto",
    history: dsq_ckpt.SaveHistory | None = None,
) -> State:
    """Load all values into an empty dict; saves with the same history continue from there."""
    poisoned(poison)
    state: State = {}
    dsq_ckpt.load(state, path, no_dist=True, refinement=refinement, history=history or dsq_ckpt.SaveHistory())
    return state


def read_base(path: Path) -> State:
    """Load all values without refinement."""
    return read_all(path, refinement=False)


def config_of(name: str) -> State:
    """Return the configuration that a subject is saved with."""
    return _CONFIGS[name]


def far(state: State, truth: State, refined: bool = True) -> str | None:
    """Return the name of a value that is not close to the saved one, or not equal where required; None: all are."""
    near = 0.2 if refined else 0.9
    tensors, wanted = flatten(state), flatten(truth)
    if tensors.keys() != wanted.keys():
        return f"names {sorted(tensors.keys() ^ wanted.keys())}"
    for name, value in wanted.items():
        other = tensors[name]
        if not isinstance(value, torch.Tensor):
            if type(other) is not type(value) or other != value:
                return name
        elif not value.is_floating_point() or value.ndim < 2:
            if not equal(other, value):
                return name
        elif value.numel() and not relative_error(value, other) < (0.9 if "exp_avg" in name else near):
            return f"{name}: relative error {relative_error(value, other):.3f}"
    return None


def same(one: State, other: State) -> bool:
    """Return whether two states are the same, bit for bit."""
    return find_differences(one, other) == []


def refuses(work: Callable[[], Any], path: Path) -> Found | None:
    """Return None on success, else "detected", or "wrong" for an error that names no file, tensor or object.

    Raises:
        Exception: it failed otherwise.
    """
    try:
        work()
    except dsq_ckpt.DSQError as error:
        known = [str(path), *(file.name for file in path.iterdir()), *flatten(state_at(3))]
        if any(name in str(error) for name in known):
            return Found("detected")
        return Found("wrong", f"the error names nothing: {told(error)}")
    return None


def command(*arguments: str) -> tuple[int, str]:
    """Return status and output of `dsq`.

    Raises:
        Exception: it ended in a traceback.
    """
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "\x1b" in result.output:
        raise AssertionError(f"dsq {' '.join(arguments)} sends escape sequences of names to the terminal")
    return result.exit_code, result.output


_CHANGES = {
    "open": slice(1), "os.rename": slice(2), "os.link": slice(1, 2), "os.symlink": slice(1, 2), "os.mkdir": slice(1),
    "os.remove": slice(1), "os.rmdir": slice(1), "os.truncate": slice(1),
}
"""Audit events of what changes files, and which of their arguments are paths that change."""
_OURS = ("/dev/null", "/proc", os.path.dirname(dsq_ckpt.__file__))
"""Places that are written to anyway; the package's directory has compiled kernels."""
_watched: dict[str, Any] = {}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event == "pickle.find_class" and arguments[0] in ("os", "posix", "subprocess", "builtins", "pathlib"):
        _watched["seen"].append(f"unpickled {arguments[0]}.{arguments[1]}")
    if event not in _CHANGES or (event == "open" and not _writes(arguments)):
        return
    if event in ("os.remove", "os.rmdir") and arguments[1] != -1:  # `shutil.rmtree`, which walks by descriptors
        return
    paths = arguments[_CHANGES[event]]
    for path in paths:
        if isinstance(path, (str, Path)) and not os.path.abspath(path).startswith(_watched["allowed"]):
            _watched["seen"].append(f"{event} {path}")


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Return whether the arguments of the event `open` ask for more than reading."""
    mode, flags = arguments[1:3]
    return (isinstance(mode, str) and set(mode) & set("wax+") != set()) or (isinstance(flags, int) and flags & 3 != 0)


@contextmanager
def watched(*allowed: Path) -> Iterator[list[str]]:
    """Collect writes outside of some directories, and unpickling beyond plain data, while the block lasts."""
    if "hook" not in sys.modules[__name__].__dict__:
        sys.addaudithook(_audit)
        sys.modules[__name__].__dict__["hook"] = True
    seen: list[str] = []
    _watched.update(seen=seen, allowed=(*map(str, allowed), *_OURS))
    try:
        yield seen
    finally:
        _watched.clear()
