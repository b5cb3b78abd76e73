"""The length of Adam's next steps: restored second moments do not change it for a chunk, nor for a row or a column."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from dsq_ckpt.quantization.step_lengths import (
    StepLengths,
    correct_scales,
    sum_step_lengths,
    sum_step_lengths_on_device,
    unpack_sums,
)
from dsq_ckpt.storage.checkpoint import Checkpoint

SHAPES = {"rows": (64, 96), "more_rows": (96, 64), "columns": (4096, 1), "flat": (5000,), "images": (40, 8, 5, 5)}


def squares(seed: int, growth: float) -> dict[str, torch.Tensor]:
    """Second moments of several layouts, each with a size and a distribution of its own: their levels are shared."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (2.0 ** (-20 + 3.3 * place)) * growth * torch.rand(shape, generator=generator) ** (4 / (1 + place))
        for place, (name, shape) in enumerate(SHAPES.items())
    }


def state(seed: int, growth: float = 1.0) -> dict:
    return {"state": {name: {"exp_avg_sq": v} for name, v in squares(seed, growth).items()}}


def lengths(v: torch.Tensor, got: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of sqrt(v / decoded) over elements that are not zero, of a matrix, or by row or column."""
    held = got > 0
    ratios = torch.where(held, (v.double() / got.double()).sqrt(), 0)
    return ratios.sum() / held.sum() if dim is None else ratios.sum(dim) / held.sum(dim)


def assert_steps_are_as_long(original: dict, path, **options) -> None:
    for name, part in original["state"].items():
        v = part["exp_avg_sq"]
        empty = {"state": {name: {"exp_avg_sq": torch.full_like(v, torch.nan)}}}
        dsq_ckpt.load(empty, path, **options)
        got = empty["state"][name]["exp_avg_sq"]
        assert abs(lengths(v, got) - 1) < 3e-4, (name, lengths(v, got))
        matrix, decoded = (tensor.reshape(len(v), -1) for tensor in (v, got))
        for dim, few in ((1, matrix.shape[1]), (0, matrix.shape[0])):
            if few >= 32 and matrix.shape[dim - 1] > 1:
                off = (lengths(matrix, decoded, dim) - 1).abs()
                # Half of an eighth of an octave of v, and as much for what the other dimension was moved by.
                assert off.max() < 2 * (2 ** (1 / 32) - 1), (name, dim, off.max())


@pytest.mark.parametrize("asynchronous", [False, "quantize", "copy"])
def test_steps_are_as_long_along_a_chain(tmp_path, asynchronous) -> None:
    """Values that shrink and grow as a whole would leave codes behind that are a tenth of an octave wrong together."""
    for step, growth in enumerate((1.0, 0.93, 0.86, 1.09)):
        original, path = state(0, growth), tmp_path / "run" / str(step)
        if asynchronous:
            dsq_ckpt.async_save(original, path, config={"storage": {"stage": asynchronous}}).result()
        else:
            dsq_ckpt.save(original, path)
        assert_steps_are_as_long(original, path)


def test_without_the_factor_they_are_not(tmp_path) -> None:
    """The codes alone are far enough off for the guarantee to be tested above."""
    for step, growth in enumerate((1.0, 1.09)):
        original = state(0, growth)
        dsq_ckpt.save(original, tmp_path / "run" / str(step))
    means = []
    with Checkpoint(tmp_path / "run" / "1") as checkpoint, Workers(1, 1 << 20) as workers:
        for name, shape in SHAPES.items():
            ref = checkpoint.find_record(f"state.{name}.exp_avg_sq", (0,) * len(shape))
            checkpoint.read_record(ref).pop("shift", None)
            got, v = checkpoint.decode_tensor(ref, True, workers), original["state"][name]["exp_avg_sq"]
            means.append(float(lengths(v, got)))
    assert max(abs(mean - 1) for mean in means) > 0.001, means


def test_blocks_and_threads_change_nothing(tmp_path) -> None:
    """The sum is over blocks in their order; a second tensor of the group makes the mean of one other than 1."""
    generator = torch.Generator().manual_seed(1)
    original = {"state": {
        "a": {"exp_avg_sq": torch.rand(300, 700, generator=generator) ** 3},
        "b": {"exp_avg_sq": torch.rand(300, 700, generator=generator) + 1},
    }}
    shifts = []
    for threads in (1, 4):
        path = tmp_path / str(threads)
        dsq_ckpt.save(original, path, config={"storage": {"threads": threads, "block_elements": 1 << 14}})
        with Checkpoint(path) as checkpoint:
            refs = [checkpoint.find_record(f"state.{name}.exp_avg_sq", (0, 0)) for name in "ab"]
            shifts.append([checkpoint.read_record(ref).get("shift") for ref in refs])
    assert shifts[0] == shifts[1] != [None, None]
    assert_steps_are_as_long(original, path)


def test_rows_that_change_by_themselves_keep_their_step_length(tmp_path) -> None:
    """Codes stay where they were, as that is cheap, while a row's values move by a seventh of an octave, as one."""
    generator = torch.Generator().manual_seed(2)
    rows, columns = torch.rand(128, 1, generator=generator), torch.rand(1, 96, generator=generator)
    v = 1e-8 * (1 + rows) * (1 + columns) * torch.exp2(0.2 * torch.randn(128, 96, generator=generator))
    for step in range(3):
        original = {"state": {"w": {"exp_avg_sq": v}}}
        dsq_ckpt.save(original, tmp_path / "run" / str(step))
        assert_steps_are_as_long(original, tmp_path / "run" / str(step))
        v = v * torch.exp2((torch.rand(128, 1, generator=generator) - 0.5) * 0.4)


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([(40, 33), (33, 40), (5, 700), (700, 5), (900, 1), (900,), (3,)]),
    st.integers(1, 255), st.integers(1, 700), st.booleans(),
)
def test_sums_are_those_of_numpy(seed: int, shape: tuple[int, ...], levels: int, block: int, whole: bool) -> None:
    """Blocks may end within rows, whose parts then have means of their own."""
    rng = np.random.default_rng(seed)
    scales = MatrixScales.fit(torch.from_numpy(rng.random(shape).astype(np.float32) + 1))
    book = np.append(0.0, np.sort(np.exp2(rng.uniform(-60, 60, levels - 1))))
    values, codes = np.exp2(rng.uniform(-60, 60, shape)).astype(np.float32), rng.integers(0, levels + 1, shape)
    codes = codes.clip(0, 255).astype(np.uint8)
    held = (codes > 0) & (codes < levels)
    q = np.where(held, np.sqrt(values / np.append(book, np.ones(256))[np.where(held, codes, levels)]), 0)
    q, held = q.reshape(shape[0], -1), held.reshape(shape[0], -1)
    rows = np.stack([q.sum(1), held.sum(1)]) if len(scales.by_row) else np.stack([q.sum(), held.sum()])[:, None]
    block = -(-block // scales.columns) * scales.columns if whole else block
    total = StepLengths.zeros(scales)
    for at in range(0, values.size, block):
        part = sum_step_lengths(values.ravel()[at : at + block], codes.ravel()[at : at + block], book, scales, at)
        assert part.columns.size <= 2 * max(1, block), "of a row that is longer than a block, no more than the block"
        total.add(part)
    np.testing.assert_allclose(total.rows, rows, rtol=1e-6)
    if len(scales.by_column) > 1:
        np.testing.assert_allclose(total.columns[1], held.sum(0))
    flat = torch.from_numpy(values.ravel()), torch.from_numpy(codes.ravel())
    there = unpack_sums(sum_step_lengths_on_device(*flat, book, scales).numpy(), scales)
    np.testing.assert_allclose(there.rows, rows, rtol=1e-6)
    if len(scales.by_column) > 1:
        means = q.sum(1, keepdims=True) / held.sum(1, keepdims=True).clip(1) if len(scales.by_row) else 1.0
        wanted = np.stack([(q / np.where(held.any(1, keepdims=True), means, 1.0)).sum(0), held.sum(0)])
        np.testing.assert_allclose(there.columns, wanted, rtol=1e-6)
        if block % scales.columns == 0 or not len(scales.by_row):
            np.testing.assert_allclose(total.columns, wanted, rtol=1e-6)
    moved, shift = correct_scales(scales, total)
    again, shift_there = correct_scales(scales, there)
    assert shift_there == pytest.approx(shift, abs=1e-2) or not whole
    assert moved.by_row.dtype == moved.by_column.dtype == np.int16
    assert (moved.by_row.shape, moved.by_column.shape) == (scales.by_row.shape, scales.by_column.shape)
    assert np.abs(again.by_row - moved.by_row).max(initial=0) <= 1  # a tie


def test_blocks_of_longer_rows_take_no_memory_for_whole_rows(tmp_path) -> None:
    """As of stacked experts: a matrix with one row for each index of the first dimension."""
    original = {"state": {"experts": {"exp_avg_sq": torch.rand(32, 1 << 8, 1 << 7)}}}
    blocks = {"block_elements": 1 << 12, "threads": 1}
    for number, asynchronous in enumerate((False, True, False, True)):
        path, config = tmp_path / str(number), {"storage": {**blocks, "stage": "quantize"}}
        tracemalloc.start()
        if asynchronous:
            dsq_ckpt.async_save(original, path, config=config).result()
        else:
            dsq_ckpt.save(original, path, config=config)
        assert number < 2 or tracemalloc.get_traced_memory()[1] < 16 << 20  # the first saves import
        tracemalloc.stop()
        assert_steps_are_as_long(original, path)


def test_tables_of_few_chunks_are_kept(tmp_path, monkeypatch) -> None:
    """Each chunk has a factor of its own, and so a table."""
    monkeypatch.setattr("dsq_ckpt.storage.checkpoint._MAX_DEQUANTIZERS", 2)
    dsq_ckpt.save(state(0), tmp_path / "0")
    with Checkpoint(tmp_path / "0") as checkpoint, Workers(1, 1 << 20) as workers:
        for _, ref in checkpoint.iter_chunks():
            checkpoint.decode_tensor(ref, True, workers)
            assert 1 <= len(checkpoint._dequantizers) <= 2


def test_memory_of_a_device_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("dsq_ckpt.quantization.step_lengths._TOGETHER", 1 << 10)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
                largest = max(largest, out.numel())
            return out

    none = np.empty(0, np.int16)
    for scales in (MatrixScales(1, none, np.zeros(1, np.int16)), MatrixScales(64, none, none)):
        values, codes = torch.ones(1 << 14), torch.ones(1 << 14, dtype=torch.uint8)
        given = {values.untyped_storage().data_ptr(), codes.untyped_storage().data_ptr()}
        with Watch():
            sums = sum_step_lengths_on_device(values, codes, np.array([0.0, 1.0]), scales)
        assert sums[:, 0].tolist() == [1 << 14, 1 << 14] and largest <= 1 << 10


def test_parts_that_have_rows_and_columns_of_their_own_are_not_corrected_twice(tmp_path) -> None:
    """An error of a row is corrected by its scale, and not by those of columns too that have no other rows."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.where(torch.rand(256, 256, generator=generator) < 0.15, 0.45, -0.1)
    mixed[128:] = 0.5 * torch.randn(128, 256, generator=generator)
    original = {"state": {
        "w": {"exp_avg_sq": 1e-8 * mixed.exp2() * torch.block_diag(torch.ones(128, 128), torch.ones(128, 128))},
        "other": {"exp_avg_sq": 1e-8 * torch.exp2(0.5 * torch.randn(1024, 256, generator=generator))},
    }}
    dsq_ckpt.save(original, tmp_path / "0")
    assert_steps_are_as_long(original, tmp_path / "0")


def test_values_that_are_protected_or_pruned_do_not_count() -> None:
    values, none = np.float32([np.inf, np.nan, 3.0, 3.0]), np.empty(0, np.int16)
    scales, levels = MatrixScales(4, none, none), np.array([0.0, 2.0, 4.0])
    sums = sum_step_lengths(values, np.uint8([0, 3, 1, 2]), levels, scales, 0)
    assert sums.rows.tolist() == [[pytest.approx(1.5**0.5 + 0.75**0.5)], [2]]
    nothing = sum_step_lengths(values[:2], np.uint8([0, 3]), levels, scales, 0)
    assert correct_scales(scales, nothing) == (scales, 0.0)


@pytest.mark.parametrize("wrong", ["1", None, True, 101, -101.5, [0.1]])
def test_a_shift_that_is_none_is_refused(tmp_path, wrong) -> None:
    dsq_ckpt.save(state(0), tmp_path / "0")
    with Checkpoint(tmp_path / "0") as checkpoint, Workers(1, 1 << 20) as workers:
        ref = checkpoint.find_record("state.rows.exp_avg_sq", (0, 0))
        checkpoint.read_record(ref)["shift"] = wrong
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"state\.rows\.exp_avg_sq' has the shift"):
            checkpoint.decode_tensor(ref, True, workers)
