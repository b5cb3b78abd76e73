"""Weights of which rows or columns are much smaller than the others."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.quantization.lost_rows import RATIO, are_rows_needed, has_lost_rows, may_have_lost_rows
from tests.helpers.states import load_copy, relative_error


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def with_part(values: torch.Tensor, where: object, factor: float) -> torch.Tensor:
    values[where] *= factor
    return values


@pytest.mark.parametrize("shape", [(300, 90), (90, 300), (2000, 7), (7, 2000), (40, 12, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_or_column_is_found(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for where in (5, (slice(None), 5)):
        assert has_lost_rows(with_part(normal(*shape).to(dtype), where, 0.5 / RATIO))
        assert not has_lost_rows(with_part(normal(*shape).to(dtype), where, 2.5 / RATIO))
        assert not has_lost_rows(with_part(normal(*shape).to(dtype), where, 0.0))


@pytest.mark.parametrize("values", [
    normal(300, 90), normal(300, 90).cumsum(0), normal(300, 90) * (normal(300, 90).flip(0) > 1.9), torch.zeros(70, 70),
    torch.eye(300), normal(5000), torch.tensor(3.0), torch.empty(0, 5), torch.full((70, 70), float("nan")),
    normal(90, 300).exp().t(), normal(1, 90_000), normal(3, 90_000), normal(90_000, 3), normal(90_000, 6),
    normal(16, 8, 9, 9).to(memory_format=torch.channels_last),
])
def test_weights_without_lost_rows_are_not_found(values: torch.Tensor) -> None:
    assert not has_lost_rows(values)


def test_the_first_look_leaves_out_none_that_the_second_finds() -> None:
    """Nor many that it does not; the mean square of a whole tensor counts for shards that are small themselves."""
    shapes = [(300, 90), (90, 300), (2000, 7), (7, 2000), (40, 12, 3, 3), (5000,), (1, 9000), (9000, 3), (0, 9)]
    tensors = [with_part(normal(*shape), 5, 0.5 / RATIO) if shape[0] > 5 else normal(*shape) for shape in shapes]
    tensors += [with_part(normal(*shape), COLUMN, 0.5 / RATIO) for shape in shapes if len(shape) == 2 and shape[1] > 7]
    tensors += [normal(300, 90), torch.zeros(90, 90), torch.full((90, 90), torch.nan), normal(90, 90).bfloat16()]
    for whole in (None, 1.0, (2.0 * RATIO) ** 2):
        first = may_have_lost_rows(tensors, [whole] * len(tensors))
        second = [has_lost_rows(tensor, whole) for tensor in tensors]
        assert all(asked for asked, lost in zip(first, second, strict=True) if lost)
        assert any(second)
    assert may_have_lost_rows([normal(300, 90)] * 3, [None, 1.0, (2.0 * RATIO) ** 2]) == [False, False, True]


def test_zeros_do_not_hide_a_small_row() -> None:
    """As the rows of a vocabulary that was made larger."""
    table = normal(500, 90)
    table[:100] = 0
    assert not has_lost_rows(table)
    table[300] *= 0.5 / RATIO
    assert has_lost_rows(table)


def test_lost_rows_are_reported_at_a_keyframe(tmp_path: Path) -> None:
    """And true: the columns come back changed; of an exempt tensor they do not."""
    table = with_part(normal(2000, 7), (slice(None), slice(4)), 100.0)
    said = []
    for name, config in (("lossy", {}), ("exact", {"quantize": {"rules": [{"pattern": "pose*", "exact": True}]}})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(2):
                path = tmp_path / name / str(number)
                dsq_ckpt.save({"poses.weight": table, "w": normal(90, 90)}, path, config=config)
        said.append([
            str(warning.message) for warning in caught if "times smaller than the others" in str(warning.message)
        ])
        loaded = load_copy(path, {"poses.weight": table})["poses.weight"]
        lost = relative_error(table[:, 4:], loaded[:, 4:])
        assert lost > 0.3 if name == "lossy" else lost == 0
    assert [len(texts) for texts in said] == [1, 0] and "columns of poses.weight are" in said[0][0]


COLUMN, ROW = (slice(None), 7), 7
POSES = (slice(None), slice(4))


@pytest.mark.parametrize("where", [COLUMN, ROW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_needed_where_their_gradients_are_larger(where: object, dtype: torch.dtype) -> None:
    """As those of weights for inputs in larger units; not where they are like the others, or zero."""
    values = with_part(normal(300, 90).to(dtype), where, 0.5 / RATIO)
    for factor, needed in ((2.0 * RATIO, True), (1.0, False), (0.0, False)):
        squares = with_part(normal(300, 90).to(dtype), where, factor).square()
        assert are_rows_needed(values, squares) is needed
        assert are_rows_needed(values.t(), squares.t()) is needed
        assert are_rows_needed(values, squares * 1e-30) is needed


@pytest.mark.parametrize("unknown", [0.0, float("nan"), float("inf")])
def test_without_gradients_nothing_tells(unknown: float) -> None:
    values = with_part(normal(300, 90), COLUMN, 0.5 / RATIO)
    assert are_rows_needed(values, torch.full_like(values, unknown)) is None


def test_rows_that_are_not_needed_do_not_hide_one_that_is() -> None:
    table, gradients = normal(5000, 90), normal(5000, 90)
    table[:400] *= 0.5 / RATIO  # tokens that never occur, and one in other units
    gradients[:399] = 0
    assert are_rows_needed(table, gradients.square()) is False
    gradients[399] *= 2 * RATIO
    assert are_rows_needed(table, gradients.square()) is True


def test_one_value_of_a_row_does_not_count_for_it() -> None:
    """A row of one value that is not zero has no size."""
    table, gradients = normal(500, 90), normal(500, 90)
    table[3] = 0
    table[3, 0], gradients[3] = 0.1 / RATIO, 1e4
    assert are_rows_needed(table, gradients.square()) is False


@pytest.mark.parametrize("state", ["exp_avg_sq", "momentum_buffer"])
@pytest.mark.parametrize("names", ["optimizer.state.poses.weight", "optimizer.state.0"])
def test_needed_rows_come_back_exactly(tmp_path: Path, state: str, names: str) -> None:
    """From keyframes and deltas, and it is said; where they are not needed, nothing is said, and they are lossy."""
    table = with_part(normal(2000, 7), POSES, 100.0)
    for needed in (True, False):
        gradients = with_part(normal(2000, 7), POSES, 0.01 if needed else 1.0) * 1e-3
        moments = {f"{names}.{state}": gradients.square() if state == "exp_avg_sq" else gradients}
        original = {"model.poses.weight": table, **moments}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(2):
                path = tmp_path / str(needed) / str(number)
                dsq_ckpt.save(original, path)
                assert load_copy(path, original)["model.poses.weight"].equal(table) is needed
        messages = [
            str(warning.message) for warning in caught if "times smaller than the others" in str(warning.message)
        ]
        assert len(messages) == needed
        assert all("model.poses.weight" in text and "stored exactly" in text for text in messages)


def test_a_rule_for_a_group_is_kept(tmp_path: Path) -> None:
    table = with_part(normal(2000, 7), POSES, 100.0)
    original = {
        "model.poses.weight": table,
        "optimizer.state.poses.weight.exp_avg_sq": with_part(normal(2000, 7), POSES, 0.01).square(),
    }
    rules = {"quantize": {"rules": [{"pattern": "model.poses.weight", "group": "poses"}]}}
    with pytest.warns(UserWarning, match="may be off by half of their size"):
        dsq_ckpt.save(original, tmp_path / "0", config=rules)
    assert not load_copy(tmp_path / "0", original)["model.poses.weight"].equal(table)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_part_that_becomes_small_after_a_keyframe_is_reported_once_or_exact(tmp_path: Path, gradients: bool) -> None:
    """As a buffer of observations that was empty, or weights for inputs that grew."""
    weights, history = normal(300, 90), dsq_ckpt.SaveHistory()
    filled = with_part(normal(2000, 7), POSES, 100.0)
    said = []
    for number in range(4):
        small = with_part(weights.clone(), COLUMN, 0.3 / RATIO if number else 1.0)
        original = {"model.w": small, "model.poses.weight": filled * bool(number), "model.v": normal(90, 90)}
        if gradients:
            factor = 3.0 * RATIO if number else 1.0
            original["optimizer.state.w.exp_avg_sq"] = with_part(normal(300, 90) * 1e-3, COLUMN, factor).square()
            original["optimizer.state.poses.weight.exp_avg_sq"] = with_part(normal(2000, 7), POSES, 0.01).square()
            original["optimizer.state.v.exp_avg_sq"] = (normal(90, 90) * 1e-3).square()  # else it may be frozen
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsq_ckpt.save(original, tmp_path / str(number), history=history)
        said.append([
            str(warning.message) for warning in caught if "times smaller than the others" in str(warning.message)
        ])
        loaded = load_copy(tmp_path / str(number), original)
        exact = [loaded[name].equal(original[name]) for name in ("model.w", "model.poses.weight", "model.v")]
        assert exact == [gradients and number > 0, gradients or not number, False]
    assert [len(texts) for texts in said] == [0, 1, 0, 0]
    assert "model.poses.weight, model.w" in said[1][0] and ("stored exactly" in said[1][0]) is gradients


def test_each_keyframe_tells_and_so_does_what_is_exact_no_longer(tmp_path: Path) -> None:
    """Whatever directories checkpoints lie in; weights alone do not tell that training needs their rows."""
    weights = with_part(normal(300, 90), COLUMN, 0.5 / RATIO)
    gradients = with_part(normal(300, 90) * 1e-3, COLUMN, 2.0 * RATIO)
    known = {"model.w": weights, "model.v": normal(90, 90), "optimizer.state.w.exp_avg_sq": gradients.square()}
    alone = {name: known[name] for name in ("model.w", "model.v")}
    said, history = [], dsq_ckpt.SaveHistory()
    for number, original in enumerate([known, known, alone, alone, known, known]):
        parent = None if number in (0, 5) else tmp_path / f"checkpoint-{number - 1}" / "state"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsq_ckpt.save(original, tmp_path / f"checkpoint-{number}" / "state", history=history, parent=parent)
        messages = [
            str(warning.message) for warning in caught if "times smaller than the others" in str(warning.message)
        ]
        said.append(["stored exactly" in text for text in messages])
    assert said == [[True], [], [False], [], [True], [True]]


@pytest.mark.parametrize("shape", [(300, 90), (2000, 3), (7, 2000), (40, 12, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_that_vary_little_around_a_mean_are_found(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A whole tensor, or one column, beside zeros too; not what has one value, nor what varies enough."""
    around = 100 + 0.003 * normal(*shape).to(dtype)
    beside = around * (normal(*shape).flip(0) > -0.5)
    column = normal(*shape).to(dtype)
    column[:, 1] = around[:, 1] / 100
    single = normal(*shape).to(dtype)
    single[:, 1] = 0.7
    wide = 100 + 4 * normal(*shape).to(dtype)
    tensors = [around, -around, beside, column, single, wide]
    expected = [True, True, True, True, False, False]
    if len(shape) == 4 or shape[0] == 7:  # the one column is a part of a row, or too short for a mean
        del tensors[3], expected[3]
    assert [has_lost_rows(tensor) for tensor in tensors] == expected
    first = may_have_lost_rows(tensors, [None] * len(tensors))
    assert all(asked for asked, lost in zip(first, expected, strict=True) if lost)


def test_positions_far_from_the_origin_come_back_exactly(tmp_path: Path) -> None:
    """Gradients tell that their differences count; without any, a warning says that these may be lost."""
    positions = torch.tensor([-122.4, 37.8, 12.0]) + 0.01 * normal(4000, 3)
    assert are_rows_needed(positions, normal(4000, 3).square()) is True
    for known in (True, False):
        tree = {"model.p": positions, **({"optimizer.state.p.exp_avg_sq": normal(4000, 3).square()} if known else {})}
        with pytest.warns(UserWarning, match="vary that little around a mean") as caught:
            dsq_ckpt.save(tree, tmp_path / str(known))
        assert any("stored exactly" in str(warning.message) for warning in caught) is known
        assert load_copy(tmp_path / str(known), tree)["model.p"].equal(positions) is known
