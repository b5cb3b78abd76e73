"""NaN in tensors that are not quantized: it is told of, and nothing that one could go back to is given up."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.quantization.nan_check import contain_nan
from dsq_ckpt.storage.manifest import Manifest

NAN = float("nan")
OTHERS = [
    {"norm.running_var": torch.ones(96)}, {"linear.bias": torch.zeros(96)},
    {"optimizer": {"state": {"head.bias": {"exp_avg": torch.zeros(96)}}}},  # stored in bf16
    {"table": torch.randn(80, 80)},  # by a rule
]
RULES = {"rules": [{"pattern": "table", "exact": True}]}


def with_nan(tree):
    return {
        key: with_nan(value) if isinstance(value, dict) else value.clone().index_fill_(0, torch.tensor([3]), NAN)
        for key, value in tree.items()
    }


@pytest.mark.parametrize("others", OTHERS, ids=lambda others: next(iter(others)))
def test_it_is_reported_and_older_refinement_stays(tmp_path, others):
    history = dsq_ckpt.SaveHistory()
    weights = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))
    config = {"refinement": {"keep_last": 2}, "quantize": RULES}
    for step in range(6):
        state = {"linear.weight": weights + 0.01 * step, **(others if step < 3 else with_nan(others))}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsq_ckpt.save(state, tmp_path / str(step), history=history, config=config)
        messages = [str(warning.message) for warning in caught if "not quantized hold NaN" in str(warning.message)]
        assert len(messages) == (step >= 3)
        manifest = Manifest.read(tmp_path / str(step))
        assert len(manifest.nonfinite) == (step >= 3) and all(name in messages[0] for name in manifest.nonfinite)
    refinements = [Manifest.read(tmp_path / str(step)).refinement == "kept" for step in range(6)]
    assert refinements[1:3] == [True, True], "the ones to go back to"
    assert refinements[3:] == [False, True, True], "of those that hold it too, the newest"
    with pytest.raises(dsq_ckpt.NonFiniteTensor, match="not quantized hold NaN"):
        dsq_ckpt.save(state, tmp_path / "6", history=history, config={"quantize": {"nonfinite": "error", **RULES}})


def test_nan_is_reported_where_nothing_is_quantized(tmp_path):
    with pytest.warns(UserWarning, match="not quantized hold NaN: w$"):
        dsq_ckpt.save({"w": torch.full((80, 80), NAN)}, tmp_path / "a", config="exact")


def test_where_another_tensor_holds_it_each_time_refinement_goes_as_ever(tmp_path):
    """As in statistics of an interval in which nothing came: there is no checkpoint to go back to."""
    history, weights = dsq_ckpt.SaveHistory(), torch.randn(96, 96)
    for step in range(6):
        state = {"linear.weight": weights + 0.01 * step, "seen": {str(n): torch.ones(5) for n in range(3)}}
        state["seen"][str(step % 3)].fill_(NAN)
        with pytest.warns(UserWarning, match=f"hold NaN: seen.{step % 3}$"):
            dsq_ckpt.save(state, tmp_path / str(step), history=history, config={"refinement": {"keep_last": 2}})
    assert [Manifest.read(tmp_path / str(step)).refinement for step in range(6)] == ["dropped"] * 4 + ["kept"] * 2


class Refuses(torch.Tensor):
    """A tensor of which nothing is known."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise TypeError("nothing of the kind")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_infinite_values_and_numbers_without_a_dimension_are_none(dtype):
    largest = torch.finfo(dtype).max
    cases = [
        (torch.tensor([1.0, NAN], dtype=dtype), True), (torch.full((3, 5), NAN, dtype=dtype), True),
        (torch.tensor([math.inf, NAN], dtype=dtype), True), (torch.tensor([math.inf, -math.inf], dtype=dtype), False),
        (torch.tensor([largest] * 9 + [-largest] * 9, dtype=dtype), False), (torch.tensor(NAN, dtype=dtype), False),
        (torch.tensor([-math.inf] * 4, dtype=dtype), False), (torch.tensor([NAN], dtype=dtype), True),
        (torch.empty(0, dtype=dtype), False),
        (torch.tensor([1, 2]), False), (torch.tensor([NAN]).as_subclass(Refuses), False),
        (torch.tensor([[0.0, NAN], [1.0, 2.0]], dtype=dtype).T[:, 1:], False),
    ]
    assert contain_nan([tensor for tensor, _ in cases]) == [expected for _, expected in cases]
