"""Chunks that are quantized where they lie: whatever the kernels, what is stored is what the host would store."""

from __future__ import annotations

import copy
import pickle
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.codebooks.kmeans import KMeans
from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.history import default_history
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization import device
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey, QuantizingChunk
from dsq_ckpt.quantization.codebook import GroupSketch, fit_group
from dsq_ckpt.quantization.device import coding, transfer
from dsq_ckpt.quantization.device.coding import DeviceChunk, DeviceTableCache, decode_chunk
from dsq_ckpt.search.trial import TrialModel
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers.states import find_differences, flat_tensors, load_copy, mixed_state, perturb

pytestmark = pytest.mark.usefixtures("one_thread")
HOST: set[str] = set()
SMALL = 8192
FEW = ("linear.weight", "brain.weight", "strided.weight")
MORE = (*FEW, "half.weight", "turned.weight")


@pytest.fixture(params=["cpu", "triton"])
def here(request, monkeypatch):
    """Tensors of the CPU are worked on as if it were a device, by these kernels, and brought over in small pieces."""
    if request.param == "triton":
        interpreted = pytest.importorskip("dsq_ckpt.triton_kernels.backend").TritonBackend
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled here, and take CUDA tensors: see test_cuda.py")
        from tests.helpers.interpreted import remember_functions

        remember_functions()
        for module in (coding, device.passes, dsq_ckpt.quantization.dequantizer):
            monkeypatch.setattr(module, "backend_for", interpreted)
    monkeypatch.setattr(device, "DEVICES", {"cpu"})
    monkeypatch.setattr(device, "HOST_BELOW", 0)
    monkeypatch.setattr(coding, "_PIECE", SMALL)
    monkeypatch.setattr(transfer, "SLOT", 1000)
    monkeypatch.setattr(transfer, "_transfers", {})
    monkeypatch.setattr(device, "_usable", {})


def codes_of(path: Path) -> dict[str, bytes]:
    """The codes of every quantized tensor."""
    with Checkpoint(path) as checkpoint, Workers(1, 1 << 20) as workers:
        codes = {}
        for fqn, entry in checkpoint.index["tensors"].items():
            ref = checkpoint.find_record(fqn, tuple(entry["chunks"][0][0]))
            if checkpoint.read_record(ref)["type"] == "coded":
                codes[fqn] = checkpoint.decode_codes(ref, workers).tobytes()
        return codes


def chain_of(run: Path, states: list[dict[str, Any]], save: Any) -> list[Path]:
    paths, history = [run / str(number) for number in range(len(states))], dsq_ckpt.SaveHistory()
    for state, path in zip(states, paths, strict=True):
        save(state, path, config={"refinement": {"keep_last": len(states)}}, history=history)
    return paths


def states() -> list[dict[str, Any]]:
    first = mixed_state()
    second = perturb(first, 1)
    third = perturb(second, 2, scale=1e-5)  # few codes change: these travel one by one
    return [first, second, third, copy.deepcopy(third)]


def few_states(names: tuple[str, ...] = FEW) -> list[dict[str, Any]]:
    """The same of three of the tensors, for what treats all dtypes alike."""
    return [{"lossy": {name: state["lossy"][name] for name in names}, "meta": state["meta"]} for state in states()]


@pytest.fixture(scope="module")
def by_the_host(tmp_path_factory) -> list[tuple[dict[str, bytes], dict[str, Any]]]:
    """The codes that the host stores of each of `states()`, and the state that a load gives."""
    far = chain_of(tmp_path_factory.mktemp("host"), states(), dsq_ckpt.save)
    return [(codes_of(path), load_copy(path, states()[0])) for path in far]


@pytest.fixture(scope="module")
def few_by_the_host(tmp_path_factory) -> list[tuple[dict[str, bytes], dict[str, Any]]]:
    """The same of `few_states()`."""
    far = chain_of(tmp_path_factory.mktemp("host"), few_states(), dsq_ckpt.save)
    return [(codes_of(path), load_copy(path, few_states()[0])) for path in far]


def staged(state: dict[str, Any], path: Path, *, config: dict[str, Any], **options: Any) -> None:
    """An asynchronous save whose state is gone as soon as the call returns, as codes: so are states on a GPU staged."""
    state = copy.deepcopy(state)
    response = dsq_ckpt.async_save(state, path, config={**config, "storage": {"stage": "quantize"}}, **options)
    for value in flat_tensors(state).values():
        value.zero_()
    response.result()


@pytest.mark.parametrize("save", [dsq_ckpt.save, staged], ids=["save", "async_save"])
def test_a_chain_is_what_the_host_makes(by_the_host, here, tmp_path, save):
    near = chain_of(tmp_path, states(), save)
    for path, (codes, values) in zip(near, by_the_host, strict=True):
        assert codes_of(path) == codes
        assert find_differences(load_copy(path, states()[0]), values) == []


# Copies are made before any kernel runs, so one case shows that Triton's kernels quantize what is left.
@pytest.mark.parametrize("here, save, together", [
    pytest.param(*case, marks=[] if case[0] == "cpu" or case[1:] == (staged, 30_000) else [pytest.mark.campaign])
    for case in product(["cpu", "triton"], [dsq_ckpt.save, staged], [1 << 28, 30_000])
], indirect=["here"])
def test_small_chunks_are_copied_to_the_host(by_the_host, here, tmp_path, monkeypatch, save, together):
    """With the large ones on the device nothing else is stored; without room for more copies the rest stays there."""
    served, copied, serves, copy_all = set(), [], device.is_supported, transfer.host_copies

    def noted(chunk: Chunk) -> bool:
        if is_served := serves(chunk):
            served.add(chunk.key.elements)
        return is_served

    def noted_copies(small: list[torch.Tensor]) -> list[torch.Tensor]:
        copied.append([tensor.numel() for tensor in small])
        return copy_all(small)

    least = 6400  # elements of the largest that is quantized on the device
    monkeypatch.setattr(device, "HOST_BELOW", least)
    monkeypatch.setattr(device, "is_supported", noted)
    monkeypatch.setattr(transfer, "host_copies", noted_copies)
    monkeypatch.setattr(transfer, "QUEUED_TOGETHER", together)
    near = chain_of(tmp_path, states(), save)
    assert len(copied) == len(near) and all(0 < size < least for some in copied for size in some) and copied[0]
    assert max(served) >= least and (min(served) >= least) == (together > 30_000)
    for path, (codes, values) in zip(near, by_the_host, strict=True):
        assert codes_of(path) == codes
        assert find_differences(load_copy(path, states()[0]), values) == []


def test_trials_of_a_search_change_the_model_itself(here, tmp_path, monkeypatch):
    """No copies on the host: the metric would be that of the original weights, whatever is tried."""
    monkeypatch.setattr(device, "HOST_BELOW", 1 << 30)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 96))
    original, seen = model[0].weight.detach().clone(), []

    def evaluate() -> float:
        seen.append(not torch.equal(model[0].weight, original))
        with torch.no_grad():
            return float((model(torch.ones(4, 96)) ** 2).mean()) + 1.0

    saver = dsq_ckpt.Compressor(model, torch.optim.SGD(model.parameters()), evaluate=evaluate)
    saver.save(tmp_path / "a")
    assert any(seen) and torch.equal(model[0].weight, original)


@pytest.mark.parametrize("place", [HOST, {"cpu"}], ids=["host", "device"])
def test_values_that_memory_holds_negated(here, tmp_path, monkeypatch, place):
    """As of the imaginary part of a conjugate: of weights, and of both moments."""
    monkeypatch.setattr(device, "DEVICES", place)
    plain = {
        "model.a.weight": torch.randn(80, 90), "optimizer.state.a.weight.exp_avg": torch.randn(80, 90) * 1e-3,
        "optimizer.state.a.weight.exp_avg_sq": torch.rand(80, 90) * 1e-6,
    }
    negated = {name: torch._neg_view(-value) for name, value in plain.items()}
    assert all(value.is_neg() for value in negated.values())
    for number in range(2):
        dsq_ckpt.save(plain, tmp_path / "plain" / str(number))
        dsq_ckpt.save(negated, tmp_path / "negated" / str(number))
    for number in range(2):
        negated_path, plain_path = tmp_path / "negated" / str(number), tmp_path / "plain" / str(number)
        assert codes_of(negated_path) == codes_of(plain_path) and codes_of(negated_path)
        assert find_differences(load_copy(negated_path, plain), load_copy(plain_path, plain)) == []


def test_nobody_waits_for_a_chunk(here, tmp_path, monkeypatch):
    """Memory is reserved for the results of a search before their number is known."""
    capacities = {"gather_protected": [], "find_changes": []}
    backend_for = coding.backend_for

    def watched(where: torch.device) -> Any:
        backend = backend_for(where)
        for name, seen in capacities.items():
            look = getattr(backend, name)

            def search(*args: Any, look: Any = look, seen: Any = seen, **options: Any) -> Any:
                seen.append(options.get("capacity", args[-1]))
                return look(*args, **options)

            monkeypatch.setattr(backend, name, search, raising=False)
        return backend

    monkeypatch.setattr(coding, "backend_for", watched)
    chain_of(tmp_path, few_states(), dsq_ckpt.save)
    for seen in capacities.values():
        assert seen and all(isinstance(capacity, int) for capacity in seen)


@pytest.mark.parametrize("place, instead", [
    ("protected_capacity", lambda tables, n: None), ("change_capacity", lambda tables, n: 0),
    ("change_capacity", lambda tables, n: 1),
], ids=["waited for", "codes travel whole", "more changes than capacity"])
def test_without_room_the_same_is_stored(few_by_the_host, here, tmp_path, monkeypatch, place, instead):
    """As on the host, and so as with room (`test_a_chain_is_what_the_host_makes`)."""
    monkeypatch.setattr(coding.DeviceTables, place, instead)
    near = chain_of(tmp_path, few_states(), dsq_ckpt.save)
    for path, (codes, values) in zip(near, few_by_the_host, strict=True):
        assert codes_of(path) == codes
        assert find_differences(load_copy(path, few_states()[0]), values) == []


def test_a_tensor_that_changes_under_a_save_fails_it(here):
    x = torch.randn(64, 80)
    fitted = fitted_on(chunk_of(x, 4), Lattice())
    device_chunk = DeviceChunk(chunk_of(x * 1000, 4), DeviceTableCache().get(fitted, x.device))
    with pytest.raises(SaveFailed, match=r"'w': .* were counted; did it change"):
        device_chunk.block(slice(0, 5120))


def test_a_loaded_checkpoint_is_gone_on_from(here, tmp_path, monkeypatch):
    """Codes that are no longer on the device are brought there."""
    first, second, *_ = few_states()
    dsq_ckpt.save(first, tmp_path / "device" / "0")
    history = dsq_ckpt.SaveHistory()
    load_copy(tmp_path / "device" / "0", first, history=history)
    dsq_ckpt.save(second, tmp_path / "device" / "1", history=history)
    assert not dsq_ckpt.describe(tmp_path / "device" / "1")["keyframe"]
    monkeypatch.setattr(device, "DEVICES", HOST)
    _, path = chain_of(tmp_path / "host", [first, second], dsq_ckpt.save)
    assert codes_of(tmp_path / "device" / "1") == codes_of(path)


def test_a_failed_save_leaves_the_run_usable(here, tmp_path, monkeypatch):
    first, second, third, _ = few_states()
    dsq_ckpt.save(first, tmp_path / "0")

    def broken(*_: object) -> None:
        raise OSError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(transfer.Transfer, "fetch", broken)
        with pytest.raises(SaveFailed, match="the link is down"):
            dsq_ckpt.save(second, tmp_path / "1")
    dsq_ckpt.save(third, tmp_path / "2")
    assert dsq_ckpt.describe(tmp_path / "2")["depth"] == 1
    near = load_copy(tmp_path / "2", first)
    monkeypatch.setattr(device, "DEVICES", HOST)
    _, path = chain_of(tmp_path / "host", [first, third], dsq_ckpt.save)
    assert find_differences(near, load_copy(path, first)) == []


def test_codes_past_a_table_fail_the_save(here, tmp_path):
    """Previous codes that do not belong to the parent's codebook must not be used."""
    first, second, *_ = few_states()
    dsq_ckpt.save(first, tmp_path / "0")
    [checkpoint] = default_history().checkpoints()
    name = next(key for key in checkpoint.cache.device_codes if key.fqn == "lossy.linear.weight")
    checkpoint.cache.device_codes[name][5] = 255
    with pytest.raises(SaveFailed, match="parent"):
        dsq_ckpt.save(second, tmp_path / "1")


def test_a_device_without_kernels_is_served_by_the_host(here, tmp_path, monkeypatch):
    def missing(_: object) -> None:
        raise ModuleNotFoundError("no triton")

    monkeypatch.setattr(device, "backend_for", missing)
    with pytest.warns(UserWarning, match="quantized on the host, which is slower: ModuleNotFoundError: no triton"):
        dsq_ckpt.save(mixed_state(), tmp_path / "0")
    assert codes_of(tmp_path / "0")


def _full(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("place", [
    "dsq_ckpt.engine.chunks.DeviceChunk.__init__", "dsq_ckpt.engine.chunks.parent_on_device",
    "dsq_ckpt.quantization.passes.full_sketches",
    "dsq_ckpt.quantization.passes.add_joint_on_device",
])
def test_a_device_without_memory_is_served_by_the_host(here, tmp_path, monkeypatch, place):
    first, second, *_ = few_states()
    dsq_ckpt.save(first, tmp_path / "device" / "0")
    with monkeypatch.context() as patch:
        patch.setattr(place, _full)
        dsq_ckpt.save(second, tmp_path / "device" / "1")
    monkeypatch.setattr(device, "DEVICES", HOST)
    far = chain_of(tmp_path / "host", [first, second], dsq_ckpt.save)
    for number, path in enumerate(far):
        assert codes_of(tmp_path / "device" / str(number)) == codes_of(path)


def test_device_quantization_can_be_turned_off(here, tmp_path, monkeypatch):
    monkeypatch.setattr(DeviceChunk, "__init__", _full)
    dsq_ckpt.save(mixed_state(), tmp_path / "0", config={"storage": {"on_device": False}})
    assert codes_of(tmp_path / "0")


def test_previous_codes_leave_the_device_chunk_by_chunk(here, tmp_path, monkeypatch):
    """And all of them where a keyframe comes next."""
    first, second, *_ = few_states(MORE)
    dsq_ckpt.save(first, tmp_path / "0")
    [checkpoint] = default_history().checkpoints()
    before = [weakref.ref(codes) for codes in checkpoint.cache.device_codes.values()]
    alive = []

    class Watched(DeviceChunk):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.append(sum(codes() is not None for codes in before))

    monkeypatch.setattr("dsq_ckpt.engine.chunks.DeviceChunk", Watched)
    dsq_ckpt.save(second, tmp_path / "1")
    assert len(alive) == len(before) > 3
    assert alive == sorted(alive, reverse=True) and alive[-1] <= 2
    dsq_ckpt.save(second, tmp_path / "2", parent=None)
    [checkpoint] = default_history().checkpoints()
    assert len(checkpoint.cache.device_codes) == len(before)
    dsq_ckpt.save(second, tmp_path / "3", config={"delta": {"enabled": False}})
    assert not checkpoint.cache.device_codes


def chunk_of(x: torch.Tensor, bits: int, parent: Any = None, exponent: float = 0.25) -> Chunk:
    return Chunk(ChunkKey("w", (0,) * x.dim(), tuple(x.shape)), x, "weights/linear", bits, exponent, parent)


def fitted_on(chunk: Chunk, codebook: Any) -> Any:
    counts = np.zeros((1, FULL.size), np.int64)
    device.passes.add_joint([chunk], FULL, counts)
    return fit_group(GroupSketch(counts, FULL), codebook, None, chunk.refinement_bits)


CODEBOOKS = [Lattice(step=0.7), KMeans(bins=4, domain="log", protect=0.01), KMeans(bins=200, prune=0.2)]
COVERING = ((0, 0), (1, 3), (2, 1), (2, 4))


# Kernels convert 16-bit values to float32 first: with these, each codebook and each number of bits is one case.
@pytest.mark.parametrize("dtype, number, bits", [
    pytest.param(dtype, *case, marks=[] if dtype == torch.float32 or case in COVERING else [pytest.mark.campaign])
    for dtype in (torch.float32, torch.bfloat16, torch.float16) for case in product(range(3), [0, 1, 3, 4])
])
def test_blocks_and_trials_are_those_of_the_host(here, bits, number, dtype):
    codebook = CODEBOOKS[number]
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(3, 61, 53, generator=generator) * 0.1).to(dtype)
    if isinstance(codebook, KMeans) and codebook.domain == "log":
        x = x.abs()
    chunk = chunk_of(x, bits)
    fitted = fitted_on(chunk, codebook)
    near = DeviceChunk(chunk, DeviceTableCache().get(fitted, x.device))
    far = QuantizingChunk(chunk, fitted)
    with Workers(1, 1024) as workers:
        for where in workers.blocks(x.numel()):
            near_block, far_block = near.block(where), far.block(where)
            assert np.array_equal(
                near_block.protected, far_block.protected
            ) and near_block.refinement == far_block.refinement
            assert np.array_equal(near.codes[where], far.codes[where])
        model = torch.nn.Module()
        model.register_buffer("w", x)
        trial = TrialModel(model, [chunk], workers)
        decoded = decode_chunk(chunk, DeviceTableCache().get(fitted, x.device), bits).view(x.shape)
        device.DEVICES.clear()
        assert torch.equal(decoded, trial._decode_chunk(chunk, fitted, bits))


def test_a_staged_chunk_travels_to_another_process(here):
    chunk = chunk_of(torch.randn(64, 80), 4)
    device_chunk = DeviceChunk(chunk, DeviceTableCache().get(fitted_on(chunk, Lattice()), chunk.tensor.device))
    copied = pickle.loads(pickle.dumps(device_chunk))
    assert copied.device_codes is None and np.array_equal(copied.codes, device_chunk.codes)
    assert copied.block(slice(0, 5120)).refinement == device_chunk.block(slice(0, 5120)).refinement


def test_an_error_on_the_way_is_raised_again_in_another_process(here, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError("the link is down")

    monkeypatch.setattr(transfer.Transfer, "fetch", broken)
    chunk = chunk_of(torch.randn(64, 80), 4)
    device_chunk = DeviceChunk(chunk, DeviceTableCache().get(fitted_on(chunk, Lattice()), chunk.tensor.device))
    copied = pickle.loads(pickle.dumps(device_chunk))
    with pytest.raises(SaveFailed, match="'w' did not arrive on the host: OSError: the link is down"):
        copied.block(slice(0, 8))
