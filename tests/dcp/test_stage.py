"""Asynchronous saves that copy the state: what training waits for, and whose memory a copy takes."""

from __future__ import annotations

import copy
import gc
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dsq_ckpt
from dsq_ckpt.core.memory import available_memory
from dsq_ckpt.dcp import copies
from dsq_ckpt.dcp.copies import CopyCost, copy_bare_state_dict, copy_state_dict, should_copy
from dsq_ckpt.engine import pipeline
from dsq_ckpt.storage.manifest import Manifest
from tests.dcp.planners import Balancing
from tests.helpers.states import find_differences, flat_tensors, load_copy, mixed_state, perturb
from tests.helpers.training import Net, compute_loss

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _nothing_spare():
    copies.release_spare_memory()


def config(stage):
    return {"storage": {"stage": stage}}


def ruin(state):
    """Change the state as training does right after the call."""
    for value in flat_tensors(state).values():
        value.zero_()


@pytest.fixture
def quantizing(monkeypatch):
    """Names of the threads that quantized."""
    names, original = [], pipeline.quantize_state

    def noted(*arguments):
        names.append("training" if threading.current_thread() is threading.main_thread() else "background")
        return original(*arguments)

    monkeypatch.setattr(pipeline, "quantize_state", noted)
    return names


# What is saved


@pytest.mark.parametrize("stage", ["auto", "copy", "quantize"])
def test_staged_state_is_the_state_at_the_call(tmp_path, stage, quantizing):
    """A keyframe and a delta, equal to those of synchronous saves bit for bit; only `quantize` makes training wait."""
    states = [mixed_state(), perturb(mixed_state(), 1)]
    for step, state in enumerate(states):
        dsq_ckpt.save(state, tmp_path / "sync" / str(step), pinned=True)
    quantizing.clear()
    for step, state in enumerate(states):
        mine = copy.deepcopy(state)
        future = dsq_ckpt.async_save(mine, tmp_path / "async" / str(step), config=config(stage), pinned=True)
        ruin(mine)
        assert future.result().depth == step
    assert quantizing == ["training" if stage == "quantize" else "background"] * 2
    for step, state in enumerate(states):
        loads = [load_copy(tmp_path / way / str(step), state) for way in ("sync", "async")]
        assert find_differences(*loads) == []


def test_a_search_quantizes_while_training_waits(tmp_path, quantizing):
    model = Net()
    compressor = dsq_ckpt.Compressor(model, config=config("copy"), evaluate=lambda: compute_loss(model))
    compressor.save(tmp_path / "a", background=True).result()
    assert quantizing == ["training"]
    dsq_ckpt.Compressor(model).save(tmp_path / "b", background=True).result()
    assert quantizing == ["training", "background"]


@pytest.mark.parametrize("stage", ["copy", "quantize"])
def test_the_call_names_values_that_cannot_be_copied(tmp_path, stage):
    class Uncopyable:
        def __deepcopy__(self, memo):
            raise RuntimeError("no copy of this")

    state = {"w": torch.randn(80, 80), "things": {"bad": Uncopyable()}}
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"'things\.bad' is no tensor, .*no copy of this"):
        dsq_ckpt.async_save(state, tmp_path / "a", config=config(stage))
    assert not (tmp_path / "a").exists()
    dsq_ckpt.async_save({"w": state["w"]}, tmp_path / "a", config=config(stage)).result()


@pytest.mark.parametrize("stage", ["copy", "quantize"])
def test_a_checkpoint_that_is_there_is_noticed_by_the_call(tmp_path, stage):
    state = {"w": torch.randn(80, 80)}
    dsq_ckpt.save(state, tmp_path / "a")
    with pytest.raises(dsq_ckpt.CheckpointExists, match="overwrite=True"):
        dsq_ckpt.async_save(state, tmp_path / "a", config=config(stage))


def test_attributes_of_parameters_are_not_copied(tmp_path):
    """As frameworks put them there: groups, modules, and what cannot be copied at all."""
    weight = nn.Parameter(torch.randn(80, 80))
    weight.lock = threading.Lock()
    dsq_ckpt.async_save({"w": weight}, tmp_path / "a", config=config("copy")).result()
    assert Manifest.read(tmp_path / "a").kinds["weights"].logical == weight.nbytes


# Memory that names share


def test_the_copy_shares_memory_as_the_state_does():
    array = np.arange(100, dtype=np.float32)
    whole = torch.randn(40, 40)
    state = {
        "whole": whole, "turned": whole.t(), "row": whole[3], "apart": whole.clone(), "nothing": torch.empty(0),
        "array": torch.from_numpy(array), "part": torch.from_numpy(array[10:20]),  # two storages in one memory
    }
    for copier in (copy_state_dict, copy_bare_state_dict):
        copied = copier(state)
        assert find_differences(copied, state) == []
        assert all(copied[name].stride() == value.stride() for name, value in state.items())
        copied["whole"].fill_(7)
        copied["array"].fill_(8)
        assert bool((copied["turned"] == 7).all() and (copied["row"] == 7).all() and (copied["part"] == 8).all())
        assert torch.equal(copied["apart"], whole) and float(array[10]) == 10


@pytest.mark.parametrize("planner", [None, Balancing])
def test_views_that_negate_or_conjugate_keep_their_values(tmp_path, planner):
    """The memory of such a view has other values than the view."""
    values = torch.randn(50, dtype=torch.complex64)
    state = {"conjugate": values.conj(), "negative": values.conj().imag, "values": values}
    original = {name: value.clone().resolve_conj().resolve_neg() for name, value in state.items()}
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "a", config("copy"))
    future = dcp.async_save(state, storage_writer=writer, planner=planner and planner(), no_dist=True)
    values.zero_()
    future.result()
    assert find_differences(load_copy(tmp_path / "a", original), original) == []


def test_a_rule_for_one_name_holds_for_the_memory_of_two(tmp_path):
    """In two storages, as of tensors that were made of one array."""
    array = np.random.default_rng(0).normal(size=(128, 96)).astype(np.float32)
    state = {"first.weight": torch.from_numpy(array), "second.weight": torch.from_numpy(array[32:])}
    rules = {"quantize": {"rules": [{"pattern": "second*", "exact": True}]}}
    dsq_ckpt.async_save(state, tmp_path / "a", config={**rules, **config("copy")}).result()
    assert find_differences(load_copy(tmp_path / "a", state), state) == []


# Memory of the copies


def addresses(state):
    return {name: value.data_ptr() for name, value in flat_tensors(state).items()}


def test_a_copy_takes_the_memory_of_one_that_is_gone_and_of_no_other():
    state = {"a": torch.randn(1000, 100), "b": [torch.randn(300)], "c": torch.randn(3_000_000)}
    first = copy_bare_state_dict(state)
    place, before = addresses(first), copy.deepcopy(first)
    part = first["c"][5:9]  # a view is enough to keep it
    ruin(state)
    second = copy_bare_state_dict(state)
    assert not set(addresses(second).values()) & set(place.values())
    assert find_differences(first, before) == []
    first.clear()
    third = copy_bare_state_dict(state)
    new_place = addresses(third)
    assert (new_place["a"], new_place["b.0"]) == (place["a"], place["b.0"]) and new_place["c"] != place["c"]
    assert torch.equal(part, before["c"][5:9])
    del second, third, part
    gc.collect()
    copy_bare_state_dict({"a": state["a"]})
    spare = sum(size for size, _ in copies._spare_buffers)
    assert spare == state["a"].nbytes, "memory that a copy has no use for is freed"


def test_the_next_save_takes_the_memory_of_the_last_one(tmp_path, monkeypatch):
    """As soon as its future is done, whether it failed or not; a writer that other threads wait for keeps none."""
    pointers = []
    original = pipeline.quantize_state

    def noted(options, context, local, *rest):
        pointers.append({item.key.fqn: item.load().data_ptr() for item in local.items})
        if len(pointers) == 2:
            raise OSError("full")
        return original(options, context, local, *rest)

    monkeypatch.setattr(pipeline, "quantize_state", noted)
    state = {"w": torch.randn(2000, 200), "b": torch.randn(5000)}
    for number in range(4):
        future = dsq_ckpt.async_save(state, tmp_path / str(number))
        assert (future.exception() is not None) == (number == 1)
    assert pointers[0] == pointers[1]
    assert pointers[2] == pointers[3]


def test_two_saves_at_once_have_memory_of_their_own(tmp_path, monkeypatch):
    """DCP's own function does not wait for the save before."""
    original, writing, staged = pipeline.write_rank, threading.Event(), threading.Event()

    def held(*arguments):
        writing.set()
        assert staged.wait(60)
        return original(*arguments)

    monkeypatch.setattr(pipeline, "write_rank", held)
    states = [{"w": torch.full((80, 80), 1.0 + number) + torch.eye(80)} for number in range(2)]
    originals = copy.deepcopy(states)
    futures = []
    for number, state in enumerate(states):
        writer = dsq_ckpt.DSQStorageWriter(tmp_path / str(number), parent=None)
        planner = DefaultSavePlanner()
        futures.append(dcp.async_save(state, storage_writer=writer, planner=planner, no_dist=True))
        ruin(state)
        assert writing.wait(60)
    staged.set()
    for number, future in enumerate(futures):
        future.result()
        back = load_copy(tmp_path / str(number), originals[number])["w"]
        assert (back - originals[number]["w"]).norm() < 0.05 * back.norm()


# The choice


def cost(size=4 * GIB, spare=0, available=100 * GIB, host="a"):
    return CopyCost(host, size, spare, available)


@pytest.mark.parametrize("how, costs, processes, expected", [
    ("auto", [cost(), cost()], False, True),
    ("auto", [cost(), cost(size=None)], False, False),
    ("auto", [cost(), None], False, False),
    ("auto", [cost()], True, False),
    ("copy", [cost(size=None), cost(available=0)], True, True),
    ("copy", [cost(), None], False, False),
    ("quantize", [cost()], False, False),
    ("auto", [cost(available=7 * GIB)], False, True),
    ("auto", [cost(available=5 * GIB)], False, False),
    ("auto", [cost(available=3 * GIB, spare=4 * GIB)], False, True),
    ("auto", [cost(available=7 * GIB), cost(available=7 * GIB)], False, False),
    ("auto", [cost(available=7 * GIB), cost(available=7 * GIB, host="b")], False, True),
    ("auto", [cost(available=None)], False, True),
])
def test_the_choice(how, costs, processes, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {should_copy(how, costs, processes, rank) for rank in range(3)} == {expected}


def test_it_quantizes_where_memory_is_short_and_says_so(tmp_path, monkeypatch, quantizing):
    """Once, though the memory that is left differs from save to save."""
    left = iter((1000, 1001, 1002, 1003))
    monkeypatch.setattr(copies, "available_memory", lambda: next(left))
    monkeypatch.setattr(copies, "_warned_hosts", set())
    with pytest.warns(UserWarning, match=r"has 9\.31e-07 GiB of memory left, .*storage\.stage: quantize") as caught:
        dsq_ckpt.async_save({"w": torch.randn(80, 80)}, tmp_path / "a").result()
        dsq_ckpt.async_save({"w": torch.randn(80, 80)}, tmp_path / "b").result()
    assert quantizing == ["training"] * 2
    assert [warning.filename for warning in caught if "memory left" in str(warning.message)] == [__file__]


def test_memory_of_a_copy_of_another_state_is_not_counted_on(tmp_path):
    """Such memory is freed before the next copy takes memory of its own."""
    first, second = ({f"w{number}": torch.randn(size) for number in range(4)} for size in (50_000, 60_000))
    copy_bare_state_dict(first).clear()
    gc.collect()
    assert CopyCost.measure(first).spare == CopyCost.measure(first).size == 800_000
    assert CopyCost.measure(second).spare == 0
    copy = copy_bare_state_dict(second)
    assert not copies._spare_buffers and len(copy) == 4


def test_small_parts_of_large_memory_are_not_worth_a_copy():
    large = torch.randn(1000, 100)
    assert CopyCost.measure({"w": large, "v": large[1:]}).size == large.nbytes
    assert CopyCost.measure({"row": large[0]}).size is None
    assert CopyCost.measure({"w": torch.empty(3, device="meta")}).size is None
    assert CopyCost.measure({"step": 3}).size == 0


@pytest.mark.parametrize("files, expected", [
    ({}, None),
    ({"proc/meminfo": "MemFree: 1 kB\n"}, None),
    ({"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:  500 kB\n"}, 500 << 10),
    ({
        "proc/self/cgroup": "0::/own/job\n", "sys/fs/cgroup/own/job/memory.max": "max\n",
        "sys/fs/cgroup/own/job/memory.current": "10\n", "sys/fs/cgroup/own/memory.max": "70000",
        "sys/fs/cgroup/own/memory.current": "60000", "sys/fs/cgroup/own/memory.stat": "anon 7\ninactive_file 500\n",
    }, 10_500),
    ({  # in a container, of which the host's path is not there
        "proc/self/cgroup": "3:cpu:/x\n2:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "50000", "sys/fs/cgroup/memory/memory.usage_in_bytes": "49000",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 24\n",
    }, 1024),
    ({
        "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "2000",
    }, 0),
])
def test_available_memory(tmp_path, files, expected):
    for name, text in ({"proc/meminfo": "MemAvailable: 500 kB\n"} | files if files else {}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) == expected
