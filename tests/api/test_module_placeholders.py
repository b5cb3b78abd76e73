"""What modules take from what they are given: buffers of other shapes, extra states, and what they do not tell yet."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsq_ckpt
from dsq_ckpt import DSQConfig, LoadFailed
from tests.helpers.stateful_modules import EXTRA, Metric, Remembering, Scale, hooked, observed, scaled, train
from tests.helpers.states import find_differences

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


def warned(way: str, model: nn.Module, path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(way, model, path)
    return " ".join(str(warning.message) for warning in caught)


def load(way: str, model: nn.Module, path) -> None:
    if way == "compressor":
        dsq_ckpt.Compressor(model, config=EXACT).load(path)
    else:
        dsq_ckpt.load(model if way == "module" else {"model": model, "step": 0}, path)


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
    source, target = map(observed, steps)
    save(way, source, tmp_path / "a")
    assert any(value.shape != target.state_dict()[name].shape for name, value in source.state_dict().items())
    load(way, target, tmp_path / "a")
    loaded = target.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in source.state_dict().items())
    batch = torch.randn(4, 3, 8, 8)
    assert torch.equal(target.eval()(batch), source.eval()(batch))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapped", [lambda model: model, lambda model: nn.Sequential(nn.Linear(3, 3), model)])
def test_a_module_with_a_hook_sizes_its_buffers(tmp_path, way, wrapped):
    source, target = wrapped(Growing(12)), wrapped(Growing(2))
    save(way, source, tmp_path / "a")
    load(way, target, tmp_path / "a")
    assert find_differences(dict(target.state_dict()), dict(source.state_dict())) == []


def test_a_wrapped_module_sizes_its_buffers(tmp_path):
    source, target = (torch.optim.swa_utils.AveragedModel(Growing(length)) for length in (12, 2))
    save("values", source, tmp_path / "a")
    load("values", target, tmp_path / "a")
    assert find_differences(dict(target.state_dict()), dict(source.state_dict())) == []


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
    assert find_differences(dict(target.state_dict()), before) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_module_with_code_of_its_own_that_refuses_other_shapes(tmp_path, way):
    """Statistics of a norm go through its own code, which takes no other shapes."""
    source, target = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(size, affine=False)) for size in (8, 6))
    save(way, source, tmp_path / "a")
    says = r"size mismatch for 1\.running_mean: .*\[8\].*\[6\].*is it the same model\?.*load into an empty dict"
    with pytest.raises(LoadFailed, match=says) as failed:
        load(way, target, tmp_path / "a")
    assert f"'{tmp_path / 'a'}'" in str(failed.value) and "\n" not in str(failed.value)


def test_the_advice_of_the_error_works(tmp_path):
    source, target = Growing(12), Growing(2)
    save("values", source, tmp_path / "a")
    with pytest.raises(LoadFailed, match=r"'model.queue' was saved with the shape \(12, 4\), and has \(2, 4\)"):
        dsq_ckpt.load({"model": target.state_dict()}, tmp_path / "a")
    state: dict = {"model": {}}
    dsq_ckpt.load(state, tmp_path / "a")
    target.load_state_dict(state["model"])
    assert find_differences(dict(target.state_dict()), dict(source.state_dict())) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXTRA)
@pytest.mark.parametrize("wrapped", [lambda model: model, lambda model: nn.Sequential(nn.Linear(3, 3), model)])
def test_a_module_is_given_its_extra_state_as_it_was_saved(tmp_path, way, name, wrapped):
    """The result is that of `Module.load_state_dict`, whatever the module has before."""
    given, before = EXTRA[name]
    source, target = Remembering(given), Remembering(copy.deepcopy(before))
    save(way, wrapped(source), tmp_path / "a")
    messages = warned(way, wrapped(target), tmp_path / "a")
    assert "not loaded" not in messages
    assert find_differences({"state": target.state}, {"state": given}) == [] and type(target.state) is type(given)
    assert torch.equal(target.weight, source.weight)


@pytest.mark.parametrize("way", WAYS)
def test_an_object_in_an_extra_state_is_unpickled_only_where_the_module_names_it(tmp_path, way):
    save(way, Remembering({"settings": {"eps": Settings()}}), tmp_path / "a")
    named, unnamed = Remembering({"settings": {"eps": None}}), Remembering(None)
    load(way, named, tmp_path / "a")
    assert isinstance(named.state["settings"]["eps"], Settings)
    with pytest.raises(LoadFailed, match=r"_extra_state\.settings\.eps' is more than plain data"):
        load(way, unnamed, tmp_path / "a")
    assert unnamed.state is None


class Settings:
    pass


@pytest.mark.parametrize("way", [*WAYS, "with optimizer", "values with optimizer"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_module_is_given_what_it_does_not_tell_yet_and_keeps_its_parameters(tmp_path, way, steps):
    """An optimizer knows these; training goes on as if it had not stopped."""
    (source, first), (target, second) = scaled(3), scaled(steps)
    before = list(target.parameters())
    if way == "with optimizer":
        dsq_ckpt.Compressor(source, first, config=EXACT).save(tmp_path / "a")
        dsq_ckpt.Compressor(target, second, config=EXACT).load(tmp_path / "a")
    elif way == "values with optimizer":
        dsq_ckpt.save({"model": source, "optimizer": first}, tmp_path / "a", config=EXACT)
        dsq_ckpt.load({"model": target, "optimizer": second}, tmp_path / "a")
    else:
        save(way, source, tmp_path / "a")
        load(way, target, tmp_path / "a")
    assert target[1].known and find_differences(dict(target.state_dict()), dict(source.state_dict())) == []
    assert all(own is other for own, other in zip(before, target.parameters(), strict=True))
    if "optimizer" in way:
        for pair in ((source, first), (target, second)):
            train(*pair, range(3, 6))
        assert find_differences(dict(target.state_dict()), dict(source.state_dict())) == []


def part_compiled(model: nn.Sequential) -> nn.Module:
    model[1] = torch.compile(model[1], backend="eager")
    return model


WRAPPED = {
    "compiled": lambda model: torch.compile(model, backend="eager"), "compiled in part": part_compiled,
    "DDP": nn.parallel.DistributedDataParallel,
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_compressor_gives_a_wrapped_module_what_it_does_not_tell_yet(tmp_path, wrapped):
    """Whatever the names are that its entries have in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrap, (source, first), (target, second) = WRAPPED[wrapped], scaled(3), scaled(0)
        dsq_ckpt.Compressor(wrap(source), first, config=EXACT).save(tmp_path / "a")
        target[1].value.requires_grad_(False)
        dsq_ckpt.Compressor(wrap(target), second, config=EXACT).load(tmp_path / "a")
    finally:
        dist.destroy_process_group()
    assert find_differences(dict(target.state_dict()), dict(source.state_dict())) == []


def test_parameters_that_code_of_a_module_freezes_stay_frozen(tmp_path):
    class Freezing(Scale):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            super()._load_from_state_dict(state_dict, prefix, *rest)
            self.value.requires_grad_(False)

    (source, first), (target, second) = scaled(3), scaled(0)
    target[1].__class__ = Freezing
    before = target[1].value
    dsq_ckpt.save({"model": source, "optimizer": first}, tmp_path / "a", config=EXACT)
    dsq_ckpt.load({"model": target, "optimizer": second}, tmp_path / "a")
    assert target[1].value is before and before.equal(source[1].value) and not before.requires_grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [(3, 0), (3, 2), (2, 3), (0, 3), (0, 0)])
def test_a_metric_is_given_all_that_it_has_seen(tmp_path, way, lengths):
    source, target = (nn.ModuleDict({"linear": nn.Linear(4, 4), "metric": Metric(length)}) for length in lengths)
    save(way, source, tmp_path / "a")
    messages = warned(way, target, tmp_path / "a")
    assert "not loaded" not in messages
    assert find_differences({"seen": target["metric"].seen}, {"seen": source["metric"].seen}) == []


@pytest.mark.parametrize("way", ["module", "values"])
@pytest.mark.parametrize("make", [hooked, lambda layers: nn.Sequential(nn.BatchNorm1d(4, affine=layers > 2))])
def test_state_that_a_module_with_code_of_its_own_does_not_take_is_reported(tmp_path, way, make):
    source, target = make(3), make(2)
    save(way, source, tmp_path / "a")
    lacking = source.state_dict().keys() - target.state_dict().keys()
    messages = warned(way, target, tmp_path / "a")
    assert all(name in messages for name in lacking) and "was not loaded, since the module does not have it" in messages
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in target.state_dict().items())


def test_a_compressor_refuses_what_its_model_does_not_take(tmp_path):
    dsq_ckpt.Compressor(hooked(3), config=EXACT).save(tmp_path / "a")
    with pytest.raises(LoadFailed, match=r"has '2.bias', '2.weight' in its model, which this model does not have"):
        dsq_ckpt.Compressor(hooked(2), config=EXACT).load(tmp_path / "a")
    target = hooked(2)
    with pytest.warns(UserWarning, match="'2.bias', '2.weight' of .* was not loaded, since the module does not have"):
        dsq_ckpt.Compressor(target, config=EXACT, frozen=False).load(tmp_path / "a")
    assert not target._load_state_dict_post_hooks


def test_a_compressor_without_frozen_parameters_loads_none(tmp_path):
    """A frozen one is left as it is, though the checkpoint has it, and code of the module would take it."""
    source, target = hooked(2), hooked(2)
    dsq_ckpt.Compressor(source, config=EXACT).save(tmp_path / "a")
    target[0].requires_grad_(False)
    before = target[0].weight.clone()
    dsq_ckpt.Compressor(target, config=EXACT, frozen=False).load(tmp_path / "a")
    assert torch.equal(target[0].weight, before) and torch.equal(target[1].weight, source[1].weight)
