"""Tensors in the memory of others: same values both ways, and storages that training can resize."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.core.aliases import alias_of
from dsq_ckpt.core.checksums import checksum


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
])
@pytest.mark.parametrize("view", [
    lambda t: t, lambda t: t.t(), lambda t: t[3:, ::2], lambda t: t[0, 0], lambda t: t.expand(2, 8, 6), nn.Parameter,
    lambda t: t.view(4, 12).unfold(1, 3, 2),
])
def test_aliases_share_memory(dtype: torch.dtype, view: Any) -> None:
    owner = (torch.randn(8, 6) * 9).to(dtype)
    tensor = view(owner) if view is not nn.Parameter else nn.Parameter(owner, requires_grad=False)
    alias = alias_of(tensor)
    assert (alias.dtype, alias.shape, alias.stride()) == (dtype, tensor.shape, tensor.stride())
    assert alias.data_ptr() == tensor.data_ptr() and type(alias) is torch.Tensor and not alias.requires_grad
    owner.fill_(1)
    assert (alias.to(torch.complex64) == 1).all()
    if 0 not in alias.stride():
        alias.zero_()
        assert not tensor.to(torch.complex64).any()


def test_numpy_does_not_keep_its_storage_from_being_resized() -> None:
    tensor = torch.randn(100)
    alias_of(tensor).numpy()
    tensor.untyped_storage().resize_(0)
    other = torch.randn(100)
    other.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        other.untyped_storage().resize_(0)


def test_the_memory_lives_as_long_as_the_alias() -> None:
    alias = alias_of(torch.arange(1e6))
    gc.collect()
    others = [torch.zeros(1_000_000) for _ in range(4)]
    assert alias.equal(torch.arange(1e6)) and others


@pytest.mark.parametrize("replace", [
    lambda tensor: setattr(tensor, "data", torch.zeros(1)),
    lambda tensor: tensor.set_(torch.zeros(1).untyped_storage()),
], ids=["data", "set_"])
def test_the_memory_lives_on_if_the_tensor_gets_other_memory(replace: Any) -> None:
    """As code does that evaluates with averaged weights."""
    array = np.arange(1000.0)
    is_alive, tensor = weakref.ref(array), torch.from_numpy(array)
    del array
    alias = alias_of(tensor)
    replace(tensor)
    gc.collect()
    assert is_alive() is not None and alias.equal(torch.arange(1000.0, dtype=torch.float64))
    del alias
    assert is_alive() is None


@pytest.mark.parametrize("size", [0, 4, 4096])
@pytest.mark.parametrize("name", ["large", "few", "strided"])
def test_memory_that_was_freed_is_told(tmp_path: Path, name: str, size: int) -> None:
    """No kernel of torch looks at the size of a storage: it would read and write what lies behind."""
    make = {
        "large": lambda: torch.ones(500, 1000), "few": lambda: torch.ones(7000)[4001:],
        "strided": lambda: torch.ones(90, 80).t(),
    }[name]
    dsq_ckpt.save({"inside": {name: make()}}, tmp_path / "0")
    state = {"inside": {name: make()}}
    state["inside"][name].untyped_storage().resize_(size)
    says = rf"^'inside\.{name}' needs a storage of \d+ bytes, and its own has {size}, "
    with pytest.raises(dsq_ckpt.SaveFailed, match=says):
        dsq_ckpt.save(state, tmp_path / "1")
    with pytest.raises(dsq_ckpt.SaveFailed, match=says):
        dsq_ckpt.async_save(state, tmp_path / "1").result()
    with pytest.raises(dsq_ckpt.LoadFailed, match=says[1:]):
        dsq_ckpt.load(state, tmp_path / "0")
    if size:
        with pytest.raises(ValueError, match="needs a storage of"):
            alias_of(state["inside"][name])


@pytest.mark.parametrize("tensor", [
    torch.empty(0, 5), torch.empty(3, device="meta"), torch.eye(4).to_sparse(), torch.tensor([1j]).conj(),
    torch._neg_view(torch.ones(3)), torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
], ids=lambda tensor: str(tensor.layout))
def test_others_are_returned_as_they_are(tensor: torch.Tensor) -> None:
    assert alias_of(tensor) is tensor


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert own["2.num_batches_tracked"].dtype == torch.int64
    state = optimizer.state_dict()["state"]
    return own | {f"{number}.{name}": value for number, entries in state.items() for name, value in entries.items()}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(80, 90), nn.Linear(90, 80), nn.BatchNorm1d(80))
    model[0].bias.requires_grad_(False)
    model.register_buffer("table", torch.randn(80, 80))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 80)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("config", [
    {}, {"preset": "exact"}, {"system": "inshrinkerator"}, {"storage": {"stage": "copy"}},
    {"storage": {"stage": "quantize"}},
    {"delta": {"against": "values"}, "quantize": {"exp_avg_sq": {"method": "bf16"}}},
], ids=str)
def test_no_save_and_no_load_keeps_a_storage_from_being_resized(tmp_path: Path, config: Any) -> None:
    """As FSDP does with parameters that it gathered."""
    given = "exact" if "preset" in config else config
    model, optimizer = trained()
    for number in range(2):
        dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "sync" / str(number), config=given)
        dsq_ckpt.async_save(
            {"model": model, "optimizer": optimizer}, tmp_path / "async" / str(number), config=given
        ).result()
    target = trained()
    dsq_ckpt.load(dict(zip(("model", "optimizer"), target, strict=True)), tmp_path / "sync" / "1")
    for owner in ((model, optimizer), target):
        assert [name for name, tensor in tensors(*owner).items() if not tensor.untyped_storage().resizable()] == []


def halves() -> dict[str, torch.Tensor]:
    values = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    return {"w": values, "half": values.bfloat16() * 2, "double": values.double() * 3, "few": values[0, :7].half()}


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode(tmp_path: Path, inside: bool) -> None:
    """Threads that decode are not in it; tensors that were made in it are loaded outside too."""
    with torch.inference_mode():
        for name in "01":
            dsq_ckpt.save(halves(), tmp_path / name)
        target = {name: torch.zeros_like(value) for name, value in halves().items()}
    if not inside:
        dsq_ckpt.load(target, tmp_path / "1")
    else:
        target = {name: torch.zeros_like(value) for name, value in halves().items()}
        with torch.inference_mode():
            dsq_ckpt.load(target, tmp_path / "1")
    for name, value in halves().items():
        torch.testing.assert_close(target[name].float(), value.float(), rtol=0, atol=0.3)


@pytest.mark.parametrize("name", ["w", "half", "double"])
def test_a_backward_pass_that_needs_what_a_load_replaced_is_refused(tmp_path: Path, name: str) -> None:
    dsq_ckpt.save(halves(), tmp_path / "0")
    target = {name: torch.ones_like(value).requires_grad_() for name, value in halves().items()}
    result = (torch.ones(4, 300, dtype=target[name].dtype, requires_grad=True) @ target[name]).sum()
    dsq_ckpt.load(target, tmp_path / "0")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


ONE_ELEMENT = {
    "of a row": lambda dtype: torch.ones(1, 5, dtype=dtype)[:, 2],
    "of a column": lambda dtype: torch.ones(5, 2, dtype=dtype)[1:2, 1],
    "expanded": lambda dtype: torch.ones((), dtype=dtype).as_strided((1, 1), (0, 0)),
    "empty": lambda dtype: torch.ones(1, dtype=dtype).as_strided((0,), (0,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", ONE_ELEMENT)
def test_a_tensor_of_one_element_may_have_any_stride(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Such a tensor counts as contiguous, but torch refuses to view it as bytes unless the stride is 1."""
    tensor = ONE_ELEMENT[name](dtype)
    assert tensor.stride(-1) != 1 and tensor.is_contiguous()
    checksum(tensor)
    state = {"weight": tensor, "other": torch.randn(30, 20)}
    dsq_ckpt.save(state, tmp_path / "run" / "0")
    weight = torch.zeros(1, dtype=dtype).as_strided(tensor.shape, tensor.stride())
    target = {"weight": weight, "other": state["other"] * 0}
    dsq_ckpt.load(target, tmp_path / "run" / "0")
    assert torch.equal(weight, tensor)
