"""A `Compressor` restores parameter groups by the names of their parameters, or says which do not fit."""

import warnings

import pytest
import torch
from torch import nn

import dsq_ckpt


def make_pair(*groups, kind=torch.optim.AdamW):
    """Return a model of three layers, and an optimizer with these groups of them, of which each has a rate."""
    torch.manual_seed(len(groups))
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "abc"})
    optimizer = kind([
        {"params": [model[name].weight for name in names], "lr": 10.0 ** -number}
        for number, names in enumerate(groups, 1)
    ])
    sum(layer(torch.ones(1, 8)).sum() for layer in model.values()).backward()
    return model, optimizer


def save_groups(path, *groups):
    model, optimizer = make_pair(*groups)
    optimizer.step()
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(path)
    return model, optimizer


@pytest.mark.parametrize(("before", "now"), [
    (("ab", "c"), ("ab",)), (("ab", "c"), ("c",)), (("a", "b", "c"), ("c", "a")), (("abc", ""), ("abc",)),
    (("abc", ""), ("", "abc")), (("", "abc"), ("", "abc")), (("ab", "", "c"), ("c", "ba", "")),
], ids="-".join)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("steps", [0, 1])
def test_groups_are_found_wherever_they_are(tmp_path, before, now, kind, steps):
    """Also where nothing has state, as SGD has none without momentum, and where a group has no parameters."""
    model, optimizer = make_pair(*before, kind=kind)
    for _ in range(steps):
        optimizer.step()
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(tmp_path / "a")
    with warnings.catch_warnings():
        if len(now) == len(before):
            warnings.simplefilter("error", UserWarning)
        model_too, restored = make_pair(*now, kind=kind)
        for group in restored.param_groups:
            group["lr"] = 0.5
        dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
    rates = {"".join(sorted(names)): 10.0 ** -number for number, names in enumerate(before, 1)}
    assert [group["lr"] for group in restored.param_groups] == [rates["".join(sorted(names))] for names in now]
    assert all(group.keys() == optimizer.param_groups[0].keys() for group in restored.param_groups)
    for name in "".join(now):
        own, other = restored.state[model_too[name].weight], optimizer.state[model[name].weight]
        assert own.keys() == other.keys() and all(own[key].equal(other[key]) for key in own)
    restored.step()


@pytest.mark.parametrize(("saved", "own"), [(torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5))])
@pytest.mark.parametrize("empty", ["", "a"])
def test_a_rate_that_is_a_tensor_and_one_that_is_a_number(tmp_path, saved, own, empty):
    """A group gets the saved one, as by torch; the tensor was refused where the group has a number."""
    options = {"foreach": False}
    model, _ = make_pair("abc")
    groups = [[model[name].weight for name in names] for names in ("bc", empty)]
    optimizer = torch.optim.AdamW([{"params": group, "lr": saved, **options} for group in groups])
    optimizer.step()
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(tmp_path / "a")
    restored = torch.optim.AdamW([{"params": group, "lr": own, **options} for group in groups])
    dsq_ckpt.Compressor(model, restored).load(tmp_path / "a")
    for group in restored.param_groups:
        assert type(group["lr"]) is type(saved) and group["lr"] == 0.25
    restored.step()


@pytest.mark.parametrize(("now", "rates"), [
    (("", "ab", "", "c"), (0.1, 0.01, 0.001, 0.0001)), (("ab", "c", "", ""), (0.01, 0.0001, 0.001, 0.1)),
    (("", "", "", ""), (0.1, 0.01, 0.001, 0.0001)),
])
def test_several_groups_without_parameters(tmp_path, now, rates):
    """torch's own load refuses them, which came late. Each keeps its place where that is not another group's."""
    model, optimizer = save_groups(tmp_path / "a", "", "ab", "", "c")
    model_too, restored = make_pair(*now)
    restored.param_groups[0]["lr"] = 0.5
    groups = restored.param_groups
    dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
    assert [group["lr"] for group in restored.param_groups] == pytest.approx(rates)
    assert [len(group["params"]) for group in restored.param_groups] == [len(names) for names in now]
    for name in "".join(now):
        moment = restored.state[model_too[name].weight]["exp_avg"]
        assert moment.equal(optimizer.state[model[name].weight]["exp_avg"])
    assert len(groups) == 4  # torch makes a new list, and the one before may be used elsewhere


def test_a_failed_load_leaves_groups_without_parameters(tmp_path):
    save_groups(tmp_path / "a", "", "abc", "")
    model, optimizer = make_pair("", "abc", "")

    def refuse(*_):
        raise ValueError("no")

    optimizer.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(dsq_ckpt.LoadFailed, match="no"):
        dsq_ckpt.Compressor(model, optimizer).load(tmp_path / "a")
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 3, 0]


@pytest.mark.parametrize(("before", "now"), [("ab", "abc"), ("abc", "ab")])
def test_no_warning_where_there_is_no_state(tmp_path, before, now):
    """A frozen parameter has none, whether the optimizer has it or not."""
    model, optimizer = make_pair(before)
    model["c"].requires_grad_(False).weight.grad = None
    optimizer.step()
    dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a")
    model_too, restored = make_pair(now)
    model_too["c"].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")


def test_tied_parameters_may_have_another_of_their_names(tmp_path):
    """torch names them by the layer that comes first."""
    def tied(order):
        model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in order})
        model["c"].weight = model["a"].weight
        optimizer = torch.optim.AdamW(model.parameters())
        sum(layer(torch.ones(1, 8)).sum() for layer in model.values()).backward()
        return model, optimizer

    model, optimizer = tied("abc")
    optimizer.step()
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(tmp_path / "a")
    model_too, restored = tied("cba")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
    for name in "ab":
        moment = restored.state[model_too[name].weight]["exp_avg"]
        assert moment.equal(optimizer.state[model[name].weight]["exp_avg"])


@pytest.mark.parametrize(("groups", "message"), [
    (("abc",), "its group 0, with 'a.weight', 'b.weight', 'c.weight', has parameters of the saved groups 0 and 1"),
    (("ab", "c", ""), "its group 2, with no parameters, is no saved group"),
    (("ac", "b"), "its group 0, with 'a.weight', 'c.weight', has parameters of the saved groups 0 and 1"),
    (("a", "b"), "its group 1, with 'b.weight', has parameters of the saved group 0, and so has its group 0"),
])
def test_parameters_that_are_grouped_otherwise_are_refused(tmp_path, groups, message):
    """The first group was left without a learning rate, or had the one of others, without a word."""
    save_groups(tmp_path / "a", "ab", "c")
    model, optimizer = make_pair(*groups)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(dsq_ckpt.LoadFailed, match=message):
        dsq_ckpt.Compressor(model, optimizer).load(tmp_path / "a")
    assert not optimizer.state and all(before[name].equal(value) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match="'optimizer' of"):
        dsq_ckpt.Compressor(model).load(tmp_path / "a")


def test_an_optimizer_of_none_of_the_saved_parameters_is_refused(tmp_path):
    save_groups(tmp_path / "a", "a")
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"its group 0, with 'b\.weight', has parameters of no saved group"):
        dsq_ckpt.Compressor(*make_pair("b")).load(tmp_path / "a")


def test_state_that_is_not_restored_is_named(tmp_path):
    save_groups(tmp_path / "some", "ab", "c")
    with pytest.warns(UserWarning, match="the optimizer state of 'b.weight' in '.*some' was not loaded"):
        dsq_ckpt.Compressor(*make_pair("a", "c")).load(tmp_path / "some")
    save_groups(tmp_path / "few", "a", "c")
    with pytest.warns(UserWarning, match="no optimizer state of 'b.weight' was loaded, since the optimizer of '.*few'"):
        dsq_ckpt.Compressor(*make_pair("ab", "c")).load(tmp_path / "few")


def test_two_parameters_are_not_loaded_into_one(tmp_path):
    save_groups(tmp_path / "a", "abc")
    model, _ = make_pair("abc")
    model["c"].weight = model["a"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"'a.weight' and 'c.weight' as two parameters, which are tied"):
        dsq_ckpt.Compressor(model, optimizer).load(tmp_path / "a")


class Names(list):
    """Not plain data."""


def test_groups_of_more_than_plain_data_are_loaded_as_before(tmp_path):
    model, optimizer = make_pair("abc")
    compressor = dsq_ckpt.Compressor(model, optimizer)
    state = compressor.state()
    state["optimizer"]["param_groups"][0].update(params=Names(["a.weight", "b.weight", "c.weight"]), lr=0.25)
    dsq_ckpt.save(state, tmp_path / "a")
    compressor.load(tmp_path / "a")
    assert optimizer.param_groups[0]["lr"] == 0.25
