"""Training on a GPU: saves while it goes on, restores into its memory, searches by its metric."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dsq_ckpt
from dsq_ckpt.dcp import copies
from dsq_ckpt.engine import pipeline
from dsq_ckpt.quantization import device
from tests.helpers.states import find_differences, flat_tensors, load_copy

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
EXACT = dsq_ckpt.DSQConfig.preset("exact")
STEPS = 6


class Run:
    """A language model of 1.1 million parameters in training; batches are a function of the step."""

    def __init__(self, seed: int = 0, shard: bool = False, **options: Any) -> None:
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)]
        self.model: nn.Module = nn.Sequential(nn.Embedding(128, 256), *layers, nn.LayerNorm(256), nn.Linear(256, 128))
        self.model.cuda()
        if shard:
            mesh, policy = init_device_mesh("cuda", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for layer in self.model:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)

    def loss(self, step: int) -> torch.Tensor:
        tokens = torch.randint(0, 128, (512,), generator=torch.Generator().manual_seed(step)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.cross_entropy(self.model(tokens).float(), (tokens * 7 + 1) % 128)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.loss(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def on_host(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    return tree.cpu().clone() if isinstance(tree, torch.Tensor) else copy.deepcopy(tree)


@pytest.mark.parametrize(
    "stage, small", [("copy", device.HOST_BELOW), ("quantize", device.HOST_BELOW), ("quantize", 0)]
)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_save_while_training_goes_on_has_the_state_at_the_call(tmp_path, monkeypatch, options, stage, small):
    """Compared with saves of copies on the host: weights, moments and their scales, in a chain of six."""
    monkeypatch.setattr(device, "HOST_BELOW", small)
    run, copies = Run(**options), []
    pending = None
    keep = {"refinement": {"keep_last": STEPS}, "storage": {"stage": stage}}
    for number in range(STEPS):
        run.train(3 * number, 3 * number + 3)
        if pending is not None:
            pending.result()
        copies.append(on_host(run.state()))
        pending = dsq_ckpt.async_save(run.state(), tmp_path / "gpu" / str(number), config=keep, model=run.model)
    run.train(100, 103)  # over what is still on its way
    assert pending is not None and pending.result().depth == STEPS - 1
    monkeypatch.setattr(device, "DEVICES", set())
    host = dsq_ckpt.SaveHistory()
    for number, state in enumerate(copies):
        dsq_ckpt.save(state, tmp_path / "host" / str(number), config=keep, model=run.model, history=host)
    for number, state in enumerate(copies):
        gpu_copy, host_copy = (load_copy(tmp_path / place / str(number), state) for place in ("gpu", "host"))
        assert find_differences(gpu_copy, host_copy) == []


def test_by_default_a_state_is_copied_to_memory_that_is_pinned_once(tmp_path, monkeypatch):
    gc.collect()  # what other tests left
    copies.release_spare_memory()
    names, quantize = [], pipeline.quantize_state

    def noted(*arguments: Any) -> Any:
        names.append("training" if threading.current_thread() is threading.main_thread() else "background")
        return quantize(*arguments)

    monkeypatch.setattr(pipeline, "quantize_state", noted)
    run, places = Run(), []
    for number in range(3):
        run.train(number, number + 1)
        dsq_ckpt.async_save(run.state()["model"], tmp_path / str(number)).result()
        gc.collect()
        buffers = [buffer for some in copies._spare_buffers.values() for buffer in some]
        assert any(kind[1] for kind in copies._spare_buffers)
        assert all(
            buffer.is_pinned() == pinned for (_, pinned), some in copies._spare_buffers.items() for buffer in some
        )
        places.append({buffer.data_ptr() for buffer in buffers})
    assert names == ["background"] * 3
    assert places[0] and places[0] == places[1] == places[2]


def test_a_load_fills_tensors_of_the_gpu_in_place(tmp_path):
    run = Run()
    run.train(0, 5)
    dsq_ckpt.save(run.state(), tmp_path / "a", model=run.model)
    expected = load_copy(tmp_path / "a", on_host(run.state()))
    other = Run(seed=1)
    other.train(0, 1)
    state = other.state()
    places = {name: value.data_ptr() for name, value in flat_tensors(state).items()}
    dsq_ckpt.load(state, tmp_path / "a")
    assert all(value.data_ptr() == places[name] for name, value in flat_tensors(state).items())
    assert find_differences(on_host(state), expected) == []
    assert all(value.is_cuda for value in flat_tensors(state["model"]).values())


@pytest.mark.parametrize("background", [False, True])
def test_a_restored_run_goes_on_as_the_run_it_was_saved_from(tmp_path, background):
    """Bit for bit where everything is exact, by `Compressor`, with a scaler and random states of the GPU beside."""
    run = Run(fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    run.train(0, 5)
    extra = {"scaler": scaler.state_dict(), "random": torch.cuda.get_rng_state(), "step": 5}
    saver = dsq_ckpt.Compressor(run.model, run.optimizer, EXACT)
    result = saver.save(tmp_path / "a", extra=extra, background=background)
    drawn = torch.rand(4, device="cuda")
    run.train(5, 10)
    if background:
        result.result()
    saver.close()
    other = Run(seed=1, fused=True)
    loaded = dsq_ckpt.Compressor(other.model, other.optimizer, EXACT).load(
        tmp_path / "a", extra={"scaler": {}, "random": torch.cuda.get_rng_state(), "step": 0}
    )
    assert loaded["step"] == 5 and loaded["scaler"] == scaler.state_dict()
    torch.cuda.set_rng_state(loaded["random"])
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
    other.train(5, 10)
    assert find_differences(on_host(other.state()), on_host(run.state())) == []


def test_a_search_leaves_the_model_as_it_is(tmp_path):
    """Trials are decoded on the GPU, into the model, and taken back."""
    run = Run()
    run.train(0, 12)
    before = on_host(run.state())

    def evaluate() -> float:
        with torch.no_grad():
            return sum(run.loss(1000 + number).item() for number in range(4)) / 4

    metric = evaluate()
    with dsq_ckpt.Compressor(run.model, run.optimizer, evaluate=evaluate) as saver:
        for number in range(2):
            saver.save(tmp_path / str(number))
            assert saver.quality is not None and saver.quality["satisfied"]
            assert find_differences(on_host(run.state()), before) == [] and evaluate() == metric
        saver.load(tmp_path / "1")
    assert evaluate() <= metric * 1.02


@pytest.fixture(params=["nccl", "cpu:gloo,cuda:nccl"])
def group(request):
    """A process group of one process; by NCCL alone, without a backend for the CPU, too."""
    here = torch.device("cuda:0")
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1, device_id=here)
    yield request.param
    dist.destroy_process_group()


def test_fsdp2_by_dcp(tmp_path, group):
    """Shards with masters of fp32 and computation in bf16, by writer and reader, into another model."""
    run = Run(shard=True, fused=True)
    asynchronous = "gloo" in group  # which DCP asks for
    pending = None
    copies = []
    for number in range(3):
        run.train(3 * number, 3 * number + 3)
        if pending is not None:
            pending.result()
        writer = dsq_ckpt.DSQStorageWriter(tmp_path / str(number), EXACT, model=run.model)
        copies.append(copy.deepcopy(run.state()))
        if asynchronous:
            pending = dcp.async_save(run.state(), storage_writer=writer)
        else:
            dcp.save(run.state(), storage_writer=writer)
    run.train(100, 102)
    if pending is not None:
        pending.result()
    other = Run(seed=1, shard=True, fused=True)
    for number, expected in enumerate(copies):
        state = other.state()
        dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / str(number)))
        set_state_dict(
            other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        tensors = flat_tensors(other.state())
        for name, value in flat_tensors(expected).items():
            assert torch.equal(_local(tensors[name]), _local(value)), name


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, dist.tensor.DTensor) else value


def test_lossy_shards_are_what_dcp_would_restore_nearly(tmp_path, group):
    run = Run(shard=True)
    run.train(0, 20)
    for number in range(2):
        run.train(20 + number, 21 + number)
        dcp.save(run.state(), storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / str(number), model=run.model))
    assert [dsq_ckpt.describe(tmp_path / str(number))["keyframe"] for number in range(2)] == [True, False]
    loss = run.loss(1000).item()
    other = Run(seed=1, shard=True)
    state = other.state()
    dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "1"))
    set_state_dict(other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert other.loss(1000).item() == pytest.approx(loss, rel=0.02)
    other.train(21, 23)


def test_many_streams_and_threads(tmp_path):
    """Training on a stream of its own, and two runs saved by turns in the background."""
    runs, keeps = [Run(seed=1), Run(seed=2)], []
    histories = [dsq_ckpt.SaveHistory() for _ in runs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number, (at, run) in itertools.product(range(3), enumerate(runs)):
            run.train(number, number + 1)
            path = tmp_path / str(at) / str(number)
            keeps.append((on_host(run.state()), path))
            dsq_ckpt.async_save(run.state(), path, config=EXACT, history=histories[at]).result()
    for state, path in keeps:
        assert find_differences(load_copy(path, state), state) == []
