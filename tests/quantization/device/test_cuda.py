"""The GPU save path on a GPU; its logic is tested everywhere, in test_device.py."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.quantization import device
from dsq_ckpt.quantization.device import transfer
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import find_differences, flat_tensors, load_copy, mixed_state, perturb
from tests.quantization.device.test_device import codes_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True, params=[0, device.HOST_BELOW], ids=["small on the device", "small on the host"])
def where_small_chunks_are_quantized(monkeypatch, request):
    monkeypatch.setattr(device, "HOST_BELOW", request.param)


def to_cuda(tree):
    if isinstance(tree, dict):
        return {key: to_cuda(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [to_cuda(value) for value in tree]
    return tree.cuda() if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "another stream"])
@pytest.mark.parametrize("bound", [transfer.IN_FLIGHT, 1])
def test_tensors_may_be_overwritten_at_once(tmp_path, monkeypatch, side, bound):
    monkeypatch.setattr(transfer, "IN_FLIGHT", bound)
    monkeypatch.setattr(transfer, "MOST", bound)
    first = mixed_state()
    states = [first, perturb(first, 1), perturb(perturb(first, 1), 2, scale=1e-5)]
    keep = {"refinement": {"keep_last": 3}, "storage": {"stage": "quantize"}}
    stream = torch.cuda.stream(torch.cuda.Stream()) if side else contextlib.nullcontext()
    with stream:
        for number, state in enumerate(states):
            there = to_cuda(state)
            pending = dsq_ckpt.async_save(there, tmp_path / "gpu" / str(number), config=keep)
            for value in flat_tensors(there).values():
                value.zero_()
            pending.result()
    monkeypatch.setattr(device, "DEVICES", set())
    history = dsq_ckpt.SaveHistory()
    for number, state in enumerate(states):
        dsq_ckpt.save(state, tmp_path / "host" / str(number), config=keep, history=history)
    for number in range(3):
        gpu_path, host_path = (tmp_path / place / str(number) for place in ("gpu", "host"))
        assert codes_of(gpu_path) == codes_of(host_path)
        assert find_differences(load_copy(gpu_path, first), load_copy(host_path, first)) == []


@pytest.mark.parametrize("stage", ["copy", "quantize", None])
def test_on_the_host_the_same_is_stored(tmp_path, stage):
    """By `storage.on_device: false`, in a synchronous save too."""
    states = [mixed_state(), perturb(mixed_state(), 1)]
    for name, on_device in (("host", False), ("gpu", True)):
        for number, state in enumerate(states):
            there, path = to_cuda(state), tmp_path / name / str(number)
            if stage is None:
                dsq_ckpt.save(there, path, config={"storage": {"on_device": on_device}})
            else:
                config = {"storage": {"on_device": on_device, "stage": stage}}
                dsq_ckpt.async_save(there, path, config=config).result()
    for number, state in enumerate(states):
        one, other = (tmp_path / name / str(number) for name in ("host", "gpu"))
        assert codes_of(one) == codes_of(other)
        assert Manifest.read(one).sum_bytes("refinement") == Manifest.read(other).sum_bytes("refinement")
        assert find_differences(load_copy(one, state), load_copy(other, state)) == []


def test_device_memory_of_a_save(tmp_path, monkeypatch):
    """At most 1.25 bytes per element beside the state and what waits for the trip, previous codes included."""
    for name in ("IN_FLIGHT", "MOST"):
        monkeypatch.setattr(transfer, name, 1)  # one chunk at a time
    state = {f"layer{i}.weight": torch.randn(1 << 21, 8, device="cuda") * 0.02 for i in range(16)}
    elements = sum(value.numel() for value in state.values())
    dsq_ckpt.save(state, tmp_path / "0")
    base = torch.cuda.memory_allocated() - elements  # the codes stay
    for number in (1, 2):
        for value in state.values():
            value.mul_(1.01)
        torch.cuda.reset_peak_memory_stats()
        dsq_ckpt.save(state, tmp_path / str(number))
        assert torch.cuda.max_memory_allocated() - base <= 1.25 * elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 70), (1, 100), (100, 1), (100,), (40, 3, 5), (5, 40), (8, 8)], ids=str)
def test_scales_of_second_moments(shape, dtype):
    """Wherever in a row the elements begin."""
    generator = torch.Generator().manual_seed(0)
    octaves = torch.randint(-20, 20, shape, generator=generator)
    values = (torch.rand(shape, generator=generator) * 2.0**octaves).to(dtype)
    values.view(-1)[::7] = 0.0
    scales = MatrixScales.fit(values)
    device_scales = MatrixScales.fit(values.cuda())
    for mine, expected in ((device_scales.by_row, scales.by_row), (device_scales.by_column, scales.by_column)):
        assert mine.shape == expected.shape
        np.testing.assert_allclose(mine, expected, atol=1)  # sums in another order may round to the next
    flat = values.view(-1)
    for start in (0, 1, flat.numel() // 3, flat.numel() - 1):
        divided = scales.divide(flat[start:].cuda(), start)
        assert torch.equal(divided.cpu(), scales.divide(flat[start:], start))
