"""A `Compressor` restores parameter groups by the names of their parameters, or says which do not fit."""

import pytest
import torch
from torch import nn

import dsq_ckpt


def made(*groups):
    """Return a model of three layers, and an optimizer with these groups of them, of which each has a rate."""
    torch.manual_seed(len(groups))
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "abc"})
    optimizer = torch.optim.AdamW([
        {"params": [model[name].weight for name in names], "lr": 10.0 ** -number}
        for number, names in enumerate(groups, 1)
    ])
    sum(layer(torch.ones(1, 8)).sum() for layer in model.values()).backward()
    return model, optimizer


def saved(path, *groups):
    model, optimizer = made(*groups)
    optimizer.step()
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(path)
    return model, optimizer


def test_groups_in_another_order(tmp_path):
    model, optimizer = saved(tmp_path / "a", "ab", "c")
    model_too, restored = made("c", "ab")
    dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
    assert [group["lr"] for group in restored.param_groups] == [1e-2, 1e-1]
    for name in "abc":
        moment = restored.state[model_too[name].weight]["exp_avg"]
        assert moment.equal(optimizer.state[model[name].weight]["exp_avg"])


@pytest.mark.parametrize(("groups", "message"), [
    (("abc",), "it has 1, and 2 were saved"),
    (("a", "b", "c"), "it has 3, and 2 were saved"),
    (("ac", "b"), "its group 0, with 'a.weight', 'c.weight', has parameters of the saved groups 0 and 1"),
    (("a", "b"), "its group 1, with 'b.weight', has parameters of the saved group 0, and so has its group 0"),
])
def test_parameters_that_are_grouped_otherwise_are_refused(tmp_path, groups, message):
    """The first group was left without a learning rate, or had the one of others, without a word."""
    saved(tmp_path / "a", "ab", "c")
    model, optimizer = made(*groups)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(dsq_ckpt.LoadFailed, match=message):
        dsq_ckpt.Compressor(model, optimizer).load(tmp_path / "a")
    assert not optimizer.state and all(before[name].equal(value) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match="'optimizer' of"):
        dsq_ckpt.Compressor(model).load(tmp_path / "a")


def test_an_optimizer_of_none_of_the_saved_parameters_is_refused(tmp_path):
    saved(tmp_path / "a", "a")
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"its group 0, with 'b\.weight', has parameters of no saved group"):
        dsq_ckpt.Compressor(*made("b")).load(tmp_path / "a")


def test_state_that_is_not_restored_is_named(tmp_path):
    saved(tmp_path / "some", "ab", "c")
    with pytest.warns(UserWarning, match="the optimizer state of 'b.weight' in '.*some' was not loaded"):
        dsq_ckpt.Compressor(*made("a", "c")).load(tmp_path / "some")
    saved(tmp_path / "few", "a", "c")
    with pytest.warns(UserWarning, match="no optimizer state of 'b.weight' was loaded, since the optimizer of '.*few'"):
        dsq_ckpt.Compressor(*made("ab", "c")).load(tmp_path / "few")


def test_two_parameters_are_not_loaded_into_one(tmp_path):
    saved(tmp_path / "a", "abc")
    model, _ = made("abc")
    model["c"].weight = model["a"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"'a.weight' and 'c.weight' as two parameters, which are tied"):
        dsq_ckpt.Compressor(model, optimizer).load(tmp_path / "a")
