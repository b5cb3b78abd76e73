"""A recorded run through a peer: at each checkpoint the most compressing knob that keeps the bound, and what it costs.

Peers code differences to what their own last checkpoint came back as. The state at step 0, which the seed makes, is
given to them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from dsq_ckpt.storage.manifest import Manifest
from evaluation import create
from evaluation.offline import system_config
from evaluation.peers.states import State, read, restore
from evaluation.recording import load_recording
from evaluation.replay import Replayed, replay
from evaluation.report import Row
from evaluation.workloads import Workload

CONTINUED_STEPS, CONTINUED = 20, 4
"""How far, and from how many checkpoints of a run, training is continued to see what lossy moments cost."""
Report = Callable[[str], None]


class Peer(Protocol):
    """A compressor. `seconds`, `start` and `accept` are used where it has them; see `NNCodec`."""

    @property
    def name(self) -> str: ...

    @property
    def knobs(self) -> Sequence[Any]: ...

    def encode(self, state: State, before: State, knob: Any) -> bytes: ...

    def decode(self, data: bytes, before: State) -> State: ...


class Try(NamedTuple):
    """A checkpoint at one knob: its bytes, what came back, the relative rise of the loss, and seconds of both ways."""

    data: bytes
    back: State
    degradation: float
    compress: float
    decompress: float


@dataclass
class Figures:
    """Figures of a row, summed over the checkpoints of a run."""

    raw: int = 0
    points: list[Row] = field(default_factory=list)
    continued: list[float] = field(default_factory=list)

    def row(self) -> Row:
        """Return the row."""
        degradations = [point["degradation"] for point in self.points]
        row: Row = {
            "bytes": sum(point["bytes"] for point in self.points), "raw_bytes": self.raw, "checkpoints": self.points,
            "degradation_mean": statistics.mean(degradations), "degradation_final": degradations[-1],
            "degradation_max": max(degradations),
            "missed": sum(not point["satisfied"] for point in self.points),
            "continued": statistics.mean(self.continued) if self.continued else None,
        }
        each = self.raw / len(self.points) / 1e6
        later = sum(point["bytes"] for point in self.points[1:])
        for which in ("compress", "decompress"):  # medians: machines have slow moments
            row[which] = each / statistics.median(point[f"{which}_seconds"] for point in self.points)
        row["ratio"] = self.raw / row["bytes"]
        row["ratio_later"] = 1e6 * each * (len(self.points) - 1) / later if later else None
        return row


class Continuation:
    """Rise of the held-out loss after some more steps from a restored state, against the same steps from the exact."""

    def __init__(self, directory: Path) -> None:
        run = _run(directory)
        steps = [row["step"] for row in load_recording(directory).info["checkpoints"]]
        usable = [step for step in steps if step and step + CONTINUED_STEPS <= run.steps]
        self.steps = usable[:: max(1, -(-len(usable) // CONTINUED))]
        self._exact: dict[int, float] = {}
        for state in read(directory, moments=True):
            if state.step in self.steps:
                restore(run, state)
                self._exact[state.step] = self._train(run, state.step)

    def rise(self, run: Workload, step: int) -> float:
        """Train a run on from the state that it is in, and return the relative rise."""
        return self._train(run, step) / self._exact[step] - 1

    def _train(self, run: Workload, step: int) -> float:
        run.train(step, step + CONTINUED_STEPS)
        return run.evaluate()


def walk(
    directory: Path, peer: Peer, epsilon: float | None, *, moments: bool, dtype: torch.dtype = torch.float32,
    lossless: bool = False, continuation: Continuation | None = None, report: Report = lambda line: None,
) -> Row:
    """Compress a recorded run with a peer.

    Args:
        directory: Of the recording.
        peer: The compressor.
        epsilon: Largest relative rise of the held-out loss at a checkpoint; None: the peer's first knob always.
        moments: Whether Adam's moments are compressed too.
        dtype: Of the weights.
        lossless: What comes back must be the same bit for bit, and is not evaluated.
        continuation: Trains on from some of the restored states.
        report: Called with a line per checkpoint.

    Raises:
        ValueError: Something lossless gave other bits back.
    """
    run = _run(directory)
    states, figures = read(directory, moments, dtype), Figures()
    before, place = next(states), 0
    _tell(peer, "start")
    for state in states:
        before = State(state.step, state.loss, before.weights, before.moments, state.rest)
        tried: dict[int, Try] = {}

        def keeps(place: int, state: State = state, before: State = before, tried: dict[int, Try] = tried) -> bool:
            data, compress = _timed(peer, peer.encode, state, before, peer.knobs[place])
            back, decompress = _timed(peer, peer.decode, data, before)
            degradation = _same(state, back) if lossless else _degradation(run, state, back)
            tried[place] = Try(data, back, degradation, compress, decompress)
            return epsilon is None or degradation <= epsilon

        place = first_that(keeps, len(peer.knobs), place)
        data, back, degradation, compress, decompress = tried[place]
        if list(tried)[-1] != place:  # `accept` is about what was decoded last
            peer.decode(data, before)
        _tell(peer, "accept")
        figures.raw += state.nbytes
        figures.points.append({
            "step": state.step, "bytes": len(data), "degradation": degradation, "knob": peer.knobs[place],
            "satisfied": epsilon is None or degradation <= epsilon, "compress_seconds": compress,
            "decompress_seconds": decompress,
        })
        if continuation is not None and moments and not lossless and state.step in continuation.steps:
            restore(run, back)
            figures.continued.append(continuation.rise(run, state.step))
        before = back
        report(f"  step {state.step}: {state.nbytes / len(data):.1f}x, {degradation:+.2%}, {peer.knobs[place]}")
    return figures.row()


def first_that(keeps: Callable[[int], bool], count: int, guess: int) -> int:
    """Return the first of so many knobs that keeps a bound, the last if none does; gentler knobs than one keep it too.

    Steps from the guess are doubled until the bound is crossed, then halved. What is returned was tried.
    """
    broken, kept, step, place = -1, count, 1, guess
    while kept - broken > 1:
        if keeps(place):
            kept = place
        else:
            broken = place
        if broken < 0:
            place = max(kept - step, 0)
        elif kept == count:
            place = min(broken + step, count - 1)
        else:
            place = (broken + kept) // 2
        step *= 2
    return min(kept, count - 1)


def walk_ours(
    directory: Path, epsilon: float, *, moments: bool, sensitivity: float | None = None,
    continuation: Continuation | None = None, report: Report = lambda line: None,
) -> Iterator[Row]:
    """Compress a recorded run with `dsq`, and yield a row of base layers alone and one with refinement layers.

    The keyframe is counted. Times are those of saves and loads of files, refinement
    layers included, without the search. `sensitivity` is the strength of the gradients in the steps of weights; None:
    the default.
    """
    figures = {False: Figures(), True: Figures()}
    sizes = {state.step: state.nbytes for state in read(directory, moments)}

    def visit(run: Workload, point: Replayed, path: Path, refined: bool) -> None:
        degradation = (point.refined_loss if refined else point.base_loss) / point.loss - 1
        refinement = Manifest.read(path).sum_bytes("refinement")
        own_figures = figures[refined]
        own_figures.raw += sizes[point.step]
        own_figures.points.append({
            "step": point.step, "bytes": point.files + (refinement if refined else 0), "degradation": degradation,
            "satisfied": degradation <= epsilon, "knob": (point.quality or {}).get("chosen"),
            "compress_seconds": point.seconds_save - point.seconds_search, "decompress_seconds": point.seconds_load,
        })
        if continuation is not None and moments and point.step in continuation.steps:
            own_figures.continued.append(continuation.rise(run, point.step))

    parts = ("model", "optimizer") if moments else ("model",)
    replay(directory, system_config("dsq", epsilon, sensitivity), parts=parts, visit=visit, report=report)
    name = "dsq" if sensitivity is None else f"dsq, sensitivity {sensitivity:g}"
    for refined, own_figures in figures.items():
        if own_figures.points:
            yield {"name": f"{name}, refined" if refined else name, "sensitivity": sensitivity} | own_figures.row()


def _run(directory: Path) -> Workload:
    recorded = load_recording(directory).info["settings"]
    return create(recorded["workload"], recorded["seed"])


def _timed(peer: Peer, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return what a call gives, and its seconds: those that the peer counted itself, where it did."""
    started = time.perf_counter()
    result = call(*arguments)
    return result, getattr(peer, "seconds", 0.0) or time.perf_counter() - started


def _tell(peer: Peer, what: str) -> None:
    if hasattr(peer, what):
        getattr(peer, what)()


def _degradation(run: Workload, state: State, back: State) -> float:
    """Return the relative rise of the held-out loss with the weights that came back."""
    restore(run, back)
    return run.evaluate() / state.loss - 1


def _same(state: State, back: State) -> float:
    """Return 0, if every tensor came back bit for bit."""
    tensors = back.tensors()
    for name, value in state.tensors().items():
        if not torch.equal(value.flatten().view(torch.uint8), tensors[name].flatten().view(torch.uint8)):
            raise ValueError(f"step {state.step}: {name} came back with other bits from a lossless coder")
    return 0.0
