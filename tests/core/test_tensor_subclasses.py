"""Tensors that consist of other tensors, tensors that cannot be stored, and every dtype that torch has."""

from __future__ import annotations

import copy
import json
import threading
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import dsq_ckpt
from dsq_ckpt import DSQStorageWriter, LoadFailed, SaveFailed
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers.states import is_equal, to_bytes
from tests.helpers.tensor_subclasses import EightBits, Scaled, equal, scaled

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Cast(torch.Tensor):
    """As torchao's weights of float8 training: all it holds is the tensor itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    __torch_dispatch__ = Scaled.__torch_dispatch__


class Closed(torch.Tensor):
    """A wrapper that does not say what it consists of."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    __torch_dispatch__ = Scaled.__torch_dispatch__


@pytest.mark.parametrize("background", [False, True])
def test_a_subclass_is_stored_exactly_by_its_parts(tmp_path, background):
    def state(seed):
        return {
            "model": {"0.weight": scaled(seed), "1.weight": scaled(seed + 1), "plain.weight": torch.randn(80, 80)},
            "optimizer": {"state": {0: {"exp_avg": scaled(seed + 2), "exp_avg_sq": scaled(seed + 3)}}},
            "list": [scaled(seed + 4), {"nested": Scaled(torch.ones(3, 2, dtype=torch.int8), scaled(seed + 5))}],
            "step": seed,
        }

    first, target = state(0), state(50)
    inside = target["model"]["0.weight"]
    for name in "ab":  # also as a difference
        outcome = dsq_ckpt.async_save(first, tmp_path / name) if background else dsq_ckpt.save(first, tmp_path / name)
        if background:
            outcome.result()
    assert type(first["model"]["0.weight"]) is Scaled and isinstance(first["list"][1]["nested"], Scaled)
    dsq_ckpt.load(target, tmp_path / "b")
    assert target["model"]["0.weight"] is inside, "in place"
    for name in ("0.weight", "1.weight"):
        assert equal(target["model"][name], first["model"][name])
    assert not is_equal(target["model"]["0.weight"].codes, target["model"]["1.weight"].codes), "not taken for tied"
    for name in ("exp_avg", "exp_avg_sq"):
        assert equal(target["optimizer"]["state"][0][name], first["optimizer"]["state"][0][name])
    assert equal(target["list"][0], first["list"][0])
    assert equal(target["list"][1]["nested"].scale, first["list"][1]["nested"].scale)
    assert target["step"] == 0
    dsq_ckpt.load(target, tmp_path / "b", exact=["*<Scaled>*"])
    with Checkpoint(tmp_path / "b") as checkpoint:
        assert "model.0.weight.<Scaled>.codes" in checkpoint.index["tensors"]


def test_a_wrapper_of_the_tensor_itself_is_that_tensor(tmp_path):
    weight = torch.randn(80, 80)
    dsq_ckpt.save({"weight": Cast(weight)}, tmp_path / "a")
    wrapped, plain = {"weight": Cast(torch.zeros(80, 80))}, {"weight": torch.zeros(80, 80)}
    dsq_ckpt.load(wrapped, tmp_path / "a")
    dsq_ckpt.load(plain, tmp_path / "a")
    assert is_equal(wrapped["weight"].inner, plain["weight"])
    assert 0 < (plain["weight"] - weight).norm() / weight.norm() < 0.02, "compressed as ever"


def test_an_optimizer_with_such_states(tmp_path):
    """As torchao's AdamW8bit, saved and restored by a Compressor."""
    def run(seed):
        torch.manual_seed(seed)
        model = nn.Linear(80, 96, bias=False)
        return model, EightBits(model.parameters())

    model, optimizer = run(0)
    model(torch.randn(4, 80)).square().sum().backward()
    optimizer.step()
    dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a")
    other, target = run(1)
    dsq_ckpt.Compressor(other, target).load(tmp_path / "a")
    assert equal(target.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert (other.weight - model.weight).norm() / model.weight.norm() < 0.02


def test_an_empty_dict_gets_the_parts_with_a_warning(tmp_path):
    """An optimizer takes such dicts in place of its moments, and fails at its next step."""
    torch.manual_seed(0)
    model = nn.Linear(80, 96, bias=False)
    optimizer = EightBits(model.parameters())
    model(torch.randn(4, 80)).square().sum().backward()
    optimizer.step()
    dsq_ckpt.save({"model": model.state_dict(), "critic": optimizer.state_dict(), "plain": {"a": 1}}, tmp_path / "a")
    loaded = {"model": model.state_dict(), "critic": {}}
    with pytest.warns(UserWarning, match=r"class 'Scaled', .*: 'critic\.state\.0\.exp_avg'\. .* the object itself"):
        dsq_ckpt.load(loaded, tmp_path / "a")
    assert is_equal(loaded["critic"]["state"][0]["exp_avg"]["<Scaled>"]["codes"], next(
        iter(optimizer.state.values()))["exp_avg"].codes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsq_ckpt.load({"plain": {}}, tmp_path / "a")
        dsq_ckpt.load({"critic": EightBits(nn.Linear(80, 96, bias=False).parameters())}, tmp_path / "a")


def test_settings_must_be_those_of_the_save(tmp_path):
    dsq_ckpt.save({"w": scaled(0)}, tmp_path / "a")
    target = {"w": scaled(1, signed=False)}
    with pytest.raises(LoadFailed, match=r"'w', of class Scaled, was saved with 0 True, .* into one with False"):
        dsq_ckpt.load(target, tmp_path / "a")
    assert type(target["w"]) is Scaled
    with Checkpoint(tmp_path / "a") as checkpoint:
        data = checkpoint.read_object(checkpoint.find_record("w.<Scaled>.<settings>", None))
    assert json.dumps({"0": "True", "1": "[1, 2]"}).encode() in data, "plain data alone"


@pytest.mark.parametrize("wrong", ["plain", "shape"])
def test_another_tensor_in_its_place(tmp_path, wrong):
    dsq_ckpt.save({"w": scaled(0)}, tmp_path / "a")
    target = {"w": torch.zeros(96, 80) if wrong == "plain" else Scaled(
        torch.zeros(9, 80, dtype=torch.int8), torch.zeros(9, 80))}
    tensor = target["w"]
    with pytest.raises(dsq_ckpt.DSQError, match="w"):
        dsq_ckpt.load(target, tmp_path / "a")
    assert target["w"] is tensor


def test_compress(tmp_path):
    state = {"w": scaled(0), "v": torch.randn(80, 80)}
    dsq_ckpt.compress(state, tmp_path / "a")
    target = {"w": scaled(1), "v": torch.zeros(80, 80)}
    dsq_ckpt.load(target, tmp_path / "a")
    assert equal(target["w"], state["w"])


REFUSED = {
    "sparse": (lambda: torch.eye(100).to_sparse(), "layout torch.sparse_coo: save its parts, or a dense copy"),
    "csr": (lambda: torch.eye(100).to_sparse_csr(), "layout torch.sparse_csr"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested tensor of the layout torch.strided: save a list of its parts",
    ),
    "mkldnn": (lambda: torch.randn(80, 80).to_mkldnn(), "layout torch._mkldnn"),
    "meta": (lambda: torch.empty(80, 80, device="meta"), "on the meta device"),
    "small_meta": (lambda: torch.empty(3, device="meta"), "on the meta device"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "not initialized, as its module has seen no batch"),
    "quint8": (lambda: torch.quantize_per_tensor(torch.randn(80, 80), 0.1, 3, torch.quint8), "dtype torch.quint8"),
    "closed": (lambda: Closed((80, 80)), "class Closed, which has neither memory of its own"),
    "lock": (threading.Lock, "cannot be stored as an object"),
    "function": (lambda: (lambda: 1), "cannot be stored as an object"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("background", [False, True])
def test_values_that_cannot_be_stored_are_named(tmp_path, name, background):
    make, says = REFUSED[name]
    state = {"good": torch.randn(80, 80), "inside": {name: make()}}
    with pytest.raises(SaveFailed, match=rf"^'inside\.{name}' .*{says}"):
        if background:
            dsq_ckpt.async_save(state, tmp_path / "a").result()
        else:
            dsq_ckpt.save(state, tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.parametrize(("name", "in_file"), [
    ("sparse", False), ("nested", False), ("lazy", False), ("quint8", False),
    ("sparse", True), ("nested", True), ("quint8", True),  # a lazy parameter is more than plain data in a file
])
def test_compress_names_values_that_cannot_be_stored(tmp_path, name, in_file):
    make, says = REFUSED[name]
    source = {"good": torch.randn(80, 80), "inside": {name: make()}}
    if in_file:
        torch.save(source, tmp_path / "file.pt")
        source = tmp_path / "file.pt"
    with pytest.raises(SaveFailed, match=rf"^'inside\.{name}' .*{says}"):
        dsq_ckpt.compress(source, tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_compress_takes_a_jagged_tensor_in_a_file(tmp_path):
    jagged = torch.nested.nested_tensor([torch.randn(3, 70), torch.randn(5, 70)], layout=torch.jagged)
    torch.save({"w": jagged}, tmp_path / "file.pt")
    dsq_ckpt.compress(tmp_path / "file.pt", tmp_path / "a")
    target = {"w": torch.zeros_like(jagged)}
    dsq_ckpt.load(target, tmp_path / "a")
    assert target["w"].values().equal(jagged.values())


def test_a_load_into_a_nested_tensor_names_it(tmp_path):
    dsq_ckpt.save({"w": torch.randn(2, 70)}, tmp_path / "a")
    target = {"w": torch.nested.nested_tensor([torch.zeros(70), torch.zeros(70)])}
    with pytest.raises(LoadFailed, match=r"'w' is a nested tensor .* saved as a tensor of shape \(2, 70\): put"):
        dsq_ckpt.load(target, tmp_path / "a")


def test_through_dcp_a_subclass_is_refused_by_name(tmp_path):
    """Its planner takes it for a float32 tensor; two of them must not be taken for tied ones either."""
    state = {"one": scaled(0), "two": scaled(1)}
    with pytest.raises(BaseException, match=r"'one' is of class Scaled, or a part .* by dsq_ckpt\.save"):
        dcp.save(state, storage_writer=DSQStorageWriter(tmp_path / "a"), no_dist=True)
    with pytest.raises(SaveFailed, match=r"^'one' is of class Scaled, or a part .* by dsq_ckpt\.save"):
        dcp.async_save(state, storage_writer=DSQStorageWriter(tmp_path / "a"), no_dist=True).result()


def test_through_dcp_a_jagged_tensor_is_refused_by_name(tmp_path):
    parts = [torch.ones(3, 70), torch.ones(5, 70)]
    state = {"inside": {"one": torch.nested.nested_tensor(parts, layout=torch.jagged)}, "good": torch.randn(80, 80)}
    with pytest.raises(BaseException, match=r"'inside\.one' has the shape \(2, j\d+, 70\), .* by dsq_ckpt\.save"):
        dcp.save(state, storage_writer=DSQStorageWriter(tmp_path / "a"), no_dist=True)
    with pytest.raises(SaveFailed, match=r"^'inside\.one' is of class NestedTensor, .* by dsq_ckpt\.save"):
        dcp.async_save(state, storage_writer=DSQStorageWriter(tmp_path / "a"), no_dist=True).result()
    assert not (tmp_path / "a" / "manifest.json").exists()


REFUSED_DTYPES = {
    # Of quantized tensors, and of bits that torch has no operation for, not even a copy.
    *(torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4, torch.float4_e2m1fn_x2),
    *(torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2),
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)),
}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("background", [False, True])
def test_every_dtype_is_stored_exactly_or_refused_by_name(tmp_path, dtype, background):
    """Weights of the dtypes that are quantized are told to be exact."""
    g = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (40 * dtype.itemsize, 120), generator=g).to(torch.uint8)
    try:
        value = raw.view(-1).view(dtype).view(40, 120)
    except RuntimeError:  # quantized dtypes are made in their own way
        value = torch.empty(40, 120, dtype=torch.uint8)
        if dtype in (torch.quint8, torch.qint8, torch.qint32):
            value = torch.quantize_per_tensor(torch.randn(40, 120), 0.1, 0, dtype)
        elif dtype in (torch.quint4x2, torch.quint2x4):
            value = torch.quantize_per_channel(
                torch.randn(40, 120), torch.ones(40), torch.zeros(40), 0, torch.quint4x2)
            dtype = value.dtype
    state = {"value": value, "one": value[:1, :1], "turned": value.t()} if not value.is_quantized else {"value": value}
    config = {"quantize": {"rules": [{"pattern": "*", "exact": True}]}}
    try:
        if background:
            dsq_ckpt.async_save(state, tmp_path / "a", config=config).result()
        else:
            dsq_ckpt.save(state, tmp_path / "a", config=config)
    except SaveFailed as error:
        assert dtype in REFUSED_DTYPES and str(error).startswith(f"'value' is of dtype {dtype}"), error
        return
    assert dtype not in REFUSED_DTYPES and len(state) == 3
    target = {name: torch.empty_like(tensor) for name, tensor in copy.copy(state).items()}
    dsq_ckpt.load(target, tmp_path / "a")
    for name, tensor in state.items():
        assert target[name].dtype == tensor.dtype and to_bytes(target[name]) == to_bytes(tensor), name
