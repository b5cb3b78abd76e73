"""State that Trainer and Accelerate restore."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import LoadFailed
from dsq_ckpt.integrations.training_state import TrainingState
from tests.helpers.odd_optimizers import KINDS, CountingAdamW, leaves, make_pair, make_trained_pair, train_on_noise
from tests.helpers.stateful_modules import EXTRA, Metric, Remembering, hooked, observed, scaled, train
from tests.helpers.states import find_differences
from tests.helpers.tensor_subclasses import EightBits, equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
]


@pytest.mark.parametrize("steps", [0, 1])
def test_moments_of_a_class_of_their_own(tmp_path, steps):
    """As of torchao's optimizers, also in an optimizer that has not stepped; they came back as dicts of their parts."""
    model, optimizer = make_pair(EightBits, 2)
    dsq_ckpt.save(TrainingState([model], [optimizer]).collect(), tmp_path / "a")
    other, target = make_pair(EightBits, steps)
    TrainingState([other], [target]).restore(tmp_path / "a")
    assert equal(target.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    target.step()


def divided(order=(0, 1), rates=(1e-3, 1e-3), **changed):
    """A model whose optimizer has a group of matrices and one of vectors, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, changed.get("out", 64)), *changed.get("more", ()))
    groups = [
        {
            "params": [parameter for parameter in model.parameters() if parameter.dim() > 1],
            "weight_decay": 0.1, "lr": rates[0],
        },
        {
            "params": [parameter for parameter in model.parameters() if parameter.dim() < 2],
            "weight_decay": 0.0, "lr": rates[1],
        },
    ]
    optimizer = torch.optim.AdamW([groups[number] for number in order])
    model[1](model[0](torch.randn(4, 64))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save_training(directory, model, optimizer, **named):
    dsq_ckpt.save(TrainingState([model], [optimizer]).collect(), directory, **named)


def test_groups_are_found_by_the_names_of_their_parameters(tmp_path):
    """As by `dsq_ckpt.load`: their order may be another."""
    model, optimizer = divided()
    save_training(tmp_path / "a", model, optimizer, config="exact")
    other, target = divided((1, 0))
    for group in target.param_groups:
        group["weight_decay"] = 0.5
    TrainingState([other], [target]).restore(tmp_path / "a")
    assert [group["weight_decay"] for group in target.param_groups] == [0.0, 0.1]
    for own, was in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, was)
        assert torch.equal(target.state[own]["exp_avg"], optimizer.state[was]["exp_avg"])


def test_groups_in_another_order_whose_rates_differ_are_refused(tmp_path):
    """A schedule, which is stored apart, would give each the rate of another."""
    save_training(tmp_path / "a", *divided(rates=(1e-3, 1e-4)))
    other, target = divided((1, 0), (1e-3, 1e-4))
    with pytest.raises(LoadFailed, match="another order, and have different values of 'lr'"):
        TrainingState([other], [target]).restore(tmp_path / "a")
    other, target = divided(rates=(5e-3, 5e-3))
    TrainingState([other], [target]).restore(tmp_path / "a")
    assert [group["lr"] for group in target.param_groups] == [1e-3, 1e-4]


@pytest.mark.parametrize("changed", [{"out": 65}, {"more": [nn.Linear(64, 64)]}], ids=str)
@pytest.mark.parametrize("reversed_", [False, True])
def test_a_changed_model_is_told_the_way_to_go_on(tmp_path, changed, reversed_):
    models = [divided(), divided(**changed)]
    before, now = models[::-1] if reversed_ else models
    save_training(tmp_path / "a", *before)
    with pytest.raises(LoadFailed, match=rf"A changed model .*`dsq export {tmp_path}/a .* --part model`"):
        TrainingState([now[0]], [now[1]]).restore(tmp_path / "a")


@pytest.mark.parametrize("leave_out, said", [(0, "was in parameter group 0"), (1, "was in parameter group 1")])
def test_a_group_that_is_missing_is_named(tmp_path, leave_out, said):
    save_training(tmp_path / "a", *divided())
    other, target = divided()
    del target.param_groups[leave_out]
    with pytest.raises(LoadFailed, match=said):
        TrainingState([other], [target]).restore(tmp_path / "a")


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_model_of_another_dtype_is_cast_with_one_warning(tmp_path, dtypes):
    """As a Trainer without `attach` does; `allow_cast`, which the error named, could not be passed."""
    model, optimizer = made_as(dtypes[0])
    save_training(tmp_path / "a", model, optimizer, config="exact")
    other, target = made_as(dtypes[1])
    with pytest.warns(UserWarning, match=r"has 2 tensor\(s\) of another dtype than the model") as caught:
        TrainingState([other], [target]).restore(tmp_path / "a")
    assert len([warning for warning in caught if issubclass(warning.category, UserWarning)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainingState([other], [target]).restore(tmp_path / "a", quiet=True)
    for own, was in zip(other.parameters(), model.parameters(), strict=True):
        assert own.dtype == dtypes[1] and torch.equal(own, was.to(own.dtype))
        assert torch.equal(target.state[own]["exp_avg"], optimizer.state[was]["exp_avg"].to(own.dtype))


def made_as(dtype):
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64, dtype=dtype)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_base_layer_is_told_without_an_argument_that_cannot_be_passed(tmp_path):
    model, optimizer = divided()
    for number in range(2):
        save_training(tmp_path / str(number), model, optimizer, config={"refinement": {"keep_last": 1}})
    with pytest.warns(UserWarning, match="base layer alone") as caught:
        TrainingState([model], [optimizer]).restore(tmp_path / "0")
    messages = [str(warning.message) for warning in caught if "base layer" in str(warning.message)]
    assert len(messages) == 1 and "refinement=False" not in messages[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 9])
def test_all_that_an_optimizer_tells_comes_back(tmp_path, kind, steps):
    """Tensors among it too, and what belongs to no parameter: these failed, the latter at the first save."""
    model, optimizer = make_trained_pair(kind, 6)
    dsq_ckpt.save(TrainingState([model], [optimizer]).collect(), tmp_path / "a", config="exact")
    model_too, restored = make_trained_pair(kind, steps, seed=1)
    TrainingState([model_too], [restored]).restore(tmp_path / "a")
    assert leaves(restored.state_dict()) == leaves(optimizer.state_dict())


@pytest.mark.parametrize("name", EXTRA)
def test_a_model_is_given_its_extra_state_as_it_was_saved(tmp_path, name):
    given, before = EXTRA[name]
    source, target = Remembering(given), Remembering(copy.deepcopy(before))
    dsq_ckpt.save(TrainingState([source]).collect(), tmp_path / "a", config="exact")
    TrainingState([target]).restore(tmp_path / "a")
    assert find_differences({"state": target.state}, {"state": given}) == [] and type(target.state) is type(given)


def test_a_model_is_given_what_it_does_not_tell_yet_and_keeps_its_parameters(tmp_path):
    (source, first), (target, second) = scaled(3), scaled(0)
    dsq_ckpt.save(TrainingState([source], [first]).collect(), tmp_path / "a", config="exact")
    TrainingState([target], [second]).restore(tmp_path / "a")
    for pair in ((source, first), (target, second)):
        train(*pair, range(3, 6))
    assert find_differences(dict(target.state_dict()), dict(source.state_dict())) == []


def test_a_model_is_given_what_its_observers_and_metrics_saw(tmp_path):
    for make, seen in ((observed, (3, 0)), (lambda length: nn.Sequential(Metric(length)), (3, 2))):
        source, target = map(make, seen)
        dsq_ckpt.save(TrainingState([source]).collect(), tmp_path / make.__name__, config="exact")
        TrainingState([target]).restore(tmp_path / make.__name__)
        assert find_differences(dict(target.state_dict()), dict(source.state_dict())) == []


def test_a_model_that_does_not_take_all_is_refused(tmp_path):
    dsq_ckpt.save(TrainingState([hooked(3)]).collect(), tmp_path / "a", config="exact")
    with pytest.raises(LoadFailed, match=r"has '2.bias', '2.weight' in its model, which this model does not have"):
        TrainingState([hooked(2)]).restore(tmp_path / "a")


def test_several_models_are_known_by_the_names_of_their_tensors(tmp_path):
    """One of several was as good as none: what is rounded, frozen or a buffer was lossy."""
    torch.manual_seed(0)
    models = [nn.Sequential(type("BitLinear", (nn.Linear,), {})(64, 64)), nn.Linear(64, 64), nn.Linear(64, 64)]
    models[0].register_buffer("codebook", torch.randn(80, 64))
    models[1].weight.requires_grad_(False)
    optimizers = [torch.optim.AdamW(models[0].parameters()), torch.optim.AdamW(models[2].parameters())]
    for model, optimizer in zip((models[0], models[2]), optimizers, strict=True):
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    state = TrainingState(models, optimizers)
    dsq_ckpt.save(state.collect(), tmp_path / "a", model=state.model)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    state.restore(tmp_path / "a")
    assert models[0].state_dict().keys() == before[0].keys()
    assert all(value.equal(before[0][name]) for name, value in models[0].state_dict().items())
    assert models[1].weight.equal(before[1]["weight"]) and not models[2].weight.equal(before[2]["weight"])
    assert TrainingState([models[1]]).model is models[1] and TrainingState([]).model is None


def test_a_module_may_have_the_name_of_another_model(tmp_path):
    """The save failed, as if the optimizer had parameters of no model."""
    def make_training(steps):
        models = [nn.Sequential(), nn.Linear(64, 64)]
        models[0].add_module("model_1", nn.Linear(64, 64))
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
        for _ in range(steps):
            models[1](models[0](torch.randn(4, 64))).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return models, optimizers

    trained, fresh = make_training(2), make_training(0)
    state = TrainingState(*trained)
    dsq_ckpt.save(state.collect(), tmp_path / "a", config="exact", model=state.model)
    TrainingState(*fresh).restore(tmp_path / "a")
    for old, new in zip([*trained[0], *trained[1]], [*fresh[0], *fresh[1]], strict=True):
        assert not find_differences(old.state_dict(), new.state_dict())


class SignedMomentum(torch.optim.Optimizer):
    """One with an option of its own, and a part of the state that Adam has, as Lion."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4, "cautious": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert not group["cautious"]
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.sub_(average.lerp_(parameter.grad, 0.1).sign(), alpha=group["lr"])


def make_linear(kind, steps, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Linear(64, 64)
    optimizer = kind(model.parameters(), **options)
    train_on_noise(model, optimizer, steps, seed)
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("saved, now, lacks", [
    (torch.optim.Adam, torch.optim.Adamax, "'exp_inf'"), (torch.optim.Adam, torch.optim.NAdam, "'mu_product'"),
    (torch.optim.RMSprop, torch.optim.AdamW, "'exp_avg', 'exp_avg_sq'"),
])
def test_another_optimizer_without_its_state_is_refused(tmp_path, saved, now, lacks, steps):
    """As by `Compressor`; some failed with `KeyError: 'mu_product'`, and others at the next step."""
    save_training(tmp_path / "a", *make_linear(saved, 2))
    model, optimizer = make_linear(now, steps, seed=1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    says = f"has no {lacks} in the state of 'weight' in its 'optimizer', which {now.__name__} has"
    with pytest.raises(LoadFailed, match=says):
        TrainingState([model], [optimizer]).restore(tmp_path / "a", quiet=True)
    assert leaves(dict(enumerate((model.state_dict(), optimizer.state_dict())))) == leaves(dict(enumerate(before)))


@pytest.mark.parametrize("steps", [0, 2])
def test_another_optimizer_that_takes_the_state_is_told(tmp_path, steps):
    """By the second of Trainer's calls too; an option that was not saved was lost, so that the next step failed."""
    save_training(tmp_path / "a", *make_linear(torch.optim.AdamW, 2))
    model, optimizer = make_linear(SignedMomentum, steps, seed=1)
    with pytest.warns(UserWarning, match="lacks 'cautious' in its groups, so it is of another optimizer than Signed"):
        TrainingState([model], [optimizer]).restore(tmp_path / "a", quiet=True)
    train_on_noise(model, optimizer, 1)


def test_what_an_optimizer_cannot_be_given_is_an_error_with_the_checkpoint(tmp_path):
    save_training(tmp_path / "a", *make_linear(torch.optim.AdamW, 2))
    model, optimizer = make_linear(CountingAdamW, 0)
    with pytest.raises(LoadFailed, match=r"/a': CountingAdamW.load_state_dict found no 'own' in 'optimizer'"):
        TrainingState([model], [optimizer]).restore(tmp_path / "a")


@pytest.mark.parametrize("count, told", [(2, None), (1, "optimizer_1; to load them, prepare 2"), (0, "optimizer, opt")])
def test_optimizers_that_are_not_loaded_are_told_if_no_other_call_loads_them(tmp_path, count, told):
    """Trainer restores the model before the optimizer; Accelerate dropped moments of those not prepared in silence."""
    models, optimizers = zip(*(make_linear(torch.optim.AdamW, 1, seed) for seed in (0, 1)), strict=True)
    dsq_ckpt.save(TrainingState(models, optimizers).collect(), tmp_path / "a", config="exact")
    for has_all_optimizers in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            state = TrainingState(models, optimizers[:count])
            state.restore(tmp_path / "a", has_all_optimizers=has_all_optimizers)
        texts = [str(warning.message) for warning in caught if "fewer are prepared" in str(warning.message)]
        assert len(texts) == (has_all_optimizers and told is not None) and all(told in text for text in texts)


class RandomSigns(torch.optim.Optimizer):
    """One with a generator in the state of each parameter, which it makes unless told otherwise."""

    def __init__(self, parameters, lr=0.01, generators=True):
        super().__init__(parameters, {"lr": lr})
        self.generators = generators

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "steps" not in state:
                state.update(steps=0, **({"generator": torch.Generator()} if self.generators else {}))
            state["steps"] += 1
            signs = torch.randn(parameter.shape, generator=state.get("generator")).sign()
            parameter.sub_(signs, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("steps", [0, 2])
def test_objects_come_back_only_where_the_optimizer_has_them(tmp_path, steps):
    """By `allow_pickle`, which cannot be passed there, said the error: there was no way to load them."""
    model, optimizer = make_linear(RandomSigns, 3)
    with pytest.warns(UserWarning, match="'torch._C.Generator', which is more than plain data"):
        save_training(tmp_path / "a", model, optimizer, config="exact")
    other, target = make_linear(RandomSigns, steps, seed=1)
    TrainingState([other], [target]).restore(tmp_path / "a")
    for pair in ((model, optimizer), (other, target)):
        train_on_noise(*pair, 2)
    assert all(torch.equal(own, was) for own, was in zip(other.parameters(), model.parameters(), strict=True))
    other, target = make_linear(RandomSigns, steps, seed=1, generators=False)
    with pytest.raises(LoadFailed, match="is loaded only into an optimizer that has an object in its place") as caught:
        TrainingState([other], [target]).restore(tmp_path / "a")
    assert "allow_pickle" not in str(caught.value)


@pytest.mark.parametrize("steps", [0, 3])
def test_lists_with_other_values_than_tensors_are_loaded_without_a_warning(tmp_path, steps):
    """L-BFGS keeps `al` with None for what it has not used yet: a part of it was said to be lost, which came back."""

    def make_trained(steps, seed):
        torch.manual_seed(seed)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        batch = torch.randn(16, 64)

        def closure():
            optimizer.zero_grad()
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return model, optimizer

    model, optimizer = make_trained(2, 0)
    save_training(tmp_path / "a", model, optimizer, config="exact")
    other, target = make_trained(steps, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("default", module="torch")
        TrainingState([other], [target]).restore(tmp_path / "a")
    assert leaves(target.state_dict()) == leaves(optimizer.state_dict())


def test_state_of_replaced_parameters_is_told(tmp_path):
    """Accelerate replaces parameters by FSDP2's in place, also of an optimizer that makes state when it is made."""
    model = nn.Linear(3, 5)
    optimizer = torch.optim.Adagrad(model.parameters())
    model = nn.Linear(3, 5)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    state = TrainingState([model], [optimizer])
    with pytest.raises(dsq_ckpt.ConfigError, match=r"Adagrad has state of 2 tensor\(s\) .*shape \(5, 3\): .* Clear"):
        state.collect()
    optimizer.state.clear()
    assert state.collect()["optimizer"]["param_groups"]
