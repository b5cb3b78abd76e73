"""Recorded checkpoints as the plain tensors that peers compress: weights, and Adam's two moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evaluation.recording import load_recording
from evaluation.workloads import Workload

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """One checkpoint.

    Attributes:
        step: Steps before it.
        loss: Held-out loss of the weights as they were recorded.
        weights: By name, float32 or bfloat16; of tied ones only the first.
        moments: By kind, then by the name of the weight; empty where only weights are compressed.
        rest: What is kept as it is, among it the whole optimizer's state where no moments are compressed.
    """

    step: int
    loss: float
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    rest: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors without compression."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors under names of their own."""
        moments = {f"{kind}/{name}": value for kind, group in self.moments.items() for name, value in group.items()}
        return {f"weights/{name}": value for name, value in self.weights.items()} | moments

    def with_tensors(self, change: Callable[[str, Tensor], Tensor]) -> State:
        """Return the state with every tensor replaced, by its name in `tensors()`."""
        return replace(
            self, weights={name: change(f"weights/{name}", value) for name, value in self.weights.items()},
            moments={
                kind: {name: change(f"{kind}/{name}", value) for name, value in group.items()}
                for kind, group in self.moments.items()
            },
        )


def read(directory: Path, moments: bool, dtype: torch.dtype = torch.float32) -> Iterator[State]:
    """Yield the checkpoints of a recording, step 0 first.

    Args:
        directory: Of the recording.
        moments: Whether Adam's moments are compressed too.
        dtype: What weights are cast to.

    Raises:
        ValueError: A model holds other tensors than float32, or moments are wanted and the optimizer has none.
    """
    for checkpoint in load_recording(directory).checkpoints:
        model, optimizer = checkpoint["model"], checkpoint["optimizer"]["state"]
        weights, seen = {}, set()
        for name, value in model.items():
            if value.dtype != torch.float32:
                raise ValueError(f"{directory}: {name} is {value.dtype}; peers are compared on models of float32 only")
            if value.data_ptr() not in seen:  # tied weights are stored once
                weights[name] = value.to(dtype)
            seen.add(value.data_ptr())
        moments_found = {}
        if moments:
            moments_found = {
                kind: {name: optimizer[name][kind] for name in weights if kind in optimizer.get(name, {})}
                for kind in MOMENTS
            }
            if any(group.keys() != weights.keys() for group in moments_found.values()):
                raise ValueError(f"{directory}: not every weight has Adam's moments; compare its weights alone")
        rest = {"model": model, "optimizer": checkpoint["optimizer"]}
        yield State(checkpoint["step"], checkpoint["loss"], weights, moments_found, rest)


def restore(run: Workload, state: State) -> None:
    """Put a state that a peer gave back into a run."""
    before: Mapping[str, Tensor] = state.rest["model"]
    places = {before[name].data_ptr(): value.float() for name, value in state.weights.items()}
    model = {name: places[value.data_ptr()] for name, value in before.items()}
    optimizer = dict(state.rest["optimizer"])
    optimizer["state"] = {
        name: entry | {kind: group[name] for kind, group in state.moments.items() if name in group}
        for name, entry in optimizer["state"].items()
    }
    run.restore({"model": model, "optimizer": optimizer})
