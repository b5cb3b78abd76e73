"""Buffers of other shapes than were saved: a module that sizes them by what it is given takes them, others say why."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

import dsq_ckpt
from dsq_ckpt import DSQConfig, LoadFailed
from tests.helpers.states import differences

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
]
EXACT = DSQConfig.preset("exact")
WAYS = ("module", "values", "compressor")


def save(way: str, model: nn.Module, path) -> None:
    if way == "compressor":
        dsq_ckpt.Compressor(model, config=EXACT).save(path)
    else:
        dsq_ckpt.save(model if way == "module" else {"model": model, "step": 3}, path, config=EXACT)


def load(way: str, model: nn.Module, path) -> None:
    if way == "compressor":
        dsq_ckpt.Compressor(model, config=EXACT).load(path)
    else:
        dsq_ckpt.load(model if way == "module" else {"model": model, "step": 0}, path)


def observed(steps: int) -> nn.Module:
    """Make a model with observers, which are new or have seen batches."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
    model.qconfig = get_default_qat_qconfig("fbgemm")
    model = prepare_qat(model.train())
    for step in range(steps):
        model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step)))
    return model


class Growing(nn.Module):
    """A module with a queue, which a hook makes as long as the one that is loaded."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("queue", torch.randn(length, 4))
        self.register_load_state_dict_pre_hook(self._grow)

    @staticmethod
    def _grow(module, state_dict, prefix, *_) -> None:
        module.queue = module.queue.new_empty(state_dict[f"{prefix}queue"].shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [(3, 0), (0, 3)])
def test_observers_are_given_what_they_saw(tmp_path, way, steps):
    saved, target = map(observed, steps)
    save(way, saved, tmp_path / "a")
    assert any(value.shape != target.state_dict()[name].shape for name, value in saved.state_dict().items())
    load(way, target, tmp_path / "a")
    found = target.state_dict()
    assert all(torch.equal(found[name], value) for name, value in saved.state_dict().items())
    batch = torch.randn(4, 3, 8, 8)
    assert torch.equal(target.eval()(batch), saved.eval()(batch))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapped", [lambda model: model, lambda model: nn.Sequential(nn.Linear(3, 3), model)])
def test_a_module_with_a_hook_sizes_its_buffers(tmp_path, way, wrapped):
    saved, target = wrapped(Growing(12)), wrapped(Growing(2))
    save(way, saved, tmp_path / "a")
    load(way, target, tmp_path / "a")
    assert differences(dict(target.state_dict()), dict(saved.state_dict())) == []


def test_a_wrapped_module_sizes_its_buffers(tmp_path):
    saved, target = (torch.optim.swa_utils.AveragedModel(Growing(length)) for length in (12, 2))
    save("values", saved, tmp_path / "a")
    load("values", target, tmp_path / "a")
    assert differences(dict(target.state_dict()), dict(saved.state_dict())) == []


class Fixed(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.randn(length, 4))


@pytest.mark.parametrize("way", WAYS)
def test_an_ordinary_module_refuses_other_shapes_and_stays_as_it_is(tmp_path, way):
    save(way, Fixed(12), tmp_path / "a")
    target = Fixed(2)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    says = r"'(model\.)?table' was saved with the shape \(12, 4\), and has \(2, 4\) in .*: is it the same model\?"
    with pytest.raises(LoadFailed, match=says) as failed:
        load(way, target, tmp_path / "a")
    assert f"'{tmp_path / 'a'}'" in str(failed.value) and "load into an empty dict" in str(failed.value)
    assert differences(dict(target.state_dict()), before) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_module_with_code_of_its_own_that_refuses_other_shapes(tmp_path, way):
    """Statistics of a norm go through its own code, which takes no other shapes."""
    saved, target = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(size, affine=False)) for size in (8, 6))
    save(way, saved, tmp_path / "a")
    says = r"size mismatch for 1\.running_mean: .*\[8\].*\[6\].*is it the same model\?.*load into an empty dict"
    with pytest.raises(LoadFailed, match=says) as failed:
        load(way, target, tmp_path / "a")
    assert f"'{tmp_path / 'a'}'" in str(failed.value) and "\n" not in str(failed.value)


def test_what_the_error_says_works(tmp_path):
    saved, target = Growing(12), Growing(2)
    save("values", saved, tmp_path / "a")
    with pytest.raises(LoadFailed, match=r"'model.queue' was saved with the shape \(12, 4\), and has \(2, 4\)"):
        dsq_ckpt.load({"model": target.state_dict()}, tmp_path / "a")
    state: dict = {"model": {}}
    dsq_ckpt.load(state, tmp_path / "a")
    target.load_state_dict(state["model"])
    assert differences(dict(target.state_dict()), dict(saved.state_dict())) == []
