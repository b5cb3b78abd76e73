"""One process: everything that goes in comes out, exactly where that was promised."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import dsq_ckpt
from dsq_ckpt import ConfigError, DSQConfig, DSQStorageReader, DSQStorageWriter, LossyTensor, SaveFailed
from dsq_ckpt.api.saving import explain_missing_cpu_backend
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import processes
from tests.helpers.states import (
    DecodedCheckpoints,
    find_differences,
    flat_tensors,
    flatten,
    is_equal,
    load_copy,
    mixed_state,
    perturb,
    relative_error,
)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def test_default_configuration(tmp_path):
    state = mixed_state()
    dsq_ckpt.save(state, tmp_path / "a")
    back = load_copy(tmp_path / "a", state)
    lossy = {fqn for fqn in flatten(state) if fqn.startswith("lossy.")}
    assert set(find_differences(state, back)) == lossy
    for fqn in lossy:
        assert relative_error(flatten(state)[fqn], flatten(back)[fqn]) < 0.015, fqn
    base = load_copy(tmp_path / "a", state, refinement=False)
    for fqn in lossy:
        assert 0.05 < relative_error(flatten(state)[fqn], flatten(base)[fqn]) < 0.25, fqn


def test_source_is_left_alone(tmp_path):
    state = mixed_state()
    before = copy.deepcopy(state)
    dsq_ckpt.save(state, tmp_path / "a")
    assert find_differences(state, before) == []


def test_exact_configuration(tmp_path):
    state = mixed_state()
    for number in range(3):
        dsq_ckpt.save(state, tmp_path / str(number), config=dsq_ckpt.DSQConfig.preset("exact"))
        assert find_differences(state, load_copy(tmp_path / str(number), state)) == []
        state = perturb(state, number)
    assert Manifest.read(tmp_path / "2").refinement == "none"
    load_copy(tmp_path / "2", state, refinement=True, exact=["*"])


def test_bf16_method(tmp_path):
    state = mixed_state()
    dsq_ckpt.save(state, tmp_path / "a", config={"quantize": {"weights": {"method": "bf16"}}})
    back = flatten(load_copy(tmp_path / "a", state))
    for fqn, value in flat_tensors(state).items():
        if fqn.startswith("lossy.") and value.element_size() > 2:
            assert is_equal(back[fqn], value.bfloat16().to(value.dtype)), fqn
        else:
            assert is_equal(back[fqn], value), fqn
    with pytest.raises(dsq_ckpt.DSQError, match="stored lossy"):
        load_copy(tmp_path / "a", state, exact=["lossy.linear*"])


def test_minimum_size_and_rules(tmp_path):
    state = {"w": torch.randn(64, 64), "under": torch.randn(63, 65), "kept": torch.randn(100, 100)}
    dsq_ckpt.save(state, tmp_path / "a", config={"quantize": {"rules": [{"pattern": "kept", "exact": True}]}})
    assert find_differences(state, load_copy(tmp_path / "a", state)) == ["w"]
    dsq_ckpt.save(state, tmp_path / "b", config={"quantize": {"min_elements": 4097}})
    assert sorted(find_differences(state, load_copy(tmp_path / "b", state))) == ["kept"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("delta", [False, True])
def test_nonfinite_is_stored_exactly(tmp_path, value, delta):
    state = {"model.bad.weight": torch.randn(80, 80), "model.good.weight": torch.randn(80, 80)}
    if delta:
        dsq_ckpt.save(state, tmp_path / "before")
    state["model.bad.weight"][3, 4] = value
    with pytest.warns(UserWarning, match=r"NaN or Inf: model\.bad\.weight"):
        dsq_ckpt.save(state, tmp_path / "a")
    back = load_copy(tmp_path / "a", state)
    assert find_differences(state, back) == ["model.good.weight"]
    assert relative_error(state["model.good.weight"], back["model.good.weight"]) < 0.015
    assert Manifest.read(tmp_path / "a").nonfinite == ["model.bad.weight"]
    state["model.bad.weight"][3, 4] = 0.0  # training recovers, and so does the chain
    dsq_ckpt.save(state, tmp_path / "b")
    back = load_copy(tmp_path / "b", state)
    assert relative_error(state["model.bad.weight"], back["model.bad.weight"]) < 0.015


def test_nonfinite_error(tmp_path):
    state = {"bad": torch.full((80, 80), float("nan")), "good": torch.randn(80, 80)}
    with pytest.raises(dsq_ckpt.DSQError, match="bad"):
        dsq_ckpt.save(state, tmp_path / "a", config={"quantize": {"nonfinite": "error"}})
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_only_nonfinite_tensors(tmp_path):
    state = {"bad": torch.full((80, 80), float("nan"))}
    for name in "ab":
        with pytest.warns(UserWarning, match="bad"):
            dsq_ckpt.save(state, tmp_path / name)
        assert find_differences(state, load_copy(tmp_path / name, state)) == []


@pytest.mark.parametrize("state", [
    {}, {"n": 1}, {"e": torch.empty(0)}, {"z": torch.zeros(100, 100)}, {"c": torch.full((100, 100), 0.5)},
    {"two": torch.tensor([1e-30, 1e30]).repeat(50, 100)}, {"sub": torch.full((80, 80), 1e-40)},
], ids=lambda state: next(iter(state), "nothing"))
def test_degenerate_states(tmp_path, state):
    for name in "abc":
        dsq_ckpt.save(state, tmp_path / name)
        back = load_copy(tmp_path / name, state)
        for fqn, value in flat_tensors(state).items():
            assert torch.allclose(value, flat_tensors(back)[fqn], rtol=0.02, atol=1e-37), fqn


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("codebook", [{"fit": "lattice"}, {"fit": "kmeans", "bins": 4}])
def test_zeros_come_back_as_zeros(tmp_path, bits, codebook):
    """Rows of an embedding that were never used have moments of 0: anything else would be a huge update."""
    state = {"embed.weight.exp_avg": torch.randn(200, 64) * 1e-4, "fc.weight": torch.randn(200, 64).relu()}
    state["embed.weight.exp_avg"][50:150] = 0
    chosen = {"codebook": codebook, "refinement_bits": bits}
    for name in "abc":
        dsq_ckpt.save(state, tmp_path / name, config={"quantize": {"weights": chosen, "exp_avg": chosen}})
        back = load_copy(tmp_path / name, state)
        for fqn, value in state.items():
            assert not back[fqn][value == 0].any(), (name, fqn)
        state["embed.weight.exp_avg"][:50] += torch.randn(50, 64) * 3e-5
        state["fc.weight"][state["fc.weight"] > 0] += 0.01


def test_overwrite(tmp_path):
    first, second = mixed_state(1), mixed_state(2)
    dsq_ckpt.save(first, tmp_path / "a")
    checkpoints = DecodedCheckpoints(first, tmp_path / "a")
    with pytest.raises(dsq_ckpt.DSQError, match="overwrite=True"):
        dsq_ckpt.save(second, tmp_path / "a")
    checkpoints.check()
    names = {path.name for path in (tmp_path / "a").iterdir()}
    dsq_ckpt.save(second, tmp_path / "a", overwrite=True, parent=None)
    after = {path.name for path in (tmp_path / "a").iterdir()}
    assert names & after == {"manifest.json"}
    back = flatten(load_copy(tmp_path / "a", second))
    assert relative_error(second["lossy"]["linear.weight"], back["lossy.linear.weight"]) < 0.015
    dsq_ckpt.save(perturb(second, 1), tmp_path / "a", overwrite=True)  # coded against what it replaces
    assert Manifest.read(tmp_path / "a").depth == 1
    back = flatten(load_copy(tmp_path / "a", second))
    assert relative_error(perturb(second, 1)["lossy"]["linear.weight"], back["lossy.linear.weight"]) < 0.015
    assert {file.name for file in Manifest.read(tmp_path / "a").files} | {"manifest.json"} == {
        path.name for path in (tmp_path / "a").iterdir()
    }


def test_dtype_must_match(tmp_path):
    state = {"w": torch.randn(80, 80), "b": torch.randn(80)}
    dsq_ckpt.save(state, tmp_path / "a")
    half = {fqn: value.bfloat16() for fqn, value in state.items()}
    with pytest.raises(LossyTensor, match="allow_cast"):
        dsq_ckpt.load(half, tmp_path / "a")
    dsq_ckpt.load(half, tmp_path / "a", allow_cast=True)
    assert is_equal(half["b"], state["b"].bfloat16())
    with pytest.raises(CheckpointException, match=r"allow_cast=True, under dcp\.load to DSQStorageReader"):
        dcp.load(half, storage_reader=DSQStorageReader(tmp_path / "a"))
    dcp.load(half, storage_reader=DSQStorageReader(tmp_path / "a", allow_cast=True))


def test_names_and_shapes_must_match(tmp_path):
    state = {"w": torch.randn(80, 80), "n": 3}
    dsq_ckpt.save(state, tmp_path / "a")
    for wrong, says in (
        ({"other": torch.zeros(80, 80)}, "other"), ({"w": torch.zeros(80, 81)}, "(?i)size|shape"), ({"m": 1}, "m"),
    ):
        with pytest.raises(dsq_ckpt.DSQError, match=says):
            dsq_ckpt.load(wrong, tmp_path / "a")
    part = {"w": torch.zeros(80, 80)}
    dsq_ckpt.load(part, tmp_path / "a")  # a part may be loaded
    assert relative_error(state["w"], part["w"]) < 0.015


@pytest.mark.parametrize("path", ["nothing", "file", "dcp", "run"])
def test_not_a_checkpoint(tmp_path, path):
    (tmp_path / "file").write_text("x")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dsq_ckpt.save({"w": torch.ones(3)}, tmp_path / "run" / "step-1")
    says = {"nothing": "does not exist", "file": "is a file, and", "dcp": "FileSystemReader", "run": "step-1"}
    with pytest.raises(dsq_ckpt.DSQError, match=says[path]):
        dsq_ckpt.load({"w": torch.ones(3)}, tmp_path / path)
    with pytest.raises(dsq_ckpt.CheckpointNotFound, match=says[path]):
        dsq_ckpt.describe(tmp_path / path)


def test_plain_dcp_calls(tmp_path):
    state = mixed_state()
    dcp.save(state, storage_writer=DSQStorageWriter(tmp_path / "a"), no_dist=True)
    dcp.save(perturb(state, 1), checkpoint_id=tmp_path / "b", storage_writer=DSQStorageWriter(), no_dist=True)
    assert Manifest.read(tmp_path / "b").parent == Manifest.read(tmp_path / "a").save_id
    back = copy.deepcopy(state)
    dcp.load(back, storage_reader=DSQStorageReader(tmp_path / "a"), no_dist=True)
    assert find_differences(back, load_copy(tmp_path / "a", state)) == []
    reader = DSQStorageReader()
    for name in "ab":
        dcp.load(back, checkpoint_id=tmp_path / name, storage_reader=reader, no_dist=True)
        assert find_differences(back, load_copy(tmp_path / name, state)) == []
    with pytest.raises(BaseException, match="checkpoint_id"):
        dcp.save(state, storage_writer=DSQStorageWriter(), no_dist=True)
    with pytest.raises(BaseException, match="checkpoint_id"):
        dcp.load(state, storage_reader=DSQStorageReader(), no_dist=True)
    with pytest.raises(ConfigError, match="bins"):
        DSQStorageWriter(tmp_path / "c", {"quantize": {"weights": {"codebook": {"fit": "lattice", "bins": 3}}}})


def test_writer_and_reader_are_reusable(tmp_path):
    state, writer, reader = mixed_state(), DSQStorageWriter(), DSQStorageReader()
    for number in range(3):
        dcp.save(state, checkpoint_id=tmp_path / str(number), storage_writer=writer, no_dist=True)
        back = copy.deepcopy(state)
        dcp.load(back, checkpoint_id=tmp_path / str(number), storage_reader=reader, no_dist=True)
        assert relative_error(state["lossy"]["linear.weight"], back["lossy"]["linear.weight"]) < 0.015
        state = perturb(state, number)
    assert Manifest.read(tmp_path / "2").depth == 2
    fixed = DSQStorageReader(tmp_path / "0")  # the checkpoint may be replaced between two loads
    dcp.load(back, storage_reader=fixed, no_dist=True)
    dsq_ckpt.save(state, tmp_path / "0", overwrite=True, parent=None)
    dcp.load(back, storage_reader=fixed, no_dist=True)


def test_async_in_one_process(tmp_path):
    state = mixed_state()
    dsq_ckpt.save(state, tmp_path / "sync" / "0")
    futures, history = [], dsq_ckpt.SaveHistory()
    for number in range(4):
        before = copy.deepcopy(state)
        futures.append(dsq_ckpt.async_save(state, tmp_path / f"async{number}", history=history))
        for value in flat_tensors(state).values():
            value.zero_()
        state["meta"]["step"] = -1
        if number == 0:
            futures[0].result()
            loaded = load_copy(tmp_path / "async0", state)
            assert find_differences(loaded, load_copy(tmp_path / "sync" / "0", state)) == []
            assert loaded["meta"]["step"] == 1234
            history = dsq_ckpt.SaveHistory()  # the next is a keyframe
        state = perturb(before, number)
    futures[-1].result()
    assert [Manifest.read(tmp_path / f"async{n}").depth for n in range(4)] == [0, 0, 1, 2]
    with pytest.raises(dsq_ckpt.DSQError, match=r"torch\.distributed"):
        dsq_ckpt.async_save(state, tmp_path / "p", processes=True)
    with pytest.raises(dsq_ckpt.CheckpointExists, match=r"\(overwrite=True\)$"):  # before anything is quantized
        dsq_ckpt.async_save(state, tmp_path / "async0")


@pytest.mark.parametrize("backends", ["nccl", "cuda:nccl", "cuda:gloo,xpu:gloo"])
def test_groups_that_cannot_serve_processes(backends):
    for with_cpu in ("cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cpu:gloo,cuda:gloo"):
        assert explain_missing_cpu_backend(with_cpu) is None
    reason = explain_missing_cpu_backend(backends)
    assert f"only '{backends}': init_process_group(\"cpu:gloo,cuda:nccl\")" in str(reason)


def test_processes_over_a_group_without_cpu(tmp_path):
    """As of a default group that is NCCL's alone."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(SaveFailed, match=r"'cuda:gloo': init_process_group\(\"cpu:gloo,cuda:nccl\"\)"):
            dsq_ckpt.async_save({"w": torch.ones(3)}, tmp_path / "a", processes=True)
    finally:
        dist.destroy_process_group()
    assert not (tmp_path / "a").exists()


_ONE_IS_GONE = """
import os, sys, torch, torch.distributed as dist, dsq_ckpt
from dsq_ckpt.api import background
from datetime import timedelta
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
dist.barrier()  # a rank may begin late on a busy machine
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
if rank:
    background.get_group = lambda like: os._exit(0)
try:
    dsq_ckpt.async_save({"w": torch.ones(3)}, sys.argv[1] + "/a").result()
except Exception as error:
    print("failed:", error)
"""


def test_a_rank_is_gone_while_groups_are_made(tmp_path):
    """The group that this makes waits no longer than that of the caller, whose default is half an hour."""
    status, output = processes.run(["-c", _ONE_IS_GONE, str(tmp_path)], forked=True)
    assert status == 0 and "failed:" in output, output


def test_layer_types_of_a_model(tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(128, 64)
            self.mix = nn.Linear(64, 128)
            self.scale = nn.LayerNorm((64, 128))

    net = Net()
    dsq_ckpt.save({"model": net.state_dict()}, tmp_path / "a", model=net)
    assert set(Manifest.read(tmp_path / "a").groups) == {"weights/embedding", "weights/linear"}
    back = load_copy(tmp_path / "a", {"model": net.state_dict()})
    assert is_equal(back["model"]["scale.weight"], net.scale.weight.detach())


def test_describe_adds_up(tmp_path):
    state = mixed_state()
    dsq_ckpt.save(state, tmp_path / "a")
    report = dsq_ckpt.describe(tmp_path / "a")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert report["bytes_written"] == report["bytes_kept"] == on_disk
    assert report["bytes_logical"] >= sum(t.numel() * t.element_size() for t in flat_tensors(state).values())
    assert report["keyframe"] and report["depth"] == 0 and report["refinement"] == "kept"
    dsq_ckpt.save(perturb(state, 1), tmp_path / "b", config={"refinement": {"keep_last": 1}})
    assert dsq_ckpt.describe(tmp_path / "a")["bytes_written"] == pytest.approx(on_disk, rel=0.01)
    assert dsq_ckpt.describe(tmp_path / "a")["bytes_kept"] < on_disk


def test_configuration_sources_are_equal(tmp_path):
    state = mixed_state()
    tree = {"quantize": {"weights": {"codebook": {"fit": "kmeans", "bins": 5}}}}
    (tmp_path / "c.json").write_text('{"quantize": {"weights": {"codebook": {"fit": "kmeans", "bins": 5}}}}')
    (tmp_path / "c.yaml").write_text("quantize: {weights: {codebook: {fit: kmeans, bins: 5}}}")
    sources = [tree, DSQConfig.create(tree), str(tmp_path / "c.json"), tmp_path / "c.yaml"]
    results = []
    for number, source in enumerate(sources):
        dsq_ckpt.save(state, tmp_path / str(number) / "a", config=source)
        results.append(load_copy(tmp_path / str(number) / "a", state))
    assert all(find_differences(results[0], other) == [] for other in results[1:])


def test_a_target_that_cannot_be_written_to_is_named(tmp_path):
    """The elements of an expanded tensor share memory."""
    dsq_ckpt.save({"wide": torch.randn(1, 200).expand(100, 200)}, tmp_path / "a")
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"'wide' is expanded: .* load into its clone"):
        dsq_ckpt.load({"wide": torch.zeros(1, 200).expand(100, 200)}, tmp_path / "a")
