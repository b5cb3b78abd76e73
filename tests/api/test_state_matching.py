"""A load of a `Compressor` fills all that was saved of model and optimizer; saves and failed loads change neither."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dsq_ckpt
from dsq_ckpt.api.optimizer_state import require_gradients
from tests.api.test_compressor import bits_of, same_bits
from tests.helpers.training import train, train_model


@pytest.mark.parametrize("target", ["new", "other", "gradients"])
@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_no_step_has_changed_yet(tmp_path, target, frozen):
    """They have no moments, when a run is saved and after it was restored, whatever the optimizer had in between."""
    def make():
        model = nn.ModuleDict({name: nn.Linear(80, 80) for name in ("a", "b", "c")})
        return model, torch.optim.AdamW(model.parameters())

    def step(model, optimizer, *names):
        optimizer.zero_grad()
        sum(model[name](torch.ones(4, 80)).square().mean() for name in names).backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer, "a", "b")
    dsq_ckpt.Compressor(model, optimizer, config="exact", frozen=frozen).save(tmp_path / "a")
    model_too, restored = make()
    if target == "other":
        step(model_too, restored, "b", "c")
    elif target == "gradients":  # with which torch initializes no moments
        model_too["c"](torch.ones(4, 80)).sum().backward()
    dsq_ckpt.Compressor(model_too, restored, frozen=frozen).load(tmp_path / "a")
    for (name, parameter), other in zip(model.named_parameters(), model_too.parameters(), strict=True):
        before, now = optimizer.state.get(parameter, {}), restored.state.get(other, {})
        assert before.keys() == now.keys() and bool(now) == (name[0] != "c")
        assert all(before[key].equal(now[key]) for key in before)
    step(model, optimizer, "b", "c")
    step(model_too, restored, "b", "c")
    assert all(one.equal(other) for one, other in zip(model.parameters(), model_too.parameters(), strict=True))


@pytest.mark.parametrize("target", ["same", "new"])
def test_moments_of_parameters_that_are_frozen_for_a_while(tmp_path, target):
    """A layer that is frozen and trained again has the moments of before, however often the run is restored between.

    torch drops them at a load: after restores every ten steps, layers frozen for 40 steps kept 0.68 of their movement.
    """
    def make():
        model = nn.ModuleDict({name: nn.Linear(80, 80) for name in ("a", "b")})
        return model, torch.optim.AdamW([{"params": model[name].parameters()} for name in ("a", "b")])

    def step(model, optimizer):
        optimizer.zero_grad()
        model["b"](model["a"](torch.ones(4, 80))).square().mean().backward()
        optimizer.step()

    model, optimizer = make()
    model_too, restored = model, optimizer
    step(model, optimizer)
    model["a"].requires_grad_(False)
    step(model, optimizer)
    weights, moments = bits_of(model), copy.deepcopy(optimizer.state_dict()["state"])
    for number in range(2):
        dsq_ckpt.Compressor(model_too, restored, config="exact").save(tmp_path / str(number))
        if target == "new":
            model_too, restored = make()
            model_too["a"].requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dsq_ckpt.Compressor(model_too, restored).load(tmp_path / str(number))
        assert not any(parameter.requires_grad for parameter in model_too["a"].parameters())
        assert all(parameter.requires_grad for parameter in model_too["b"].parameters())
        assert same_bits(model_too, weights) and restored.state_dict()["state"].keys() == moments.keys()
        for key, state in restored.state_dict()["state"].items():
            assert state.keys() == moments[key].keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(state[name].equal(value) for name, value in moments[key].items())


def test_parameters_are_frozen_again_whatever_happens():
    """One that torch lets need no gradient, as it was made for inference, is left alone."""
    model = nn.Linear(4, 4).requires_grad_(False)
    with torch.inference_mode():
        model.bias = nn.Parameter(torch.ones(4), requires_grad=False)
    with pytest.raises(ValueError, match="the end"), require_gradients(model, {"weight", "bias"}):
        assert model.weight.requires_grad and not model.bias.requires_grad
        raise ValueError("the end")
    assert not model.weight.requires_grad


def test_moments_of_what_cannot_need_a_gradient_come_back(tmp_path):
    """As they do for other frozen parameters; torch drops those of one whose values were made in inference mode."""
    model, optimizer = train_model()
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(tmp_path / "a")
    for listed in (True, False):
        model_too, _ = train_model(0)
        with torch.inference_mode():
            values = torch.zeros(160, 64)
        frozen = model_too.hidden.weight = nn.Parameter(values, requires_grad=False)
        used = [parameter for parameter in model_too.parameters() if listed or parameter is not frozen]
        restored = torch.optim.AdamW(used)
        dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
        assert restored.state.keys() == set(used) and frozen.is_inference() and not frozen.requires_grad
        for parameter, other in zip(model.parameters(), model_too.parameters(), strict=True):
            before, now = optimizer.state[parameter], restored.state.get(other, {})
            assert all(now[key].equal(value) for key, value in before.items() if listed or other is not frozen)


def test_moments_under_other_names_are_not_left_out(tmp_path):
    model, optimizer = train_model()
    dsq_ckpt.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "numbers")
    dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "none")
    for name, said in (
        ("numbers", r"by the numbers of parameters.* load \{.*, 'optimizer': optimizer\} by dsq_ckpt\.load"),
        ("none", r"the checkpoint has no 'optimizer\.state\.embed\.weight\.step'"),
    ):
        with pytest.raises(dsq_ckpt.LoadFailed, match=said):
            dsq_ckpt.Compressor(model, optimizer).load(tmp_path / name)


def test_a_model_with_less_than_was_saved_is_refused(tmp_path):
    """A model of six of twelve layers was restored as if it were the one of twelve, without a word."""
    model, optimizer = train_model()
    dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a")
    del model.head
    less = torch.optim.AdamW(model.parameters())
    before = bits_of(model)
    with torch.no_grad():
        model.hidden.weight += 1
    for compressor in (dsq_ckpt.Compressor(model, less), dsq_ckpt.Compressor(model)):
        with pytest.raises(dsq_ckpt.LoadFailed, match=r"has 'head.bias', 'head.weight' in its model, which this model"):
            compressor.load(tmp_path / "a")
        assert model.hidden.weight.equal(before["hidden.weight"] + 1)
    dsq_ckpt.Compressor(model, frozen=False).load(tmp_path / "a")
    assert not model.hidden.weight.equal(before["hidden.weight"] + 1)


@pytest.mark.parametrize("options", [
    {"kind": torch.optim.AdamW}, {"kind": torch.optim.SGD, "momentum": 0.9, "dampening": 0.5},
    {"kind": torch.optim.ASGD},
], ids=["adamw", "sgd", "asgd"])
def test_a_save_before_the_first_step_changes_nothing(tmp_path, options):
    """Nor does a load that fails: torch initializes an optimizer by a step, after which Adam's first is its second."""
    expected, _ = train_model(3, **options)
    model, optimizer = train_model(0, **options)
    compressor = dsq_ckpt.Compressor(model, optimizer, {"system": "exact"})
    compressor.save(tmp_path / "0")
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(dsq_ckpt.CheckpointNotFound):
        compressor.load(tmp_path / "1")
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-2
    train(model, optimizer, 0, 2)
    compressor.load(tmp_path / "0")
    assert not optimizer.state
    torch.manual_seed(0)  # of dropout
    train(model, optimizer, 0, 3)
    assert same_bits(model, bits_of(expected))


@pytest.mark.parametrize("options", [
    ({"kind": torch.optim.Adam, "amsgrad": True}, {"kind": torch.optim.Adam}),
    ({"kind": torch.optim.RMSprop, "momentum": 0.9, "centered": True}, {"kind": torch.optim.RMSprop}),
], ids=["amsgrad", "rmsprop"])
@pytest.mark.parametrize("steps", [0, 2])
def test_state_that_the_saved_options_need_is_loaded_with_them(tmp_path, options, steps):
    """Groups come back with the options that were saved, and the next step needs the state that belongs to these."""
    saved_options, own = options
    model, optimizer = train_model(3, **saved_options)
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(tmp_path / "a")
    model_too, restored = train_model(steps, **own)
    dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
    for parameter, other in zip(model.parameters(), model_too.parameters(), strict=True):
        before, now = optimizer.state[parameter], restored.state[other]
        assert before.keys() == now.keys() and all(before[key].equal(now[key]) for key in before)
    train(model_too, restored, 3, 4)


def test_threads_that_save_before_the_first_step(tmp_path):
    """Each gave a parameter a gradient, and took it from the others: processes ended by a signal."""
    model, optimizer = train_model(0)
    compressor, threads, alone = dsq_ckpt.Compressor(model, optimizer), [], []

    def beside(*_):
        if not threads:
            threads.append(threading.Thread(target=compressor.state))
            threads[0].start()
            threads[0].join(1)
            alone.append(threads[0].is_alive())

    model.register_state_dict_pre_hook(beside)
    compressor.state()
    threads[0].join()
    assert alone == [True] and not optimizer.state and all(parameter.grad is None for parameter in model.parameters())


def test_a_hook_may_save_while_a_state_dict_is_made(tmp_path):
    """As the handler of a signal may, in the same thread: neither waits for the other."""
    model, optimizer = train_model(0)
    compressor, saves = dsq_ckpt.Compressor(model, optimizer), []

    def inside(*_):
        if not saves:
            saves.append(True)
            compressor.save(tmp_path / "a")

    model.register_state_dict_pre_hook(inside)
    thread = threading.Thread(target=compressor.state, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive() and dsq_ckpt.latest(tmp_path) is not None
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("saved_dtype", "own"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_another_dtype(tmp_path, saved_dtype, own):
    def make(dtype, seed):
        torch.manual_seed(seed)
        model = nn.Linear(80, 80).to(dtype)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make(saved_dtype, 0)
    model(torch.ones(4, 80, dtype=saved_dtype)).square().mean().backward()
    optimizer.step()
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(tmp_path / "a")
    compressor = dsq_ckpt.Compressor(*make(own, 1))
    with pytest.raises(dsq_ckpt.LossyTensor, match="pass allow_cast=True"):
        compressor.load(tmp_path / "a")
    compressor.load(tmp_path / "a", allow_cast=True)
    assert compressor.model.weight.equal(model.weight.to(own))
    moment = compressor.optimizer.state[compressor.model.weight]["exp_avg"]
    assert moment.equal(optimizer.state[model.weight]["exp_avg"].to(own))


def test_a_model_that_has_grown_is_told_how_to_load_the_rest(tmp_path):
    """DCP's planner then gives the old layers their weights and moments, bit for bit."""
    def make(*names):
        model = nn.ModuleDict({name: nn.Linear(80, 80) for name in names})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make("a", "b")
    sum(part(torch.ones(4, 80)).square().mean() for part in model.values()).backward()
    optimizer.step()
    dsq_ckpt.Compressor(model, optimizer, config="exact").save(tmp_path / "a")
    grown, other = make("a", "b", "c")
    weights, moments = get_state_dict(grown, other)
    state, new = {"model": weights, "optimizer": moments}, grown["c"].weight.detach().clone()
    says = r"no 'model\.c\.weight' .*\(a model that has grown .*allow_partial_load=True\)\); did you mean"
    with pytest.raises(dsq_ckpt.LoadFailed, match=says):
        dsq_ckpt.Compressor(grown, other).load(tmp_path / "a")
    with pytest.raises(dsq_ckpt.LoadFailed, match=says):
        dsq_ckpt.load(state, tmp_path / "a")
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "a"), planner=planner)
    set_state_dict(grown, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert grown["c"].weight.equal(new)
    for name in ("a", "b"):
        assert grown[name].weight.equal(model[name].weight)
        loaded, original = other.state[grown[name].weight], optimizer.state[model[name].weight]
        assert all(loaded[key].equal(original[key]) for key in original)


def test_a_parameter_without_gradient_before_the_save_is_told_how_to_load_the_rest(tmp_path):
    """Torch gives parameters of a new optimizer state that was not saved; both ways of the message leave it out."""
    def make():
        model = nn.ModuleDict({name: nn.Linear(80, 80) for name in ("a", "b")})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model["a"](torch.ones(4, 80)).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dsq_ckpt.save({"model": weights, "optimizer": moments}, tmp_path / "a", config="exact")
    weights, moments = get_state_dict(*make())
    says = r"no 'optimizer\.state\.b\.weight\.step' .*\(parameters that had no gradient .*\); did you mean"
    with pytest.raises(dsq_ckpt.LoadFailed, match=says):
        dsq_ckpt.load({"model": weights, "optimizer": moments}, tmp_path / "a")
    for is_compressor in (True, False):
        loaded, other = make()
        if is_compressor:
            dsq_ckpt.Compressor(loaded, other).load(tmp_path / "a")
        else:
            dsq_ckpt.load({"model": loaded, "optimizer": other}, tmp_path / "a")
        assert loaded["b"].weight.equal(model["b"].weight)
        assert other.state[loaded["a"].weight]["exp_avg"].equal(optimizer.state[model["a"].weight]["exp_avg"])
        assert loaded["b"].weight not in other.state


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("saved_class", "own"), [("AdamW", "SGD"), ("SGD", "AdamW")])
def test_state_of_an_optimizer_of_another_class_is_refused(tmp_path, saved_class, own, gradients):
    """Nothing is changed; with a gradient, torch initializes no state that would tell which entries are missing."""
    def make_training(kind, steps):
        options = {"kind": torch.optim.SGD, "momentum": 0.9} if kind == "SGD" else {}
        return train_model(steps, **options)

    dsq_ckpt.Compressor(*make_training(saved_class, 2)).save(tmp_path / "a")
    model, optimizer = make_training(own, 0)
    before = bits_of(model)
    for parameter in model.parameters() if gradients else ():
        parameter.grad = torch.ones_like(parameter)
    gradients_before = [parameter.grad for parameter in model.parameters()]
    key = "momentum_buffer" if own == "SGD" else "step"
    with (
        pytest.warns(UserWarning, match=f"it is of another optimizer than {own}"),
        pytest.raises(dsq_ckpt.LoadFailed, match=rf"has no 'optimizer\.state\.[a-z.]+\.{key}'"),
    ):
        dsq_ckpt.Compressor(model, optimizer).load(tmp_path / "a")
    assert same_bits(model, before) and not optimizer.state
    assert all(weight.grad is gradient for weight, gradient in zip(model.parameters(), gradients_before, strict=True))


def test_defaults_that_groups_do_not_take_are_not_missed(tmp_path, recwarn):
    """As of heavyball, whose defaults are the variables of its constructor, and whose groups get entries in steps."""
    class Widened(torch.optim.AdamW):
        def __init__(self, parameters, **options):
            super().__init__(parameters, **options)
            self.defaults["__class__"] = Widened

        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["base_lr"] = self.param_groups[0]["lr"]

    dsq_ckpt.Compressor(*train_model(2, kind=Widened)).save(tmp_path / "a")
    dsq_ckpt.Compressor(*train_model(0, kind=Widened)).load(tmp_path / "a")
    assert not any("another optimizer" in str(warning.message) for warning in recwarn)


def test_options_of_an_optimizer_of_another_class_are_told_of(tmp_path, recwarn):
    """No entry is missing if either has no state: the learning rate of the other was taken without a word."""
    for kind, steps in (("AdamW", 2), ("SGD", 2)):
        dsq_ckpt.Compressor(*train_model(steps, kind=getattr(torch.optim, kind))).save(tmp_path / kind)
        dsq_ckpt.Compressor(*train_model(0, kind=getattr(torch.optim, kind))).load(tmp_path / kind)
    dsq_ckpt.Compressor(*train_model(0, kind=torch.optim.Adam)).load(tmp_path / "AdamW")
    assert not any("another optimizer" in str(warning.message) for warning in recwarn)
    for saved_class, own in (("AdamW", "SGD"), ("SGD", "AdamW")):
        with pytest.warns(UserWarning, match=f"it is of another optimizer than {own}"):
            dsq_ckpt.Compressor(*train_model(0, kind=getattr(torch.optim, own))).load(tmp_path / saved_class)
