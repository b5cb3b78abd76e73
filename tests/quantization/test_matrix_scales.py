"""Scales of rows and columns: where there are any, what they are, and that a reader multiplies by what a writer had."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.matrix_scales import SHARED, MatrixScales, _sum_on_device, _sum_on_host
from dsq_ckpt.quantization.moments import ScaledFrame
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest

TINY = torch.finfo(torch.float32).tiny


def squares(rows: int, columns: int, seed: int = 0, spread: float = 6.0, noise: float = 0.3) -> torch.Tensor:
    """Second moments of a layer: a product of what rows and columns have, within a third of an octave."""
    generator = torch.Generator().manual_seed(seed)
    logs = spread * torch.randn(rows, 1, generator=generator) + spread * torch.randn(1, columns, generator=generator)
    return torch.exp2(logs - 30 + noise * torch.randn(rows, columns, generator=generator))


def expected(scales: MatrixScales, shape: tuple[int, ...]) -> np.ndarray:
    """Scales of all elements, from the numbers alone."""
    rows = shape[0] if shape else 1
    columns = int(np.prod(shape[1:], dtype=int)) if shape else 1
    total = np.full((rows, columns), 1016.0)
    if len(scales.by_row):
        total += scales.by_row.astype(float)[:, None]
    if len(scales.by_column):
        total += scales.by_column.astype(float)
    return (2.0 ** (total.clip(8, 2039) / 8 - 127)).reshape(-1)


@pytest.mark.parametrize("shape, by_row, by_column", [
    ((64, 96), 64, 96), ((16, 96), 16, 0), ((64, 16), 0, 16), ((16, 16), 0, 0), ((200,), 0, 1), ((), 0, 0),
    ((1, 4096), 1, 0), ((40, 8, 3, 3), 40, 72), ((0, 64), 0, 0), ((64, 0), 0, 0), ((64, 1), 0, 1),
])
def test_rows_and_columns_have_numbers_where_enough_elements_share_them(shape, by_row, by_column) -> None:
    scales = MatrixScales.fit(torch.rand(shape) + 0.1)
    assert (len(scales.by_row), len(scales.by_column)) == (by_row, by_column)
    assert SHARED == 32


@pytest.mark.parametrize("shape", [(64, 96), (16, 96), (64, 16), (200,), (40, 8, 3, 3), (3, 5000), (40, 2100)])
def test_factors_are_those_of_the_numbers(shape) -> None:
    values = squares(shape[0], int(np.prod(shape[1:], dtype=int))).reshape(shape)
    scales, flat = MatrixScales.fit(values), values.reshape(-1)
    wanted = expected(scales, shape)
    np.testing.assert_array_equal(scales.divide(flat, 0).numpy(), flat.numpy() / wanted.astype(np.float32))
    ones = np.ones(len(flat), np.float32)
    scales.multiply(ones, 0)
    np.testing.assert_array_equal(ones, wanted.astype(np.float32))
    # Parts that begin and end in rows.
    for start, stop in ((0, 7), (5, 131), (100, 200), (199, 200), (0, len(flat)), (17, len(flat) - 3)):
        ones = np.ones(stop - start, np.float32)
        scales.multiply(ones, start)
        np.testing.assert_array_equal(ones, wanted[start:stop].astype(np.float32))
        part = ScaledFrame(scales).part(slice(start, stop)).coded(flat[start:stop], slice(None))
        np.testing.assert_array_equal(part.numpy(), flat[start:stop].numpy() / wanted[start:stop].astype(np.float32))


def test_ratios_of_a_product_are_near_one() -> None:
    values = squares(200, 300)
    assert values.log2().std() > 5
    ratios = MatrixScales.fit(values).divide(values.reshape(-1), 0)
    assert ratios.log2().std() < 0.33 and ratios.log2().abs().max() < 2
    assert abs(ratios.mean() - 1) < 0.01


def test_zeros_and_what_is_no_number_do_not_count() -> None:
    """Rows of an embedding that never got a gradient, and the padding of others."""
    values = squares(64, 96)
    clean = MatrixScales.fit(values[:32])
    values[32:] = 0
    values = torch.cat([values, torch.full((2, 96), 1e-40), torch.full((1, 96), torch.nan)])
    scales = MatrixScales.fit(values)
    assert np.array_equal(scales.by_row[:32], clean.by_row) and not scales.by_row[32:].any()
    assert np.array_equal(scales.by_column, clean.by_column)


@pytest.mark.parametrize("place", [(3, 5), (0, 0), (63, 95)])
@pytest.mark.parametrize("value", [2.0**120, 2.0**-126])
def test_ratios_never_leave_the_range_of_floats(place, value) -> None:
    """One element that is 120 octaves away from its row: there are no scales then, and it is kept as it is."""
    values = torch.full((64, 96), 2.0**-100 if value > 1 else 2.0**100)
    values[place] = value
    scales = MatrixScales.fit(values)
    assert not scales.is_scaled and torch.equal(scales.divide(values.reshape(-1), 0), values.reshape(-1))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, (255 << 23) - 1), min_size=4, max_size=8), st.integers(1, 40))
def test_any_values_come_back(bits: list[int], rows: int) -> None:
    matrix = torch.from_numpy(np.array(bits, np.uint32).view(np.float32)).repeat(rows, 8)
    scales, flat = MatrixScales.fit(matrix), matrix.reshape(-1)
    ratios = ScaledFrame(scales).coded(flat, slice(None)).numpy().copy()
    normal = flat.numpy() >= TINY
    assert np.isfinite(ratios).all() and (ratios[normal] >= TINY).all() and not ratios[~normal].any()
    scales.multiply(ratios, 0)
    back = ratios[normal].astype(np.float64)
    np.testing.assert_allclose(back, flat.numpy()[normal], rtol=3e-7, atol=float(TINY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_layouts(dtype) -> None:
    values = squares(64, 96, spread=2.0).mul(2.0**28).to(dtype)
    one, other = MatrixScales.fit(values), MatrixScales.fit(values.t().contiguous().t())
    alike = MatrixScales.fit(values.float())
    for scales in (other, alike):
        assert np.array_equal(one.by_row, scales.by_row) and np.array_equal(one.by_column, scales.by_column)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads) -> None:
    values = squares(500, 40)
    whole = MatrixScales.fit(values)
    with Workers(threads, 1 << 10) as workers:
        parts = MatrixScales.fit(values, workers)
    assert np.array_equal(whole.by_row, parts.by_row) and np.array_equal(whole.by_column, parts.by_column)


@pytest.mark.parametrize("shape", [(1 << 21,), (1 << 20, 2)])
def test_short_rows_take_no_memory(shape) -> None:
    """Flat partitions are one column: what is kept must not be as large as they are."""
    values = torch.rand(shape) + 0.1
    MatrixScales.fit(values[:64])  # compiles
    with Workers(2, 1 << 16) as workers:
        tracemalloc.start()
        try:
            MatrixScales.fit(values, workers)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < values.nbytes / 4


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("by_column", [True, False])
def test_torch_operations_find_what_the_kernel_does(by_row, by_column) -> None:
    """The operations of a device, run on the host."""
    values = squares(64, 96)
    values[3] = 0
    values[5, 7] = torch.inf
    one, other = _sum_on_host(values, by_row, by_column), _sum_on_device(values, by_row, by_column)
    for mine, its in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("per_octave", "price", "error", "bits"), [(1, 0.2, 0.45, 1.0), (2, 0.05, 0.21, 2.1)])
def test_second_moments_of_a_layer_take_few_bits(tmp_path, per_octave, price, error, bits) -> None:
    """A product of rows and columns that grows and shrinks: what a delta takes, and what it comes back as."""
    codebook = {"fit": "octaves", "per_octave": per_octave, "rate_distortion": price}
    sizes = []
    for number in range(3):
        v = squares(300, 400, noise=0.0) * torch.exp2(0.2 * number + 0.4 * torch.randn(300, 400))
        original = {"state": {"w": {"exp_avg_sq": v, "exp_avg": v.sqrt()}}}
        dsq_ckpt.save(
            original, tmp_path / "run" / str(number), config={"quantize": {"exp_avg_sq": {"codebook": codebook}}}
        )
        sizes.append(8 * Manifest.read(tmp_path / "run" / str(number)).kinds["exp_avg_sq"].base / v.numel())
        got = {"state": {"w": {name: torch.zeros(300, 400) for name in ("exp_avg", "exp_avg_sq")}}}
        dsq_ckpt.load(got, tmp_path / "run" / str(number))
        ratio = v / got["state"]["w"]["exp_avg_sq"]
        assert abs(ratio.sqrt().mean() - 1) < 1e-3 and ratio.log2().square().mean().sqrt() < error
        update = got["state"]["w"]["exp_avg"] / got["state"]["w"]["exp_avg_sq"].sqrt()
        assert (update - 1).square().mean().sqrt() < 0.25
    assert max(sizes) < bits


def test_scales_that_do_not_fit_are_refused(tmp_path) -> None:
    v = squares(64, 96)
    original = {"state": {"w": {"exp_avg_sq": v}}}
    dsq_ckpt.save(original, tmp_path / "0")
    with Checkpoint(tmp_path / "0") as checkpoint:
        ref = checkpoint.find_record("state.w.exp_avg_sq", (0, 0))
        record = checkpoint.read_record(ref)
        assert record["scales"] == [0, 64, 96]
        with Workers(1, 1 << 20) as workers:
            for wrong in ([0, 63, 96], [0, 64, 95], [1, 64, 96], [-1, 64, 96], [0, 64, 96, 0], [0.0, 64, 96], None, 7):
                record["scales"] = wrong
                with pytest.raises(dsq_ckpt.CorruptCheckpoint):
                    checkpoint.decode_tensor(ref, True, workers)
            record["scales"], record["residual"] = [0, 64, 96], [ref.file, ref.record]
            with pytest.raises(dsq_ckpt.CorruptCheckpoint):
                checkpoint.decode_tensor(ref, True, workers)
