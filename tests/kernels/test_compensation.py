"""Codes that make up for each other's errors, against the update of an inverse as Optimal Brain Surgeon has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsq_ckpt import kernels
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.compensation import _DAMPING, ErrorSpread

STEP, HALF = 0.25, 31
LEVELS = (STEP * np.concatenate([[0], np.arange(-HALF, 0), np.arange(1, HALF + 1)])).astype(np.float32)


def table() -> np.ndarray:
    """Return codes of the nearest multiples of the step; past the last one they are those of protected values."""
    nearest = np.rint(np.nan_to_num(FULL.values(), posinf=1e9, neginf=-1e9) / STEP)
    codes = np.where(nearest < 0, nearest + HALF + 1, np.where(nearest > 0, nearest + HALF, 0))
    return np.where(np.abs(nearest) > HALF, len(LEVELS), codes).astype(np.uint8)


def inputs(count: int, features: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, features // 4, generator=g) @ torch.randn(features // 4, features, generator=g)


def codes_of(values: np.ndarray) -> np.ndarray:
    codes = np.empty(values.size, np.uint8)
    kernels.quantize(np.ascontiguousarray(values).reshape(-1), None, 0, FULL.lo, FULL.hi, 1.0, table()[None], codes)
    return codes.reshape(values.shape)


ROWS = 1 << 20


def compensated(weights: torch.Tensor, moments: torch.Tensor) -> np.ndarray:
    """Return the codes of weights, [inputs, outputs]."""
    spread = ErrorSpread.from_products(moments, ROWS)
    assert spread is not None
    values = weights[spread.order].numpy()
    kernels.compensate(values, spread.factors, FULL.lo, FULL.hi, 1.0, table(), LEVELS)
    codes = np.empty(values.shape, np.uint8)
    codes[spread.order.numpy()] = codes_of(values)
    return codes


def by_elimination(weights: torch.Tensor, moments: torch.Tensor) -> np.ndarray:
    """Quantize input by input, each time with the inverse of the moments of those that are left."""
    values, moments = weights.double(), moments.double()
    own = (_DAMPING + len(moments) / ROWS) * moments.diagonal().mean()
    moments = moments + own * torch.eye(len(moments))
    left = moments.diagonal().argsort(descending=True).tolist()
    codes = np.empty(values.shape, np.uint8)
    while left:
        inverse, now = torch.linalg.inv(moments[left][:, left]), left[0]
        codes[now] = codes_of(values[now].float().numpy())
        mask = codes[now] == len(LEVELS)
        error = values[now] - torch.from_numpy(np.where(mask, values[now].numpy(), np.append(LEVELS, 0)[codes[now]]))
        values[left] -= inverse[:, :1] / inverse[0, 0] * error
        left.pop(0)
    return codes


@pytest.mark.parametrize(("features", "outputs", "scale"), [(8, 3, 1.0), (40, 70, 0.5), (96, 64, 3.0)])
def test_codes_are_those_of_elimination(features, outputs, scale):
    x = inputs(200, features)
    weights = scale * torch.randn(features, outputs, generator=torch.Generator().manual_seed(1))
    result, expected = compensated(weights, x.T @ x), by_elimination(weights, x.T @ x)
    same = (result == expected).all(0)
    assert same.mean() > 0.9  # fp32 and fp64 may differ at the edge of a cell, and in all of that output after it
    if scale > 1:
        assert (result == len(LEVELS)).any(), "some are protected"


@pytest.mark.parametrize("seed", range(5))
def test_outputs_are_nearer(seed):
    x = inputs(400, 64, seed)
    weights = torch.randn(64, 48, generator=torch.Generator().manual_seed(seed)) * 0.5
    exact, lost = x @ weights, {}
    for name, codes in {"nearest": codes_of(weights.numpy()), "compensated": compensated(weights, x.T @ x)}.items():
        lost[name] = float((x @ torch.from_numpy(np.append(LEVELS, LEVELS[:1])[codes]) - exact).square().sum())
    assert lost["compensated"] < 0.4 * lost["nearest"]


def test_inputs_that_have_nothing_in_common_change_nothing():
    weights = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(compensated(weights, torch.diag(torch.arange(1.0, 33.0))), codes_of(weights.numpy()))


@pytest.mark.parametrize("moments", [torch.zeros(4, 4), torch.full((4, 4), torch.nan), torch.eye(4) * torch.inf])
def test_moments_that_tell_nothing(moments):
    assert ErrorSpread.from_products(moments, ROWS) is None


def test_one_input_with_nothing_and_sums_that_are_singular():
    row = torch.tensor([[1.0, 2.0, 0.0, 2.0]])
    spread = ErrorSpread.from_products(row.T @ row, 1)
    assert spread is not None and np.isfinite(spread.factors).all()
    assert sorted(spread.order.tolist()) == [0, 1, 2, 3] and spread.order[-1] == 2
    assert np.array_equal(spread.factors, np.triu(spread.factors)) and np.all(np.diag(spread.factors) == 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("factors", np.eye(3, dtype=np.float32)), ("factors", np.eye(4)), ("table", np.zeros(9, np.uint8)),
     ("levels", np.zeros(3)), ("values", np.zeros((4, 2))), ("values", np.zeros(4, np.float32))],
)
def test_wrong_arrays(name, value):
    arguments = {
        "values": np.zeros((4, 2), np.float32), "factors": np.eye(4, dtype=np.float32), "table": table(),
        "levels": LEVELS,
    }
    with pytest.raises(ValueError, match=name):
        kernels.compensate(lo=FULL.lo, hi=FULL.hi, inv_scale=1.0, **arguments | {name: value})


def test_few_rows_spread_less():
    x = inputs(64, 32)
    many, few = (ErrorSpread.from_products(x.T @ x, rows) for rows in (ROWS, 4))
    assert many is not None and few is not None
    assert np.abs(np.triu(few.factors, 1)).sum() < 0.5 * np.abs(np.triu(many.factors, 1)).sum()
