"""What an optimizer's `state_dict()` tells is the same after a load by a `Compressor`, whatever it has in it."""

import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import dsq_ckpt
from tests.helpers.odd_optimizers import (
    KINDS,
    CountingAdamW,
    ForwardingAdamW,
    HiddenStateAdamW,
    SlowWeights,
    leaves,
    make_trained_pair,
    train_on_noise,
)
from tests.helpers.training import compute_loss, train_model


@pytest.fixture(autouse=True)
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before, now", [
    (0, 9), (9, 0), (1, 1), (1, 9), (9, 1),  # state that comes and goes, stays, grows and shrinks
    *(pytest.param(*steps, marks=pytest.mark.campaign) for steps in ((0, 0), (0, 1), (1, 0), (9, 9))),
])
def test_all_that_an_optimizer_tells_comes_back(tmp_path, kind, before, now):
    """Keys beside state and groups, entries of no parameter, and all of a dict or list that grows with the steps."""
    model, optimizer = make_trained_pair(kind, before)
    dsq_ckpt.Compressor(model, optimizer, "exact").save(tmp_path / "a")
    model_too, restored = make_trained_pair(kind, now, seed=1)
    dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
    assert leaves(restored.state_dict()) == leaves(optimizer.state_dict())
    for module, own in ((model, optimizer), (model_too, restored)):
        train_on_noise(module, own, 3, seed=2)
    assert model.weight.equal(model_too.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_and_a_save_leave_the_optimizer_as_it_is(tmp_path, kind):
    model, optimizer = train_model(10, kind=kind)
    before = leaves(optimizer.state_dict())
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    warnings.simplefilter("ignore")  # of models after few steps
    compressor.save(tmp_path / "a")
    assert compressor.quality is not None and leaves(optimizer.state_dict()) == before


def test_a_checkpoint_without_such_keys_is_loaded(tmp_path):
    """They stay as they are, which is told once."""
    model, optimizer = make_trained_pair(CountingAdamW, 3)
    weights, moments = get_state_dict(model, optimizer)
    dsq_ckpt.save({"model": weights, "optimizer": moments}, tmp_path / "a", config="exact")
    model_too, restored = make_trained_pair(CountingAdamW, 1, seed=1)
    with pytest.warns(UserWarning) as caught:
        dsq_ckpt.Compressor(model_too, restored).load(tmp_path / "a")
    assert [str(warning.message).partition(", as it was")[0] for warning in caught] == [
        f"'{tmp_path / 'a'}' has no 'own', 'steps' of the optimizer, whose state_dict() has it"
    ]
    assert restored.own["steps"] == 1 and model_too.weight.equal(model.weight)
    assert leaves(restored.state_dict()["state"]) == leaves(optimizer.state_dict()["state"])


def test_keys_that_an_optimizer_does_not_tell_yet_are_plain_data(tmp_path):
    """No code of the checkpoint runs for what the optimizer does not name."""
    model, optimizer = make_trained_pair(CountingAdamW, 1)
    optimizer.own["more"] = {"path": tmp_path}
    with pytest.warns(UserWarning, match=r"'optimizer\.own\.more\.path' is pickled with"):
        dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a")
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"'optimizer\.own\.more\.path' is more than plain data"):
        dsq_ckpt.Compressor(*make_trained_pair(CountingAdamW)).load(tmp_path / "a")


class Around(torch.optim.SGD):
    """An optimizer around another one, whose state it has, with a state dict of another form, as Magma."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups[0]["params"])
        self.optimizer, self.state = optimizer, optimizer.state

    def state_dict(self):
        return {"base": self.optimizer.state_dict(), "rate": 0.5}


class AroundAdamW(torch.optim.Optimizer):
    """An optimizer around another one that alone has state, and whose state dict has none of it, as some SAMs."""

    def __init__(self, params):
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.AdamW(self.param_groups)
        self.base.outer = self  # a cycle
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step()


class WarmUp(ForwardingAdamW):
    """An optimizer around another one with a count and a rate of its own, which takes no closure."""

    count = 0

    def step(self):
        self.count += 1
        self.param_groups[0]["lr"] = 1e-4 * self.count
        self.optimizer.step()


class WithoutDefaults(torch.optim.Optimizer):
    """An optimizer around another one, with its groups and state and nothing else, as PostLocalSGDOptimizer."""

    def __init__(self, params):
        self.optim = torch.optim.AdamW(params)
        self.param_groups = self.optim.param_groups

    state = property(lambda self: self.optim.state)

    def state_dict(self):
        return self.optim.state_dict()

    def load_state_dict(self, state_dict):
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups

    def zero_grad(self, set_to_none=True):
        self.optim.zero_grad(set_to_none)

    def step(self):
        self.optim.step()


def test_an_optimizer_around_another_without_defaults(tmp_path):
    model, optimizer = make_trained_pair(WithoutDefaults, 3)
    dsq_ckpt.Compressor(model, optimizer, "exact").save(tmp_path / "a")
    other, around = make_trained_pair(WithoutDefaults)
    dsq_ckpt.Compressor(other, around, "exact").load(tmp_path / "a")
    assert leaves(around.state_dict()) == leaves(optimizer.state_dict())


def test_a_load_into_a_new_optimizer_around_another_counts_no_step(tmp_path):
    model, optimizer = make_trained_pair(WarmUp, 3)
    dsq_ckpt.Compressor(model, optimizer, "exact").save(tmp_path / "a")
    other, around = make_trained_pair(WarmUp)
    around.count = 3
    dsq_ckpt.Compressor(other, around, "exact").load(tmp_path / "a")
    assert around.count == 3 and leaves(around.state_dict()) == leaves(optimizer.state_dict())


def test_a_load_that_fails_keeps_the_state_of_an_inner_optimizer(tmp_path):
    model, optimizer = make_trained_pair(AroundAdamW, 3)
    before = leaves(optimizer.base.state_dict())
    with pytest.raises(dsq_ckpt.CheckpointNotFound):
        dsq_ckpt.Compressor(model, optimizer).load(tmp_path / "missing")
    assert before and leaves(optimizer.base.state_dict()) == before


@pytest.mark.parametrize("kind", [torch.optim.AdamW, HiddenStateAdamW])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_load_that_fails_leaves_the_optimizer_as_it_is(tmp_path, kind, steps):
    dsq_ckpt.Compressor(*make_trained_pair(kind, 1)).save(tmp_path / "a")
    model, optimizer = make_trained_pair(kind, steps)
    optimizer.zero_grad()
    before = leaves(optimizer.state_dict())
    with pytest.raises(dsq_ckpt.LoadFailed, match="missing"):
        dsq_ckpt.Compressor(model, optimizer).load(tmp_path / "a", extra={"missing": 0})
    assert leaves(optimizer.state_dict()) == before


def test_gradients_are_averaged_at_the_steps_of_an_inner_optimizer():
    """The one around it has no hooks."""
    model, optimizer = make_trained_pair(ForwardingAdamW)
    config = {"quantize": {"weights": {"codebook": {"fit": "kmeans", "protect": 0.01}}}}
    with dsq_ckpt.Compressor(model, optimizer, config, every=1) as compressor:
        train_on_noise(model, optimizer, 1)
        assert compressor._gradients().keys() == {"weight", "bias"}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, SlowWeights, ForwardingAdamW])
def test_wrappers_of_other_libraries_are_what_they_wrap(kind):
    """They step otherwise than the optimizer in them; one that is more than it wraps stays as it is."""
    accelerated = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    wrap_for_lightning = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer
    model, optimizer = make_trained_pair(kind)
    wrapper = accelerated.__new__(accelerated)  # a new one needs a state of the process
    wrapper.optimizer = optimizer
    wrap_for_ray = pytest.importorskip("ray.train.torch.train_loop_utils")._WrappedOptimizer
    wrappers = [wrapper, wrap_for_lightning(optimizer), wrap_for_lightning(wrapper), wrap_for_ray(optimizer)]
    for wrapped in wrappers:
        with dsq_ckpt.Compressor(model, wrapped) as compressor:
            assert compressor.optimizer is optimizer


def test_a_state_dict_of_another_form_is_refused_by_name(tmp_path):
    """An optimizer around another was unwrapped, and what it told beside that one was lost without a word."""
    model, optimizer = make_trained_pair(torch.optim.AdamW, 1)
    says = r"Around\.state_dict\(\) has 'base', 'rate' in place of .* by dsq_ckpt\.save and dsq_ckpt\.load"
    with pytest.raises(dsq_ckpt.ConfigError, match=says):
        dsq_ckpt.Compressor(model, Around(optimizer)).save(tmp_path / "a")
    assert dsq_ckpt.latest(tmp_path) is None


@pytest.mark.parametrize("state", [torch.zeros(64, 64), [torch.zeros(64, 64)], 1], ids=["tensor", "list", "int"])
def test_a_parameter_state_that_is_no_dict_is_refused_at_the_save(tmp_path, state):
    """The save was done, and no load succeeded: `'Tensor' object has no attribute 'items'`."""
    model, optimizer = make_trained_pair(torch.optim.SGD)
    optimizer.state[model.weight] = state
    says = rf"SGD\.state_dict\(\) has {type(state).__name__} in place of a dict .* by dsq_ckpt\.save and"
    with pytest.raises(dsq_ckpt.ConfigError, match=says):
        dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a")
    assert dsq_ckpt.latest(tmp_path) is None
