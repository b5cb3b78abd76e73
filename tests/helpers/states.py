"""State dicts that tests save, and how their copies are compared."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint

KEEP_ONE = {"refinement": {"keep_last": 1}}
FINE = {"quantize": {
    "exp_avg": {"codebook": {"error": 0.05}}, "exp_avg_sq": {"refinement_bits": 3, "codebook": {"bins": 6}},
}}
"""Fine enough to tell moments that are wrong from those that are rough, as they are by default."""


def mixed_state(seed: int = 0) -> dict[str, Any]:
    """Every kind of value a training state holds; tensors named `lossy.*` are large enough to be quantized."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * scale

    return {
        "lossy": {
            "linear.weight": normal(96, 64),
            "embed.weight": normal(128, 48),
            "conv.weight": normal(16, 16, 5, 5),
            "half.weight": normal(64, 80).half(),
            "brain.weight": normal(64, 80).bfloat16(),
            "double.weight": normal(64, 80).double(),
            "turned.weight": normal(64, 96).t(),
            "strided.weight": normal(64, 2, 80)[:, 1],
        },
        "small": {
            "bias": normal(64),
            "scalar": torch.tensor(3.25),
            "scalar_double": torch.tensor(1 / 3, dtype=torch.float64),
            "flag": torch.tensor(True),
            "empty": torch.empty(0),
            "empty2": torch.empty(3, 0, 5),
            "weight": normal(63, 65),
            "one": normal(1, 1, 1),
            "complex": torch.randn(7, 3, generator=g, dtype=torch.complex64),
        },
        "counts": {
            "long": torch.randint(-(2**62), 2**62, (100, 50), generator=g),
            "int": torch.arange(-5, 5, dtype=torch.int32),
            "short": torch.arange(7, dtype=torch.int16),
            "byte": torch.randint(0, 256, (90, 90), generator=g, dtype=torch.uint8),
            "mask": torch.rand(90, 90, generator=g) > 0.5,
        },
        "meta": {
            "step": 1234, "lr": 3e-4, "name": "run ü", "blob": bytes(range(256)), "on": True, "none": None,
            "history": [1, 2.5, "three", torch.full((3,), 7.0)], "where": (1, 2),
        },
    }


def perturb(state: dict[str, Any], seed: int, scale: float = 0.002) -> dict[str, Any]:
    """A copy whose floating-point tensors took a step."""
    g = torch.Generator().manual_seed(seed)
    after = copy.deepcopy(state)
    for value in flat_tensors(after).values():
        if value.is_floating_point() and value.dim():
            step = torch.randn(value.shape, generator=g) * scale
            value += step.to(value.dtype)
    return after


def make_blank(state: dict[str, Any]) -> dict[str, Any]:
    """The same tree with every tensor overwritten and every number changed."""
    empty = copy.deepcopy(state)
    for value in flat_tensors(empty).values():
        value.fill_(1)
    if isinstance(empty.get("meta"), dict):
        empty["meta"].update(step=0, lr=0.0, name="", blob=b"", on=False, none=1, where=())
    return empty


def load_copy(path: Path | str, like: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What the checkpoint at `path` holds, in a tree like `like`."""
    state = make_blank(like)
    dsq_ckpt.load(state, path, **options)
    return state


def read_bits(path: Path) -> dict[str, int]:
    """The refinement bits of each tensor of a checkpoint."""
    bits: dict[str, int] = {}
    with Checkpoint(path) as checkpoint:
        for chunk, ref in checkpoint.iter_chunks():
            layer = path / ref.file.replace(".dsq", ".refinement")
            records = checkpoint.open_reader(layer.name).contents["records"] if layer.exists() else {}
            bits[chunk.fqn] = records.get(str(ref.record), {"bits": 0})["bits"]
    return bits


def flatten(state: dict[str, Any]) -> dict[str, Any]:
    return flatten_state_dict(state)[0]


def flat_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {fqn: value for fqn, value in flatten(state).items() if isinstance(value, torch.Tensor)}


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes: equal for equal NaNs, different for zeros of different sign."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and to_bytes(a) == to_bytes(b)


def find_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names whose values are not the same, bit for bit."""
    left, right = flatten(a), flatten(b)
    wrong = sorted(set(left) ^ set(right))
    for fqn in left.keys() & right.keys():
        x, y = left[fqn], right[fqn]
        equal = is_equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else (
            type(x) is type(y) and x == y
        )
        if not equal:
            wrong.append(fqn)
    return wrong


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((a.double() - b.double()).norm() / a.double().norm())


class DecodedCheckpoints:
    """What a run's checkpoints decode to now, to be compared with later."""

    def __init__(self, like: dict[str, Any], *paths: Path) -> None:
        self.like = like
        self.values = {path: load_copy(path, like) for path in paths}

    def check(self) -> None:
        """Every checkpoint still loads to the same bits."""
        for path, value in self.values.items():
            assert find_differences(load_copy(path, self.like), value) == [], path
