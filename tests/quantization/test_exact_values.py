"""Tensors that hold what no training leaves in weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.utils import prune

import dsq_ckpt
from dsq_ckpt.quantization.exact_values import need_exact_storage
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.peak_memory import PeakMemory
from tests.helpers.states import load_copy, relative_error


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def with_one(values: torch.Tensor, value: float) -> torch.Tensor:
    values[7, 9] = value
    return values


def covariance(size: int) -> torch.Tensor:
    data = normal(400, size)
    return data.T @ data / 400


UNLIKE = {
    "a covariance": covariance(300),
    "a covariance but for rounding": covariance(300) * (1 + 2.0**-20 * normal(300, 300).clamp(-4, 4)),
    "a covariance in bfloat16": covariance(90).bfloat16(),
    "covariances": torch.stack([covariance(40), -covariance(40)]),
    "many small covariances": (normal(400000, 3, 1) @ normal(400000, 3, 1).mT),
    "a precision matrix": covariance(90).double().inverse(),
    "a kernel that is nearly diagonal": torch.diag(normal(90)).index_put_(
        (torch.tensor([80, 81]), torch.tensor([81, 80])), torch.tensor(0.5)
    ),
    "more than a block that is symmetric": covariance(1100),
    "a mask": (normal(70, 70) > 0.5).float(),
    "a mask that is nearly always 1": with_one(torch.ones(300, 300), 0.0),
    "one hot": torch.eye(90),
    "a constant": torch.full((70, 70), -0.25),
    "sixteen values": torch.arange(6400.0).view(80, 80) % 16 - 8,
    "variances": normal(90, 90).square() + 1e-12,
    "variances in bfloat16": normal(90, 90).square().bfloat16(),
    "sparse counts": (normal(300, 300) > 3).double() * 7,
    "variances of columns": normal(90, 80).square().t(),
    "one number": torch.tensor(3.0),
    "numbers of tokens, -1 for none": torch.arange(6400.0).view(80, 80) - 1,
    "distances": torch.arange(90.0)[:, None] - torch.arange(90),
    "labels in bfloat16": (torch.arange(6400.0).view(80, 80) % 101 - 1).bfloat16(),
    "a mask to be added": torch.zeros(90, 90).masked_fill_(normal(90, 90) > 0.5, -float("inf")),
    "every other column of a mask": (normal(90, 180) > 0.5).bfloat16()[:, ::2],
    "more than a block": with_one((normal(1100, 1000) > 0.5).float(), 2.0),
}
LIKE = {
    "a covariance with one value changed": with_one(covariance(300), 0.5),
    "matrices of which one is symmetric": torch.stack([covariance(70), normal(70, 70)]),
    "many small matrices of which the last is not symmetric": torch.cat(
        [normal(400000, 3, 1) @ normal(400000, 3, 1).mT, normal(1, 3, 3)]
    ),
    "a diagonal of weights": torch.diag(normal(90)),
    "a matrix that is skew": normal(90, 90) - normal(90, 90).T,
    "weights": normal(300, 300),
    "weights in bfloat16": normal(64, 64).bfloat16(),
    "pruned weights": normal(300, 300) * (normal(300, 300).flip(0) > 1.6),
    "weights of which one is negative": with_one(normal(300, 300).abs(), -1.0),
    "seventeen values": (torch.arange(6400.0).view(80, 80) % 17 - 8) / 16,
    "whole numbers and one fraction": with_one(torch.arange(6400.0).view(80, 80) - 50, 0.5),
    "numbers too large for fractions": normal(90, 90) * 2.0**40,
    "numbers too large for fractions in bfloat16": (normal(90, 90) * 2000).bfloat16(),
    "channels last": normal(8, 8, 9, 9).to(memory_format=torch.channels_last),
    "zeros, as training begins": torch.zeros(70, 70),
    "nothing": torch.empty(0, 3),
    "NaN": torch.full((70, 70), float("nan")),
    "variances of which one is infinite": with_one(normal(90, 90).square(), float("inf")),
    "every other column": normal(90, 180)[:, ::2],
}


def test_checks_of_many_tensors_at_once_agree() -> None:
    assert UNLIKE.keys().isdisjoint(LIKE)
    results = need_exact_storage([*UNLIKE.values(), *LIKE.values()])
    assert dict(zip([*UNLIKE, *LIKE], results, strict=True)) == dict.fromkeys(UNLIKE, True) | dict.fromkeys(LIKE, False)


@pytest.mark.parametrize("name", UNLIKE)
def test_an_element_makes_the_difference(name: str) -> None:
    """Wherever it lies: the whole tensor is looked at before it is taken for something else than weights."""
    values = UNLIKE[name].clone().contiguous()
    for place in {0, values.numel() // 3, values.numel() - 1}:
        changed = values.clone()
        changed.view(-1)[place] = float("nan")
        assert need_exact_storage([changed]) == [False]


def with_diagonal(values: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    values.diagonal(dim1=-2, dim2=-1).fill_(sign)[..., 1::3] *= -1
    return values


@pytest.mark.parametrize("shape", [(90, 60), (60, 90), (70, 70), (12, 40, 30), (3, 2, 40, 30)])
def test_signs_all_along_the_diagonal_are_kept(shape: tuple[int, ...]) -> None:
    """All matrices of a tensor count, in any type and memory layout; a diagonal that is a little off does not."""
    signs = [with_diagonal(normal(*shape)), with_diagonal(normal(*shape), -1.0).bfloat16(),
             with_diagonal(normal(*shape)).mT, with_diagonal(normal(*shape).mT.contiguous()).double()]
    assert need_exact_storage(signs) == [True] * len(signs)
    for place in (0, 17, -1):
        changed = with_diagonal(normal(*shape))
        changed.diagonal(dim1=-2, dim2=-1)[..., place].view(-1)[-1] *= 0.9998
        assert need_exact_storage([changed]) == [False]


@pytest.mark.parametrize(("orthogonal_map", "trivial"), [
    ("householder", False), ("householder", True), ("matrix_exp", True), ("cayley", True),
])
def test_orthogonal_layers_stay_orthogonal(tmp_path: Path, orthogonal_map: str, trivial: bool) -> None:
    """However often they are restored; a layer of 64 x 128, whose signs torch makes whole numbers of."""
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.orthogonal(
        torch.nn.Linear(128, 64), orthogonal_map=orthogonal_map, use_trivialization=trivial
    )
    inputs = normal(64, 128)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    for number in range(3):
        for _ in range(4):
            optimizer.zero_grad()
            (layer(inputs) - inputs[:, :64]).square().mean().backward()
            optimizer.step()
        state = {"layer": layer.state_dict()}
        dsq_ckpt.save(state, tmp_path / str(number))
        loaded = load_copy(tmp_path / str(number), state)["layer"]
        original = "parametrizations.weight.original"
        assert loaded[original].diagonal().equal(state["layer"][original].diagonal())
        layer.load_state_dict(loaded)
        assert torch.dist(layer.weight @ layer.weight.T, torch.eye(64)) < 1e-4


def test_masks_and_variances_come_back_as_they_were(tmp_path: Path) -> None:
    """`torch.nn.utils.prune`, and an Adam of one's own in plain dicts; weights beside them are quantized."""
    torch.manual_seed(0)
    layer = prune.l1_unstructured(torch.nn.Linear(80, 90), "weight", amount=0.4)
    gradient = normal(90, 80)
    averages = {
        "m": {"w": gradient}, "v": {"w": gradient**2}, "exp_avg": {"w": gradient}, "exp_avg_sq": {"w": gradient**2},
    }
    for number in range(3):
        state = {"model": dict(layer.state_dict()), **averages, "opt_state": {"w": gradient}}
        path = tmp_path / "run" / str(number)
        dsq_ckpt.save(state, path)
        loaded = load_copy(path, state)
        assert torch.equal(loaded["model"]["weight_mask"], layer.weight_mask)
        assert not torch.equal(loaded["model"]["weight_orig"], layer.weight_orig)
        for name in ("v", "exp_avg", "exp_avg_sq", "opt_state"):
            assert torch.equal(loaded[name]["w"], state[name]["w"]), name
        layer.weight_orig.data += 1e-3 * normal(90, 80)
        for value in (part["w"] for part in averages.values()):
            value.mul_(0.9 + 0.01 * number)


def test_a_rule_that_names_a_group_has_the_last_word(tmp_path: Path) -> None:
    state = {"mask": (normal(70, 70) > 0.5).float()}
    dsq_ckpt.save(state, tmp_path / "1", config={"quantize": {"rules": [{"pattern": "mask", "group": "masks"}]}})
    assert Manifest.read(tmp_path / "1").kinds.keys() == {"weights"}


def test_a_mask_becomes_weights(tmp_path: Path) -> None:
    """A chain goes on, whichever a tensor was before."""
    states = [
        {"w": values, "other": normal(60, 90)}
        for values in (torch.ones(70, 70), normal(70, 70), torch.ones(70, 70), normal(70, 70), normal(70, 70) + 1e-3)
    ]
    for number, state in enumerate(states):
        path = tmp_path / "run" / str(number)
        dsq_ckpt.save(state, path)
        loaded = load_copy(path, state)["w"]
        assert torch.equal(loaded, state["w"]) == (number in (0, 2))
        assert relative_error(state["w"], loaded) < 0.02
    assert dsq_ckpt.describe(path)["depth"] == 4


def test_long_rows_are_looked_at_in_parts():
    """Few of them have products as small as those of orthogonal rows, so that all of them is looked at."""
    weights = [normal(1 << 20, 8), normal(8, 1 << 20)]
    with PeakMemory() as memory:
        assert need_exact_storage(weights) == [False, False]
    assert memory.peak <= 16 << 20
